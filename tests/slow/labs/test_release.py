"""The archives of a release hold what they must, and the papers beside them agree."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hiddenscope as hs
from labs.release import contents, smoke
from tests.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NEEDED = ("build", "hatchling", "twine")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel that was built from it, as `make dist` builds them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed: `make setup-all` installs them"
        )
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture
def sdist(dist: Path) -> Path:
    (path,) = dist.glob("*.tar.gz")
    return path


def test_the_archives_have_no_fault(wheel: Path, sdist: Path) -> None:
    assert contents.wheel_faults(wheel) == []
    assert contents.sdist_faults(sdist) == []


def test_an_index_would_take_them(wheel: Path, sdist: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


@pytest.mark.parametrize("pattern", ["hiddenscope/views/static/*.js", "*/py.typed"])
def test_a_wheel_without_a_data_file_is_refused(
    pattern: str, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / wheel.name
    lost = ""
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(torn, "w") as part:
        for name in whole.namelist():
            if not lost and Path(name).match(pattern):
                lost = name
                continue
            part.writestr(name, whole.read(name))
    assert lost
    assert f"{wheel.name} lacks {lost}" in contents.wheel_faults(torn)
    # The smoke test ends before it makes an environment.
    assert smoke.main(["--wheel", str(torn)]) == 1
    assert lost in capsys.readouterr().err


def test_what_does_not_belong_into_an_archive_is_found(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    larger = tmp_path / wheel.name
    shutil.copy(wheel, larger)
    with zipfile.ZipFile(larger, "a") as archive:
        archive.writestr("tests/test_x.py", "")
        archive.writestr("hiddenscope/large.bin", bytes(contents.LARGEST_FILE + 1))
    faults = "\n".join(contents.wheel_faults(larger))
    assert "holds tests/test_x.py, which is not in the package" in faults
    assert "holds hiddenscope/large.bin of 2,000,001 bytes" in faults
    littered = tmp_path / sdist.name
    with tarfile.open(littered, "w:gz") as archive:
        link = tarfile.TarInfo("x/node_modules/y")
        link.type = tarfile.SYMTYPE
        archive.addfile(link)
    faults = "\n".join(contents.sdist_faults(littered))
    assert "holds a link: x/node_modules/y" in faults
    assert "holds node_modules/y, which a tool left behind" in faults
    assert "lacks pyproject.toml" in faults


def test_the_metadata_are_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("dist-info/METADATA")]
        fields = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    assert fields["Version"] == hs.__version__
    assert fields["Author"] == "The hiddenscope authors"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert set(fields.get_all("Provides-Extra") or []) == {
        "adapters",
        "app",
        "check",
        "dev",
        "docs",
        "export",
        "pacmap",
        "quantised",
        "ray",
        "test",
    }
    assert "Typing :: Typed" in (fields.get_all("Classifier") or [])


def test_every_dependency_is_pinned_and_has_its_reason() -> None:
    lines = [*PROJECT["dependencies"]]
    for extra in PROJECT["optional-dependencies"].values():
        lines += extra
    pinned = (ROOT / "constraints.txt").read_text("utf-8").splitlines()[1:]
    pins = dict(line.split("==") for line in pinned)
    decision = ROOT / "docs" / "decisions" / "0001-dependencies.md"
    reasons = decision.read_text("utf-8")
    for requirement in map(Requirement, lines):
        if requirement.name != "hiddenscope":
            assert requirement.specifier.contains(pins[requirement.name]), requirement
            assert re.search(rf"\b{requirement.name}\b", reasons), requirement


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    # The fields that the schema of CFF 1.2.0 requires.
    assert {"authors", "cff-version", "message", "title"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert str(citation["version"]) == hs.__version__
    assert citation["license"] == PROJECT["license"]
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    first = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert first and first[1] == hs.__version__
