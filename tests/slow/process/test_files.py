"""What a killed process leaves is removed by the next one."""

import subprocess
import sys
from pathlib import Path

from hiddenscope.files import read_tensors, replacing

SLOW = """
import sys
import torch
from hiddenscope import files
seal = files.seal

def slow_seal(path):
    print("busy", flush=True)
    sys.stdin.readline()
    seal(path)

files.seal = slow_seal
files.write_tensors(sys.argv[1], {"a": torch.zeros(250)}, {"format": "test"})
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
    assert {path.name for path in tmp_path.iterdir()} == left
    tensors, _ = read_tensors(target, "a test", "test")
    assert tensors["a"].tolist() == [0] * 250
