"""Ctrl-C on the command line: the command ends soon, whatever it is doing, with one
word and the exit code 130.

Python raises KeyboardInterrupt between two steps of its own. That is too late where one
step of compiled code takes long, where a thread has to end first (numba compiles for
seconds), and where a library swallows the exception. So a thread is told of the signal
too, and ends the process if it is still there after a moment. Files are written whole
or not at all, so nothing is lost by that.
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

GRACE = (
    # Seconds for what a command removes before it ends, such as half-written files.
    0.5
)
# To find out how to go on, from a store on a slow disk; then the process ends without
# it.
MOST_SECONDS = 10.0
EXIT_CODE = 130


def watch() -> None:
    """End the process soon after Ctrl-C from now on; where there are no signals to be
    had, do nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _state.watched = True
    signal.signal(signal.SIGINT, _interrupted)
    # Python writes the signal's number there at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(
        target=_end_soon, args=(reader,), name="interrupt", daemon=True
    ).start()


@contextmanager
def guarded() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt while the body runs; anywhere else it ends the
    process at once.
    """
    _state.said = _state.said and _state.depth > 0
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


@contextmanager
def explained(how_to_resume: Callable[[], str]) -> Iterator[None]:
    """Say how to go on, when Ctrl-C stops the body: also where the process is ended
    before the body has ended.
    """
    _state.how_to_resume = how_to_resume
    try:
        yield
    except KeyboardInterrupt:
        say_stopped()
        raise
    finally:
        _state.how_to_resume = None


def say_stopped() -> None:
    """Say once that the command was stopped, and how to go on where that is known.

    Two threads may come here, and both end the process: the second waits until the
    first has said it.
    """
    if sys.stderr is None or not _state.saying.acquire(timeout=MOST_SECONDS):
        return
    try:
        if not _state.said:
            _state.said = True
            message = "Stopped."
            if _state.how_to_resume is not None:
                message = (
                    f"{chr(10) * sys.stderr.isatty()}Stopped: {_state.how_to_resume()}"
                )
            progress.clear()
            sys.stderr.write(
                f"{progress.SHOW_CURSOR if sys.stderr.isatty() else ''}{message}\n"
            )
            sys.stderr.flush()
    finally:
        _state.saying.release()


@dataclass
class _State:
    depth: int = 0
    said: bool = False
    watched: bool = False
    how_to_resume: Callable[[], str] | None = None
    # Again: Ctrl-C may come while it is said.
    saying: "threading.RLock" = field(default_factory=threading.RLock)


_state = _State()


def leave() -> NoReturn:
    """Say that the command was stopped, and end: at once, since to take a large model
    apart takes longer than that.
    """
    say_stopped()
    if not _state.watched:
        sys.exit(EXIT_CODE)
    os._exit(EXIT_CODE)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    if not _state.depth:
        leave()
    # An interrupt within a destructor would be printed with its traceback.
    sys.unraisablehook = lambda unraisable: None
    threading.excepthook = lambda thread: None
    raise KeyboardInterrupt


def _end_soon(reader: int) -> None:
    while (
        os.read(reader, 1) != bytes([signal.SIGINT])
        or signal.getsignal(signal.SIGINT) is not _interrupted
    ):
        pass  # a server that handles the signal itself ends by itself
    time.sleep(GRACE)
    leave()
