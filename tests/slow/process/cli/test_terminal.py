"""A command in a terminal: it refuses quickly, says what it does, and stops when it is
told to. Real processes all.
"""

import csv
import http.client
import os
import pty
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli import main as cli
from hiddenscope.store import verify
from hiddenscope.store.folder import StoreFolder
from tests.slices import sliced

COMMANDS = get_command(cli.app).commands  # type: ignore[attr-defined]
TEXT = "The capital of France is Paris."
STEER = ["--toward", "The capital", "--away", "of France"]
PATCH = ["The capital", "of France", "--answer", " x", "--other", " y"]
SERIES = ["smollm2", "gemma3-270m", "--texts", "cities-incomplete"]
RIGHT: dict[str, list[str]] = {
    "demo": [],
    "capture": [TEXT],
    "anatomy": [],
    "profile": [TEXT],
    "compare": [TEXT, TEXT],
    "drift": ["smollm2", TEXT],
    "series": SERIES,
    "project": ["cities-incomplete"],
    "lens": [TEXT],
    "visibility": [TEXT],
    "attention": [TEXT],
    "contributions": [TEXT, "--answer", " x"],
    "probe": [],
    "examples": [TEXT, "--direction", "layer.2.mlp.neuron.3"],
    "features": [TEXT, "--dictionary", "pca", "--site", "layer.2"],
    "patch": PATCH,
    "variable": ["pairs.jsonl"],
    "edges": PATCH,
    "graft": ["smollm2", "cities-incomplete"],
    "circuit": PATCH,
    "steer": [TEXT, *STEER],
    "embed": [TEXT],
    "search": ["cities-complete", TEXT],
    "cluster": [TEXT],
    "models": [],
}
WRONG_OPTIONS = {
    "sites": "--sites laier.3|--sites layer.9 --model {folder}",
    "site": "--site laier.3|--site layer.9 --model {folder}",
    "out": "--out x.docx|--out nowhere/x.json",
    "device": "--device gpu",
    "dtype": "--dtype float33",
    "view": "--out x.png --view tree|--view grid",
    "width": "--out x.html --width page|--out x.png --width wide",
    "text_column": "--text review",
}
WRONG: list[list[str]] = [
    [name, *RIGHT[name], *option.split()]
    for name in RIGHT
    for key, options in WRONG_OPTIONS.items()
    if key in {parameter.name for parameter in COMMANDS[name].params}
    for option in options.split("|")
]
WITH_TEXTS = ("capture", "profile", "visibility", "embed", "lens")
WRONG += [[name, *RIGHT[name], extra] for name in WITH_TEXTS for extra in ("", " ")]
WRONG += [[name, "corpus.txt"] for name in WITH_TEXTS]
# What must be given is not there.
WRONG += [[name] for name, words in RIGHT.items() if words]
WRONG += [["contributions", TEXT], ["compare", TEXT], ["nothing"]]
WRONG += [[name, "--states", "nowhere"] for name in ("profile", "project", "cluster")]
WRONG += [["search", TEXT, "--states", "nowhere"], ["search", "nosuch.txt", TEXT]]
WRONG += [[name, "no-such-dataset"] for name in ("project", "probe")]
WRONG += [
    ["series", *words.split()]
    for words in (
        "smollm2 --texts cities-incomplete",
        "smollm2 gemma3-270m --texts no-such-dataset",
    )
]
WRONG += [
    ["series", *SERIES, *words.split()]
    for words in (
        "--analysis patch",
        "--against last",
        "--option k",
        "--option k=3",
        "--quantise int8",
        "--strength 0.5",
        "--adapter lora --strength half",
    )
]
WRONG += [
    ["compare", "", TEXT],
    ["compare", TEXT, "--other", "smollm2", "--other-dtype", "float33"],
    ["drift", "smollm2", TEXT, "--candidate-dtype", "float33"],
    ["circuit", *PATCH, "--ablation", "ones"],
    ["circuit", *PATCH, "--random", "-1"],
    *([name, *PATCH, "--more", "nowhere.csv"] for name in ("circuit", "patch")),
    ["graft", "smollm2", "no-such-dataset"],
    ["lens", TEXT, "--fit", "tuned"],
    ["steer", TEXT, "--toward", "a"],
    ["steer", TEXT, *STEER, "--strengths", "one"],
    ["steer", TEXT, *STEER, "--quality", "nosuch"],
    ["patch", *PATCH[:2], "--answer", " x"],
    ["edges", *PATCH, "--method", "attribution"],
    ["edges", *PATCH, "--sample", "-1"],
    ["fit", "nowhere", "--to", "sae", "--features", "16"],
    ["examples", TEXT],
    ["models", "--dtype", "float32"],
    *([name, *RIGHT[name], "--model", "{headless}"] for name in ("lens", "patch")),
]


