"""Measure what runs when hiddenscope is used: the slow part of `make figures`.

python -m docs.running save FOLDER      write a tiny model
python -m docs.running function         trace a second `hs.lens` on a loaded tiny model
python -m docs.running command FOLDER   trace `hiddenscope lens` on that model
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "src" / "hiddenscope") + "/"
SCRIPTS = ("src/hiddenscope/*/static/*.js", "docs/site/static/*.js")
TEXT = "The capital of France is"
OPTIMIZED = 1  # set in the code of functions, and not in that of modules and classes
ROUNDS = 7


class Trace:
    """Which functions of the package ran, and how many of its frames stood at once."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.deepest = 0
        self._local = threading.local()

    def run(self, act: Callable[[], object]) -> None:
        """Run what is to be traced, in this thread and those that it starts."""
        threading.setprofile(self._watch)
        sys.setprofile(self._watch)
        try:
            act()
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)

    def _watch(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGE) and code.co_flags & OPTIMIZED
        # A comprehension is a step of its function.
        if not ours or code.co_name[0] == "<" or event not in ("call", "return"):
            return
        depth = getattr(self._local, "depth", 0)
        if event == "call":
            depth += 1
            self.functions.add(code)
            self.deepest = max(self.deepest, depth)
        else:
            depth -= 1
        self._local.depth = depth

    @property
    def files(self) -> set[str]:
        """Return the files of which some function ran."""
        return {code.co_filename for code in self.functions}


def save_model(folder: str) -> None:
    """Write a tiny model with its tokenizer."""
    from hiddenscope.testing import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(folder)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(folder)


def trace_function() -> list[int]:
    """Return files, functions and depth of a second `hs.lens`."""
    import hiddenscope as hs
    from hiddenscope.testing import tiny_model, tiny_tokenizer

    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    hs.lens(model, TEXT)
    trace = Trace()
    trace.run(lambda: hs.lens(model, TEXT))
    return [len(trace.files), len(trace.functions), trace.deepest]


def trace_command(folder: str) -> list[int]:
    """Return how many modules `hiddenscope lens` imports, and how many of them run."""
    sys.argv = ["hiddenscope", "lens", TEXT, "--model", folder]
    trace = Trace()
    trace.run(lambda: import_module("hiddenscope.__main__").main())
    imported = [name for name in sys.modules if name.split(".")[0] == "hiddenscope"]
    return [len(imported), len(trace.files)]


def start_ratio() -> float:
    """Return the CPU time of `--help` over that of importing torch and transformers."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(_cpu_time("-m", "hiddenscope", "--help"))
        theirs.append(_cpu_time("-c", "import torch, transformers"))
    return statistics.median(ours) / statistics.median(theirs)


def _cpu_time(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *words]
    # An installed package is compiled, as torch is here; a checkout may not be.
    names = os.environ.keys() - {"PYTHONDONTWRITEBYTECODE"}
    environment = {name: os.environ[name] for name in names}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def running_rows() -> list[tuple[str, str, str]]:
    """Return the figures, each measured in processes of its own, beside their aims."""
    with tempfile.TemporaryDirectory() as folder:
        _ask(sys.executable, "-m", "docs.running", "save", folder)
        files, functions, depth = _ask(sys.executable, "-m", "docs.running", "function")
        command = (sys.executable, "-m", "docs.running", "command", folder)
        imported, executed = _ask(*command)
    scripts: list[str] = []
    for pattern in SCRIPTS:
        scripts += [str(path) for path in sorted(ROOT.glob(pattern))]
    script = _ask("node", "docs/figures.mjs", *scripts)
    return [
        (
            "files / functions that run in `hs.lens`",
            f"{files} / {functions}",
            "25 / 150",
        ),
        ("its deepest stack of frames", f"{depth}", "12"),
        ("modules that `hiddenscope lens` imports", f"{imported}", "150"),
        ("modules of which it runs a function", f"{executed}", "90"),
        ("`--help` / `import torch, transformers`", f"{start_ratio():.3f}", "0.07"),
        ("lines of scripts over 100 columns", f"{script['long']}", "0"),
        ("nested conditionals in scripts", f"{script['nested']}", "0"),
    ]


def _ask(*command: str) -> Any:
    """Run a command at the root, and return the JSON in the last line it prints."""
    ended = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    acts = {"save": save_model, "function": trace_function, "command": trace_command}
    print(json.dumps(acts[sys.argv[1]](*sys.argv[2:])))
