"""Files appear whole or not at all."""

import os
import shutil
from pathlib import Path

import pytest

from hiddenscope.errors import FileError
from hiddenscope.files import replacing


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)]
)
def test_nothing_is_left_after_an_error(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "x").write_text("old")

    def save() -> None:
        with replacing(tmp_path / "x") as fresh:
            fresh.write_text("half")
            raise error

    with pytest.raises(type(error)):
        save()
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (
        tmp_path / "x"
    ).read_text() == "old"


@pytest.mark.parametrize(
    "name", ["x" * 300, "ü" * 200 + ".nc", "no/such/folder/x", "file/x", "x\0y"]
)
def test_a_place_that_cannot_be_written_is_a_file_error(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError) as caught, replacing(tmp_path / name) as fresh:
        fresh.write_text("new")
    assert "Cannot write" in str(caught.value) and len(str(caught.value)) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="a folder in which even root cannot write"
)
def test_a_folder_in_which_nobody_can_write_is_a_file_error() -> None:
    with (
        pytest.raises(FileError, match="Cannot write"),
        replacing("/proc/self/x") as fresh,
    ):
        fresh.write_text("new")


@pytest.mark.skipif(
    os.name == "nt", reason="a file that is open cannot be removed there"
)
def test_a_folder_that_vanishes_while_it_is_written_is_a_file_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(FileError, match="Cannot write"),
        replacing(tmp_path / "folder" / "x") as fresh,
    ):
        shutil.rmtree(fresh.parent)


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_read_only_folder_is_a_file_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        pytest.raises(FileError, match="Cannot write"),
        replacing(tmp_path / "x") as fresh,
    ):
        fresh.write_text("new")
    tmp_path.chmod(0o700)