def test_every_command_has_wrong_arguments() -> None:
    others = {"serve", "store", "extract", "fit", "doctor"}
    assert set(RIGHT) == set(COMMANDS) - others
    assert {words[0] for words in WRONG} >= set(RIGHT)


def test_wrong_arguments_are_told_without_torch(
    folder: str, headless: str, tmp_path: Path
) -> None:
    wrong = [
        [word.format(folder=folder, headless=headless) for word in words]
        for words in WRONG
    ]
    right = [[name, *words] for name, words in RIGHT.items()]
    right += [shlex.split(group.example) for group in cli.COMMAND_GROUPS]
    program = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them raises
from typer.testing import CliRunner
from hiddenscope.cli.main import app
for words in {wrong!r}:
    done = CliRunner().invoke(app, words)
    fine = done.exit_code == 2 and done.stderr and not done.stdout and "unexpected" not in done.stderr
    print("fine" if fine else "NOT", words, done.exit_code, done.output)
for name, *words in {right!r}:
    done = CliRunner().invoke(app, [name, *words])
    if name != "models" and "halted" not in done.stderr:  # so it is the wrong part that is refused above
        print("NOT", name, words, done.output)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.count("fine [") == len(WRONG), done.stdout[
        done.stdout.find("NOT [") :
    ][:2000]
    assert "NOT" not in done.stdout, done.stdout[done.stdout.find("NOT") :][:2000]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled texts that take a while."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.csv"
    with path.open("w", newline="") as file:
        rows = [(f"{TEXT} " * (1 + k % 7) + str(k), k % 2) for k in range(600)]
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


LONG = " ".join(TEXT.split() * 60)
INTERRUPTED: dict[str, tuple[list[str], str]] = {
    "project": (["{corpus}"], "Drawing by umap"),
    "steer": ([TEXT, *STEER, "--new-tokens", "1500"], "Measuring the perplexity"),
    "patch": (
        [f"{LONG} capital", f"{LONG} France", "--answer", " of", "--other", " is"],
        "Patching",
    ),
    "visibility": ([LONG, "--influence", "frobenius"], "Looking back"),
    "probe": (["{corpus}", "--pool", "mean"], "Probing"),
    "drift": (["{folder}", "@{corpus}"], "Comparing"),
}


def started(
    words: list[str], marker: str = "HIDDENSCOPE_TEST", **options: Any
) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        marker: "1",
    }
    call = [sys.executable, "-m", "hiddenscope", *words]
    return subprocess.Popen(
        call, stdout=subprocess.PIPE, text=True, env=environment, **options
    )


