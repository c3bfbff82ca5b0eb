"""Start the command line: `python -m hiddenscope`, and the command `hiddenscope`.

Importing the command line takes longer than people wait for a first word, so the status
is shown before that. Ctrl-C ends the command quietly even while it starts.
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


def _print_version() -> None:
    """Print the version and exit."""
    if sys.stdout is None:
        return
    # Where stdout cannot be written, the command line says what is wrong with it.
    with suppress(OSError):
        print(hs.__version__, flush=True)
        sys.exit()


signal.signal(signal.SIGINT, _leave)


def main() -> None:
    """Answer at once, then import the command line and run it."""
    words = sys.argv[1:]
    if words == ["--version"]:
        _print_version()
    if words and words[0] in COMMANDS and "--help" not in words:
        # Show that the command runs which the words name.
        if "--progress" in words:
            progress.show(True)
        elif "--quiet" in words:
            progress.show(False)
        else:
            progress.show(None)
        progress.begin(f"Running {words[0]}")
    import_module("hiddenscope.cli.main").main()


if __name__ == "__main__":
    main()
