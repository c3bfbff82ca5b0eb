"""How a command ends: with a message and an exit code, also after Ctrl-C.

Python raises KeyboardInterrupt between two bytecodes. That is too late where one step
of compiled code takes long, where a thread has to end first (numba compiles for
seconds), and where a library swallows the exception. So a thread receives the signal
too, and ends the process if it still runs after a moment. Files are written whole or
not at all, so nothing is lost by that.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

import typer

from hiddenscope import errors, progress
from hiddenscope.cli.terminal import echo, visible
from hiddenscope.files import disk_remedy

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
        if _state.reported:
            return
        _state.reported = True
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
    finally:
        _state.lock.release()


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


KEYWORD = re.compile(
    r"""`?\b(?P<name>[a-z_]+)=(?P<value>'[^']*'|"[^"]*"|-?\w(?:[\w.*]*[\w*])?|)`?"""
)


@contextmanager
def errors_as_messages(debug: bool, options: Collection[str] = ()) -> Iterator[None]:
    """Turn an error into a message and an exit code; with `debug` let it through.

    Where an error names a keyword argument of Python for which the command has an
    option, the message names the option.
    """
    try:
        with guarded():
            yield
    except KeyboardInterrupt:
        leave()
    except BrokenPipeError:
        # The reader of our output has gone, as in `hiddenscope models | head -1`.
        discard_output()
        sys.exit(141)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        if not isinstance(error, OSError) and errors.was_interrupted(error):
            leave()
        echo(visible(_message(error, options), keep="\n"), err=True)
        sys.exit(2)


def _message(error: Exception, options: Collection[str]) -> str:
    # Where a library has no memory left, our own error may name the wrong cause.
    lack = error.__cause__ or error
    if errors.is_out_of_memory(lack) and not isinstance(lack, errors.Error):
        return (
            f"There is not enough memory ({errors.first_line(lack)}). Close other"
            " programs, raise `ulimit -v`, or use a smaller model."
        )
    if isinstance(error, errors.Error):
        return in_options(str(error), options)
    if isinstance(error, OSError):
        place = f" {error.filename}" if error.filename else ""
        reason = error.strerror or error
        return f"Cannot read or write{place}: {reason}. {disk_remedy(error)}".rstrip()
    return (
        f"{type(error).__name__}: {error}\nThis is unexpected: --debug shows where it"
        " happened."
    )


def in_options(message: str, options: Collection[str]) -> str:
    """Return a message with options in place of Python's keyword arguments.

    >>> message = "Split it, or give truncate=True. Name it: text='...', task='x'."
    >>> in_options(message, {"truncate", "text"})
    "Split it, or give --truncate. Name it: --text '...', task='x'."
    >>> in_options('Name it: hs.read(path, label="...").', {"label"})
    'Name it: --label "...".'
    """
    # Options name the columns of what a command reads.
    message = re.sub(r"\bhs\.read\(path, (\w+=[^)]*)\)", r"\1", message)

    def spelled(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in options:
            return match[0]
        negation = "no-" if value == "False" else ""
        option = f"--{negation}{name.replace('_', '-')}"
        if value in ("", "True", "False"):
            return option
        return f"{option} {value}"

    return KEYWORD.sub(spelled, message)


def discard_output() -> None:
    """Send stdout nowhere, so that Python's own flush at the end cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
