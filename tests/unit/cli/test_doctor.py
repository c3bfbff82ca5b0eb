"""`hiddenscope doctor` on a healthy machine, and on machines where one thing is wrong."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli import main as cli
from hiddenscope.diagnosis import caches, devices, environment
from hiddenscope.diagnosis.check import Check
from hiddenscope.loading import zoo
from hiddenscope.loading.cache import build_once

Report = dict[str, Any]


def run_doctor(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hiddenscope", "doctor", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def by_name(report: Report) -> dict[str, Report]:
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(folder))
    return folder


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


def test_whatever_is_not_well_has_a_remedy(healthy: Report) -> None:
    for check in healthy["checks"]:
        is_plain = check["status"] == "ok" or check["name"] == "cuda"
        assert is_plain or check["remedy"], check


def test_every_model_of_the_zoo_is_told_of(healthy: Report) -> None:
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
    (check,) = devices.examine_devices(seconds=2)
    assert (check.status, check.name) == ("problem", "torch")
    assert "did not answer within 2 seconds" in check.message


def test_a_torch_of_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('touched', 'w')")
    monkeypatch.chdir(tmp_path)
    list(devices.examine_devices())
    assert not (tmp_path / "touched").exists()


def test_lines_that_a_library_prints_are_passed_over() -> None:
    line = json.dumps(Check("devices", "cpu", "ok", "Fine.").as_json())
    output = f"warming up\n[]\n{{}}\n{line}\n".encode()
    assert [check.message for check in devices._checks(output)] == ["Fine."]


@pytest.fixture
def readonly() -> Iterator[Path]:
    """A folder that this process may read and not write, even if it is root's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        # Root may write anywhere, so be somebody else for a while.
        os.seteuid(65_534)
    yield folder
    if is_root:
        os.seteuid(0)
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("below", ["", "deep/cache"])
def test_a_cache_that_cannot_be_written_is_a_problem(
    below: str, readonly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(readonly / below))
    (check,) = caches.examine_cache_folder()
    assert check.status == "problem"
    assert "Permission denied" in check.message
    assert "HIDDENSCOPE_CACHE" in check.remedy


@pytest.fixture
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the devices out: to import torch takes seconds."""
    # The package gives the function of this name, not the module.
    module = sys.modules["hiddenscope.diagnosis.diagnose"]
    monkeypatch.setattr(module, "examine_devices", lambda: iter(()))


@pytest.mark.usefixtures("_no_devices")
def test_a_cache_below_a_file_is_a_problem_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == 1
    assert "1 thing must be mended" in done.stdout
    assert "MEND  folder" in done.stdout


def test_looking_at_a_cache_creates_nothing(cache: Path) -> None:
    assert [check.status for check in caches.examine_cache_folder()] == ["ok"]
    assert [check.facts["bytes"] for check in caches.examine_cache_size()] == [0]
    list(caches.examine_zoo())
    assert not cache.exists()


def test_a_damaged_model_is_a_problem(cache: Path) -> None:
    model = zoo.ZOO["minilm"]

    def build(part: Path) -> None:
        (part / "model.safetensors").write_bytes(b"12345678")

    folder = build_once(model.folder, build)
    checks = {check.name: check for check in caches.examine_zoo()}
    assert checks["minilm"].status == "ok"
    assert checks["smollm2"].status == "note"
    # The same length, so that only the checksum tells.
    (folder / "model.safetensors").write_bytes(b"12345679")
    checks = {check.name: check for check in caches.examine_zoo()}
    assert checks["minilm"].status == "problem"
    assert "model.safetensors" in checks["minilm"].message
    assert "Remove that folder" in checks["minilm"].remedy


def test_a_folder_of_wheels_that_is_not_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path))
    assert [check.status for check in caches.examine_download()] == ["ok"]
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path / "nowhere"))
    assert [check.status for check in caches.examine_download()] == ["problem"]


@pytest.fixture
def required(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Let the installed package require something else."""

    def require(lines: list[str]) -> None:
        monkeypatch.setattr(environment.metadata, "requires", lambda _: lines)

    return require


def test_packages_are_held_to_what_the_package_asks_for(
    required: Callable[[list[str]], None],
) -> None:
    required(["numpy>=2", "torch>=99", "no-such-project>=1", "ray>=99; extra == 'ray'"])
    checks = {check.name: check for check in environment.examine_packages()}
    assert set(checks) == {"torch", "no-such-project", "packages"}
    assert checks["torch"].message.endswith("is not >=99.")
    assert checks["torch"].remedy == "Run `pip install 'torch>=99'`."
    assert checks["no-such-project"].message == "It is not installed."
    assert set(checks["packages"].facts) == {"numpy"}


def test_a_missing_extra_is_a_note_and_an_old_one_a_problem(
    required: Callable[[list[str]], None],
) -> None:
    required(
        [
            "no-such-project>=1; extra == 'app'",
            "numpy>=99; extra == 'ray'",
            "numpy>=1; extra == 'pacmap'",
        ]
    )
    checks = {check.name: check for check in environment.examine_extras()}
    statuses = {name: check.status for name, check in checks.items()}
    others = dict.fromkeys(("adapters", "export", "pacmap", "quantised"), "ok")
    assert statuses == {"app": "note", "ray": "problem", **others}
    assert checks["app"].remedy == "Run `pip install 'hiddenscope[app]'`."


def test_damaged_metadata_of_a_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.metadata, "version", lambda _: "not a version")
    problem = environment.compare_package(Requirement("numpy>=2"))
    assert problem is not None


def test_another_version_on_the_path_is_a_problem() -> None:
    (same,) = environment.examine_installation(metadata.version("hiddenscope"))
    (other,) = environment.examine_installation("99.0")
    assert (same.status, other.status) == ("ok", "problem")
    assert "99.0 runs from" in other.message


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


@pytest.mark.usefixtures("_no_devices")
def test_a_check_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("torn\nin two")

    monkeypatch.setattr(environment.metadata, "requires", fail)
    done = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert done.exit_code == 1
    checks = by_name(json.loads(done.stdout))
    assert "RuntimeError: torn)" in checks["packages"]["message"]
    assert checks["folder"]["status"] == "ok"


@pytest.mark.usefixtures("_no_devices")
def test_a_checkout_that_is_not_installed_is_a_note(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(environment, "PROJECT", "hiddenscope-that-nobody-installed")
    done = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert done.exit_code == 0, done.stdout
    checks = by_name(json.loads(done.stdout))
    assert "packages" not in checks
    (note,) = [check for name, check in checks.items() if name.startswith("hidden")]
    assert (note["status"], "pip install" in note["remedy"]) == ("note", True)
