"""Progress on stderr, for everything that takes long.

>>> with track("Reading", total=3) as advance:
...     for _ in range(3):
...         advance(1)
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_shown: bool | None = None


def show(choice: bool | None) -> None:
    """Show progress always, never, or (None) when stderr is a terminal."""
    global _shown
    _shown = choice


def note(message: str) -> None:
    """Print one line on stderr, if progress is shown."""
    if _visible():
        print(message, file=sys.stderr)


@contextmanager
def track(what: str, total: float | None = None, *, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Show a progress bar while the body runs; the body calls the function it gets with how much was done."""
    if not _visible():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda amount: bars.advance(task, amount)


def _visible() -> bool:
    return sys.stderr.isatty() if _shown is None else _shown
