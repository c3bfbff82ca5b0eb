"""`python -m hiddenscope`, and what the command `hiddenscope` starts.

To import the command line takes longer than people wait for a first word, so the status
is shown before that; and Ctrl-C ends the command quietly even while it starts.
"""

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from types import FrameType

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.catalog import COMMANDS


def _leave(number: int, frame: FrameType | None) -> None:
    if sys.stderr is not None:
        progress.clear()
        sys.stderr.write("Stopped.\n")
        sys.stderr.flush()
    os._exit(130)


def _begin(words: list[str]) -> None:
    """Answer at once: with the version, or with the status of the command that the
    words name.
    """
    if words == ["--version"] and sys.stdout is not None:
        with suppress(OSError):  # the command line says what is wrong with stdout
            print(hs.__version__, flush=True)
            sys.exit()
    if words and words[0] in COMMANDS and "--help" not in words:
        progress.show(
            True if "--progress" in words else False if "--quiet" in words else None
        )
        progress.begin(f"Running {words[0]}")


signal.signal(signal.SIGINT, _leave)


def main() -> None:
    """Say what is being done, then import the command line and run it."""
    _begin(sys.argv[1:])
    import_module("hiddenscope.cli.main").main()


if __name__ == "__main__":
    main()
