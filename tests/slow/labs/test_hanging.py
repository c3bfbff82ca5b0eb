"""A test that hangs is a failure with a name, and the tests after it are run."""

import os
import subprocess
import sys
from pathlib import Path

from tests.places import ROOT

TESTS = """
import threading, time
def test_that_waits(): threading.Event().wait()
def test_after_it(): pass
"""
ONE_THAT_STANDS_STILL = """
import signal
def test_that_stands_still():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    signal.sigwait([signal.SIGUSR1])
def test_after_it(): pass
"""


def run(folder: Path, tests: str, *options: str) -> str:
    (folder / "conftest.py").write_text(
        "from tests.hanging import pytest_runtest_protocol"
    )
    (folder / "test_them.py").write_text(tests)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HIDDENSCOPE_TEST_SECONDS": "5",
        "PYTEST_ADDOPTS": "",
    }
    call = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        *options,
    ]
    done = subprocess.run(
        [*call, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    return done.stdout


def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    said = run(tmp_path, TESTS)
    assert (
        "test_that_waits still runs after 5 seconds: it hangs" in said
        and "1 failed, 1 passed" in said
    )


def test_a_process_that_hangs_is_replaced_and_the_next_test_runs(
    tmp_path: Path,
) -> None:
    said = run(tmp_path, ONE_THAT_STANDS_STILL, "--numprocesses", "1")
    assert (
        "crashed while running" in said
        and "test_that_stands_still" in said
        and "1 failed, 1 passed" in said
    )
