"""A test that hangs fails by its name, so that the others are still run.

Where it hangs in compiled code, and no Python runs any more, pytest ends the process some minutes later
(`faulthandler_timeout`): pytest-xdist then says which test that was, and goes on in another process.
"""

import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

import pytest

SECONDS = float(os.environ.get("HIDDENSCOPE_TEST_SECONDS", 1500))  # far more than any test takes on a busy machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test fail that still runs after so many seconds."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return (yield)

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"{item.nodeid} still runs after {SECONDS:g} seconds: it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
