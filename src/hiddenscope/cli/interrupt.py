"""Ctrl-C on the command line: every command ends soon, with the exit code 130.

Python raises KeyboardInterrupt between two bytecodes. That is too late where one step
of compiled code takes long, where a thread has to end first (numba compiles for
seconds), and where a library swallows the exception. So a thread receives the signal
too, and ends the process if it still runs after a moment. Files are written whole or
not at all, so nothing is lost by that.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from hiddenscope import progress

# Seconds for what a command removes before it ends, such as half-written files.
GRACE = 0.5
# Seconds to find out how to resume, from a store on a slow disk.
MOST_SECONDS = 10.0
EXIT_CODE = 130


def watch() -> None:
    """End the process soon after Ctrl-C from now on."""
    # Python delivers signals to the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _state.watched = True
    signal.signal(signal.SIGINT, _interrupted)
    # The C handler writes the signal's number there at once, whatever Python is doing.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(
        target=_end_soon, args=(reader,), name="interrupt", daemon=True
    ).start()


@contextmanager
def guarded() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt while the body runs.

    Anywhere else it ends the process at once.
    """
    if _state.depth == 0:
        _state.reported = False
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


@contextmanager
def explaining_resume(how_to_resume: Callable[[], str]) -> Iterator[None]:
    """Say how to resume when Ctrl-C stops the body, even if the process ends first."""
    _state.how_to_resume = how_to_resume
    try:
        yield
    except KeyboardInterrupt:
        report_stop()
        raise
    finally:
        _state.how_to_resume = None


def report_stop() -> None:
    """Print once that the command was stopped, and how to resume where that is known.

    Two threads may come here, and both end the process: the second waits until the
    first has printed the message.
    """
    if sys.stderr is None or not _state.lock.acquire(timeout=MOST_SECONDS):
        return
    try:
        if not _state.reported:
            _state.reported = True
            _print_stop()
    finally:
        _state.lock.release()


def _print_stop() -> None:
    on_terminal = sys.stderr.isatty()
    message = "Stopped.\n"
    if _state.how_to_resume is not None:
        message = f"Stopped: {_state.how_to_resume()}\n"
        if on_terminal:
            # The last line of a job has no end: the next would have replaced it.
            message = f"\n{message}"
    if on_terminal:
        message = f"{progress.SHOW_CURSOR}{message}"
    progress.clear()
    sys.stderr.write(message)
    sys.stderr.flush()


@dataclass
class _State:
    depth: int = 0
    reported: bool = False
    watched: bool = False
    how_to_resume: Callable[[], str] | None = None
    # Reentrant, because Ctrl-C may come again while the message is printed.
    lock: "threading.RLock" = field(default_factory=threading.RLock)


_state = _State()


def leave() -> NoReturn:
    """Report that the command was stopped, and end."""
    report_stop()
    if not _state.watched:
        sys.exit(EXIT_CODE)
    # Without Python's own clean-up: freeing a large model takes too long.
    os._exit(EXIT_CODE)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    if not _state.depth:
        leave()
    # An interrupt within a destructor would be printed with its traceback.
    sys.unraisablehook = lambda unraisable: None
    threading.excepthook = lambda thread: None
    raise KeyboardInterrupt


def _end_soon(reader: int) -> None:
    while True:
        is_interrupt = os.read(reader, 1) == bytes([signal.SIGINT])
        # A server that handles the signal itself also ends by itself.
        is_ours = signal.getsignal(signal.SIGINT) is _interrupted
        if is_interrupt and is_ours:
            break
    time.sleep(GRACE)
    leave()
