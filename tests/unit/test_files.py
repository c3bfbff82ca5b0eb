"""Files appear whole or not at all, and what a killed process leaves is removed by the
next one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hiddenscope.errors import FileError
from hiddenscope.files import replacing

SLOW = """
import sys
from hiddenscope.files import replacing
with replacing(sys.argv[1]) as fresh:
    fresh.write_bytes(bytes(1000))
    print("busy", flush=True)
    sys.stdin.readline()
"""


def saving(path: Path) -> "subprocess.Popen[str]":
    """A process that saves a file, and waits for a line on its stdin before it is done."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path)], text=True, **pipes
    )  # type: ignore[call-overload]
    assert process.stdout.readline() == "busy\n"
    return process  # type: ignore[no-any-return]


def test_what_a_killed_save_left_goes_with_the_next_and_a_save_at_work_is_left_alone(
    tmp_path: Path,
) -> None:
    target = tmp_path / "a [1].x.nc"
    with saving(target) as killed, saving(target) as alive:
        killed.kill()
        killed.wait()
        (tmp_path / ".a [1].x.12345678.nc2").write_text("not ours")
        (tmp_path / ".b.12345678.nc").write_text("another file's")
        assert len(list(tmp_path.iterdir())) == 4
        with replacing(target) as fresh:
            fresh.write_text("new")
        assert len(list(tmp_path.iterdir())) == 4, (
            "the target, what is not ours, and the save that is at work"
        )
        alive.communicate("\n")
        assert alive.returncode == 0
    left = {".a [1].x.12345678.nc2", ".b.12345678.nc", target.name}
    assert {
        path.name for path in tmp_path.iterdir()
    } == left and target.read_bytes() == bytes(1000)


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
    "name",
    [
        "x" * 300,
        "ü" * 200 + ".nc",
        "no/such/folder/x",
        "file/x",
        "x." + "y" * 300,
        "x\0y",
    ],
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
