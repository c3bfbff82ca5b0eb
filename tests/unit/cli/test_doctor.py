"""`hiddenscope doctor` on a healthy machine, and on machines where one thing is wrong."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from hiddenscope import diagnosis
from hiddenscope.cli import main as cli
from hiddenscope.diagnosis import Check
from hiddenscope.loading import zoo
from hiddenscope.loading.cache import build_once

Report = dict[str, Any]


def by_name(report: Report) -> dict[str, Report]:
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(folder))
    return folder


def test_lines_that_a_library_prints_are_passed_over() -> None:
    line = json.dumps(asdict(Check("devices", "cpu", "ok", "Fine.")))
    output = f"warming up\n[]\n{{}}\n{line}\n".encode()
    assert [check.message for check in diagnosis.read_checks(output)] == ["Fine."]


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
    check, _ = diagnosis.examine_cache()
    assert check.status == "problem"
    assert "Permission denied" in check.message
    assert "HIDDENSCOPE_CACHE" in check.remedy


@pytest.fixture
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the devices out: to import torch takes seconds."""
    monkeypatch.setattr(diagnosis, "examine_devices", lambda: iter(()))


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
    folder, size = diagnosis.examine_cache()
    assert (folder.status, size.facts["bytes"]) == ("ok", 0)
    list(diagnosis.examine_zoo())
    assert not cache.exists()


def test_a_damaged_model_is_a_problem(cache: Path) -> None:
    model = zoo.ZOO["minilm"]

    def build(part: Path) -> None:
        (part / "model.safetensors").write_bytes(b"12345678")

    folder = build_once(model.folder, build)
    checks = {check.name: check for check in diagnosis.examine_zoo()}
    assert checks["minilm"].status == "ok"
    assert checks["smollm2"].status == "note"
    # The same length, so that only the checksum tells.
    (folder / "model.safetensors").write_bytes(b"12345679")
    checks = {check.name: check for check in diagnosis.examine_zoo()}
    assert checks["minilm"].status == "problem"
    assert "model.safetensors" in checks["minilm"].message
    assert "Remove that folder" in checks["minilm"].remedy


def test_a_folder_of_wheels_that_is_not_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path))
    assert [check.status for check in diagnosis.examine_download()] == ["ok"]
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path / "nowhere"))
    assert [check.status for check in diagnosis.examine_download()] == ["problem"]


@pytest.fixture
def required(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Let the installed package require something else."""

    def require(lines: list[str]) -> None:
        monkeypatch.setattr(diagnosis.metadata, "requires", lambda _: lines)

    return require


def test_packages_are_held_to_what_the_package_asks_for(
    required: Callable[[list[str]], None],
) -> None:
    required(["numpy>=2", "torch>=99", "no-such-project>=1", "ray>=99; extra == 'ray'"])
    checks = {check.name: check for check in diagnosis.examine_packages()}
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
    checks = {check.name: check for check in diagnosis.examine_extras()}
    statuses = {name: check.status for name, check in checks.items()}
    others = dict.fromkeys(("adapters", "export", "pacmap", "quantised"), "ok")
    assert statuses == {"app": "note", "ray": "problem", **others}
    assert checks["app"].remedy == "Run `pip install 'hiddenscope[app]'`."


def test_damaged_metadata_of_a_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis.metadata, "version", lambda _: "not a version")
    problem = diagnosis.compare_package(Requirement("numpy>=2"))
    assert problem is not None


def test_another_version_on_the_path_is_a_problem() -> None:
    (same,) = diagnosis.examine_installation(metadata.version("hiddenscope"))
    (other,) = diagnosis.examine_installation("99.0")
    assert (same.status, other.status) == ("ok", "problem")
    assert "99.0 runs from" in other.message


@pytest.mark.usefixtures("_no_devices")
def test_a_check_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("torn\nin two")

    monkeypatch.setattr(diagnosis.metadata, "requires", fail)
    done = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert done.exit_code == 1
    checks = by_name(json.loads(done.stdout))
    assert "RuntimeError: torn)" in checks["packages"]["message"]
    assert checks["folder"]["status"] == "ok"


@pytest.mark.usefixtures("_no_devices")
def test_a_checkout_that_is_not_installed_is_a_note(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(diagnosis, "PROJECT", "hiddenscope-that-nobody-installed")
    done = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert done.exit_code == 0, done.stdout
    checks = by_name(json.loads(done.stdout))
    assert "packages" not in checks
    (note,) = [check for name, check in checks.items() if name.startswith("hidden")]
    assert (note["status"], "pip install" in note["remedy"]) == ("note", True)
