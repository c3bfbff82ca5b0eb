"""A test that hangs fails by its name, so that the others are still run.

Where it hangs in compiled code, and no Python runs any more, its process is ended some
minutes later, with the traceback of every thread: pytest-xdist then says which test
that was, and goes on in another process.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType

import pytest
from _pytest.faulthandler import (
    # Stderr itself, not what pytest captures.
    fault_handler_stderr_fd_key,
)

# Far more than any test takes on a busy machine.
SECONDS = float(os.environ.get("HIDDENSCOPE_TEST_SECONDS", 1500))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test fail that still runs after so many seconds."""
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        return (yield)

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"{item.nodeid} still runs after {SECONDS:g} seconds: it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    stderr = item.config.stash.get(fault_handler_stderr_fd_key, sys.__stderr__)
    faulthandler.dump_traceback_later(1.2 * SECONDS, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