def test_ctrl_c_stops_what_takes_long(
    folder: str, corpus: Path, tmp_path: Path
) -> None:
    place = ["--model", folder, "--device", "cpu", "--dtype", "float32", "--progress"]

    def interrupted(name: str) -> tuple[list[str], int, str]:
        words, step = INTERRUPTED[name]
        given = [word.format(corpus=corpus, folder=folder) for word in words]
        out = ["--out", str(tmp_path / f"{name}.html")]
        seen = [""]
        with started([name, *given, *place, *out], stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            while (line := process.stderr.readline()) and not line.startswith(step):
                seen.append(line)
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
        return [*seen, line], process.returncode, said

    # The first draws in other processes, and the last compares two models.
    names = sliced(list(INTERRUPTED), 1)
    with ThreadPoolExecutor(len(names)) as threads:
        for name, (seen, code, said) in zip(
            names, threads.map(interrupted, names), strict=True
        ):
            assert seen[-1], (name, seen)
            assert (code, said.count("Stopped.")) == (130, 1), (name, said)
            assert (
                said.endswith("Stopped.\n")
                and "Traceback" not in said
                and "Exception ignored" not in said
            ), said
    assert {path.name for path in tmp_path.iterdir()} <= {"project.html"}, (
        "it was written by PCA first"
    )


def with_marker(marker: str) -> list[int]:
    """The processes that live and have a variable of this name in their environment, so
    that ours started them.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if (
                f"{marker}=1".encode() in path.read_bytes()
                and "Z" not in path.with_name("stat").read_text()
            ):
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stops_a_job_that_goes_on_later(
    folder: str, tmp_path: Path, workers: int
) -> None:
    marker, store = f"HIDDENSCOPE_TEST_{secrets.token_hex(8)}", tmp_path / "store"
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{TEXT} " * 100 + f"{number}\n" for number in range(120))
    )
    words = [
        "extract",
        str(tmp_path / "corpus.txt"),
        "--to",
        str(store),
        "--model",
        folder,
        "--threads",
        "1",
    ]
    words += ["--device", "cpu", "--json", "--unit-tokens", "30000"]
    with started(
        [*words, "--workers", str(workers)], stderr=subprocess.PIPE, marker=marker
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        # Until a unit is committed.
        while line and ('"progress"' not in line or '"units_done": 0' in line):
            line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130, said
    kept = re.search(
        r"Stopped: (\d) of (\d) units are kept in \S+; the same command again goes"
        r" on\.\n$",
        said,
    )
    assert kept and 1 <= int(kept[1]) <= int(kept[2]) and int(kept[2]) > 2, said
    assert (
        said.count("Stopped") == 1
        and "Traceback" not in said
        and "Exception ignored" not in said
    ), said
    while with_marker(marker):  # a worker ends when it sees that its pipe is closed
        time.sleep(0.1)
    StoreFolder(store).remove_leftovers()  # what a process still held would stay
    assert list((store / "tmp").iterdir()) == []
    assert verify(store).intact and len(verify(store).pending) == int(kept[2]) - int(
        kept[1]
    )
    # Here, without the time that other processes take to start.
    done = CliRunner().invoke(cli.app, words)
    assert (
        f'"units_left": {int(kept[2]) - int(kept[1])}' in done.stdout
        and done.exit_code == 0
    )
    assert verify(store).intact and verify(store).complete


@pytest.mark.skipif(
    find_spec("uvicorn") is None, reason="the workbench is not installed"
)
def test_ctrl_c_stops_the_workbench(folder: str) -> None:
    marker = f"HIDDENSCOPE_TEST_{secrets.token_hex(8)}"
    with started(
        ["serve", "--no-open", "--json"], stderr=subprocess.PIPE, marker=marker
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        said = ""
        while (line := process.stdout.readline()) and not line.startswith("}"):
            said += line
        address = re.search(r"127\.0\.0\.1:(\d+)", said)
        assert address, said
        connection = http.client.HTTPConnection("127.0.0.1", int(address[1]))
        connection.request("GET", "/")
        assert connection.getresponse().status == 401  # it answers whoever has no token
        connection.close()
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    assert (
        process.returncode == 130
        and told.endswith("Stopped.\n")
        and "Traceback" not in told
    ), told
    while with_marker(marker):
        time.sleep(0.1)
    with socket.socket() as trial:
        assert trial.connect_ex(("127.0.0.1", int(address[1]))), "the port is free"


def test_ctrl_c_while_a_model_is_loaded_and_a_status_line_before(
    folder: str,
) -> None:
    ours, theirs = pty.openpty()
    try:
        process = started(["capture", TEXT, "--model", folder], stderr=theirs)
        os.close(theirs)
        said = ""
        while not re.search(r"Loading \S+ \(\d+K, float32\) \d+\.\d s", said):
            said += os.read(ours, 4096).decode()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
        while "Stopped." not in said:
            said += os.read(ours, 4096).decode()
    finally:
        os.close(ours)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in said and "\x1b[2K" in said


def test_the_status_is_shown_before_the_command_line_is_imported() -> None:
    call = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "hiddenscope",
        "lens",
        "--progress",
        "--nosuch",
    ]
    done = subprocess.run(call, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    imported = [
        line.rpartition("|")[2].strip()
        for line in lines[: lines.index("Running lens ...")]
    ]
    assert not {
        "typer",
        "pydantic",
        "numpy",
        "xarray",
        "torch",
        "hiddenscope.cli",
    } & set(imported)
    assert done.returncode == 2 and "No such option: --nosuch" in lines[-1]
    assert lines.count("Running lens ...") == 1


def test_the_status_is_shown_once_and_gone_before_anything_is_printed() -> None:
    for words in (["lens", "--nosuch"], ["models"]):
        ours, theirs = pty.openpty()
        process = started(words, stderr=theirs)
        os.close(theirs)
        out, _ = process.communicate()
        said = read_all(ours)
        status, _, rest = said.rpartition(progress.ERASE)
        assert f"Running {words[0]}" in status and "Running" not in rest, said
        assert rest if process.returncode else out, said


def read_all(terminal: int) -> str:
    """What a process that has ended wrote to a terminal."""
    said = b""
    try:
        while part := os.read(terminal, 4096):
            said += part
    except OSError:  # Linux ends a terminal with an error
        pass
    finally:
        os.close(terminal)
    return said.decode()


@pytest.mark.parametrize("words", [["models"], ["lens", "--progress", "--help"]])
def test_no_status_where_none_was_asked_for(words: list[str]) -> None:
    with started(words, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert "Running" not in process.stderr.read()


def test_the_version_is_printed_without_the_command_line() -> None:
    call = [sys.executable, "-X", "importtime", "-m", "hiddenscope", "--version"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout == f"{hs.__version__}\n"
    assert "typer" not in done.stderr


def test_ctrl_c_while_it_starts() -> None:
    program = (
        "import os, signal, hiddenscope.__main__; os.kill(os.getpid(), signal.SIGINT);"
        " print('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")


def test_what_ctrl_c_says_is_said_whole_however_long_it_takes_to_find_out() -> None:
    """The thread that ends the process after a moment waits for the one that is about
    to say how to go on.
    """
    program = """
import os, signal, time
from hiddenscope.cli import endings
def how_to_resume():
    time.sleep(3 * endings.GRACE)  # as on a busy machine
    return "3 of 5 units are kept."
endings.watch()
try:
    with endings.guarded(), endings.explaining_resume(how_to_resume):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
except KeyboardInterrupt:
    endings.leave()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "Stopped: 3 of 5 units are kept.\n")


