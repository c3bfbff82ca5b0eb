"""Series of faults in stores and jobs: crashes, kills, losses of power, flipped bits."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

import hiddenscope as hs
from hiddenscope.errors import FileError
from hiddenscope.store import writer as store_writer
from hiddenscope.testing.stores import tiny_store
from labs.chaos import interleavings, kills
from labs.chaos.flips import intact
from labs.chaos.power import power_losses
from tests.slices import THOROUGH
from tests.unit.store.machine import StoreMachine

TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=int(os.environ.get("HIDDENSCOPE_MACHINES", "8")),
    stateful_step_count=12,
    deadline=None,
)
NO_PROC = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"),
    reason="what a descriptor holds is not told here",
)


@NO_PROC
def test_the_power_may_go_at_any_instant(tmp_path: Path) -> None:
    done, points, wrong = power_losses(tmp_path, 80)
    assert (done, wrong) == (80, []) and points > 40


@NO_PROC
def test_a_folder_that_is_not_brought_to_the_disk_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_writer, "to_disk", lambda path: None)
    _, points, wrong = power_losses(tmp_path, 60)
    found = [fault for fault in wrong if "is not intact" in fault or "is lost" in fault]
    assert points < 60 and found


def test_a_second_job_may_run_at_any_line_of_the_first() -> None:
    done, *wrong = interleavings.run(20)
    assert "at each of 1" in done and wrong == []


def test_a_full_disk_is_an_error_and_the_job_goes_on_later(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        path = tmp_path / "store"
        with pytest.raises(FileError, match="No space left on device"):
            tiny_store(path, width=4000)
        assert intact(path) and not list((path / "tmp").iterdir())
        subprocess.run(["mount", "-o", "remount,size=20m", tmp_path], check=True)
        tiny_store(path, width=4000)
        assert intact(path) and hs.open(path).complete
    finally:
        # Whoever still looks at it.
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_jobs_that_are_killed_again_and_again_end_as_one_that_was_not(
    tmp_path: Path,
) -> None:
    times = 20 if THOROUGH else 8
    killed, completed, wrong = kills.kill_jobs(times, tmp_path / "jobs")
    assert (killed, wrong) == (times, []) and completed
