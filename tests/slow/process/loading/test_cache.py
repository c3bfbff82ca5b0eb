"""Folders that appear whole or not at all, whichever processes are at work."""

import signal
import subprocess
import sys
from pathlib import Path

from hiddenscope.loading.cache import build_once, is_complete

SLOW = """
import sys
from pathlib import Path
from hiddenscope.loading.cache import build_once

def build(part):
    for number in range(20):
        (part / f"{number}.bin").write_bytes(bytes([number]) * 1000)
        if number == 9:
            print("busy", flush=True)
            sys.stdin.readline()  # until it is told to go on

print(build_once(Path(sys.argv[1]), build))
"""


def building(place: Path) -> "subprocess.Popen[str]":
    """Start a process that has built half of a folder, and waits for a line on its
    stdin, or for its end.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(place)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    return process


def test_two_processes_at_once_agree(tmp_path: Path) -> None:
    place = tmp_path / "model"
    # Both have built half of it before either goes on.
    two = [building(place) for _ in range(2)]
    said = [process.communicate("\n")[0].splitlines() for process in two]
    assert [process.returncode for process in two] == [0, 0]
    assert [lines[-1] for lines in said] == [str(place)] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert is_complete(place)
    for number in range(20):
        assert (place / f"{number}.bin").read_bytes() == bytes([number]) * 1000


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with building(tmp_path / "model") as process:
        process.send_signal(signal.SIGINT)
        process.wait()
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_use_and_what_is_in_use_stays(
    tmp_path: Path,
) -> None:
    with building(tmp_path / "one") as killed, building(tmp_path / "two") as alive:
        assert len(list(tmp_path.iterdir())) == 2
        killed.kill()
        killed.wait()
        build_once(tmp_path / "three", lambda part: None)
        names = {path.name.strip(".").split(".")[0] for path in tmp_path.iterdir()}
        assert names == {"two", "three"}
        alive.communicate("\n")
    assert alive.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"two", "three"}