COMPLETED = {
    "hiddenscope le": "lens",
    "hiddenscope lens --model smol": "smollm2",
    "hiddenscope project cities-": "cities-incomplete",
}


@pytest.mark.parametrize("typed", COMPLETED)
def test_a_shell_completes(typed: str) -> None:
    asked = {
        "_HIDDENSCOPE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    call = [sys.executable, "-m", "hiddenscope"]
    done = subprocess.run(
        call, capture_output=True, text=True, check=True, env={**os.environ, **asked}
    )
    assert COMPLETED[typed] in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 1, "stdout is closed"),
        (">/dev/full", 2, "No space left on device"),
        ("| head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_a_stdout_that_cannot_be_written_gives_the_usual_exit_code(
    redirection: str, code: int, message: str
) -> None:
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    call = (
        f"{sys.executable} -c 'from hiddenscope.cli.main import main; main()' models"
        " --json"
    )
    script = f"{call} {redirection}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ended.returncode in ((code, 0) if code == 141 else (code,)), ended.stderr
    assert (
        message in ended.stderr
        and "Traceback" not in ended.stderr
        and "unexpected" not in ended.stderr
    )


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_a_full_disk_is_an_error_of_help_too(word: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with Path("/dev/full").open("w") as full:
        call = [sys.executable, "-m", "hiddenscope", word]
        ended = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (
        2,
        "Cannot print: No space left on device.\n",
    )


def test_a_closed_stdin_is_an_error() -> None:
    script = (
        f"{sys.executable} -c 'from hiddenscope.cli.main import main; main()' capture"
        " - <&-"
    )
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (
        ended.returncode == 2
        and "stdin" in ended.stderr
        and "Traceback" not in ended.stderr
    )
