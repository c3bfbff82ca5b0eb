"""`python -m hiddenscope`, and what the command `hiddenscope` starts: Ctrl-C ends it quietly even while it starts."""

import os
import signal
import sys
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    if sys.stderr is not None:
        sys.stderr.write("Stopped.\n")
        sys.stderr.flush()
    os._exit(130)


signal.signal(signal.SIGINT, _leave)

from hiddenscope.cli import main  # noqa: E402  # the handler has to be there first

if __name__ == "__main__":
    main()
