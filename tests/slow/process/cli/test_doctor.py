"""`hiddenscope doctor` in a process of its own, with a torch that is well or broken."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import hiddenscope as hs
from hiddenscope import diagnosis
from hiddenscope.loading import zoo
from tests.unit.cli.test_doctor import Report, by_name


def run_doctor(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hiddenscope", "doctor", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("cache")
    done = run_doctor("--json", HIDDENSCOPE_CACHE=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    report: Report = json.loads(done.stdout)
    return report


def test_a_healthy_machine_is_healthy(healthy: Report) -> None:
    assert healthy["healthy"]
    checks = by_name(healthy)
    assert not [check for check in healthy["checks"] if check["status"] == "problem"]
    assert checks["hiddenscope"]["facts"]["version"] == hs.__version__
    for name in ("torch", "transformers", "numpy"):
        assert checks["packages"]["facts"][name] == metadata.version(name)
    assert checks["cpu"]["facts"]["threads"] >= 1
    assert checks["memory"]["facts"]["free_bytes"] > 10**6
    assert {check["group"] for check in healthy["checks"]} == {
        "environment",
        "extras",
        "cache",
        "devices",
    }
    for check in healthy["checks"]:
        is_plain = check["status"] == "ok" or check["name"] == "cuda"
        assert is_plain or check["remedy"], check
    assert set(zoo.ZOO) <= set(by_name(healthy))


def test_the_command_imports_no_torch_into_its_own_process(tmp_path: Path) -> None:
    program = (
        "import sys; from hiddenscope.cli.main import app;"
        "app(['doctor', '--json'], standalone_mode=False);"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        # A torch that is imported at once, wherever that happens.
        env=os.environ | foreign_torch(tmp_path, ""),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False False"


def foreign_torch(folder: Path, source: str) -> dict[str, str]:
    """Return an environment in which `import torch` runs this source."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(source)
    return {"PYTHONPATH": str(folder), "HIDDENSCOPE_CACHE": str(folder / "cache")}


BROKEN = {
    "raises": ("raise ImportError('libtorch_cpu.so: cannot open')", "libtorch_cpu.so"),
    "ends the process": ("import os; os._exit(3)", "exit code 3"),
    "is killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
        "signal SIGILL",
    ),
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_torch_is_a_problem_and_the_other_checks_are_made(
    way: str, tmp_path: Path
) -> None:
    source, message = BROKEN[way]
    done = run_doctor("--json", **foreign_torch(tmp_path, source))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    problems = [check for check in report["checks"] if check["status"] == "problem"]
    assert [check["name"] for check in problems] == ["torch"]
    assert message in problems[0]["message"]
    assert "pip install --force-reinstall torch" in problems[0]["remedy"]
    assert by_name(report)["folder"]["status"] == "ok"


def test_a_torch_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in foreign_torch(tmp_path, "import time; time.sleep(600)").items():
        monkeypatch.setenv(name, value)
    (check,) = diagnosis.examine_devices(seconds=2)
    assert (check.status, check.name) == ("problem", "torch")
    assert "did not answer within 2 seconds" in check.message
    assert check.remedy.startswith("Run `hiddenscope doctor` again")


def test_a_torch_of_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('touched', 'w')")
    monkeypatch.chdir(tmp_path)
    list(diagnosis.examine_devices())
    assert not (tmp_path / "touched").exists()


def test_hostile_paths_and_messages_are_escaped_on_a_terminal_and_whole_in_json(
    tmp_path: Path,
) -> None:
    hostile = str(tmp_path / "a\x1b[31mred\u202e")
    source = "raise ImportError('\\x1b]0;title\\x07')"
    variables = foreign_torch(tmp_path, source) | {"HIDDENSCOPE_CACHE": hostile}
    text = run_doctor(**variables).stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert r"a\x1b[31mred\u202e" in text
    assert r"ImportError: \x1b]0;title\x07" in text
    report = json.loads(run_doctor("--json", **variables).stdout)
    assert by_name(report)["folder"]["facts"]["path"] == hostile
