"""Progress, for everything that takes long: on stderr, or where a program wants it.

>>> with track("Reading", total=3) as advance:
...     for _ in range(3):
...         advance(1)
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_shown: bool | None = None
_sink: "Callable[[str, float, float | None], None] | None" = None


def show(choice: bool | None) -> None:
    """Show progress always, never, or (None) when stderr is a terminal."""
    global _shown
    _shown = choice


@contextmanager
def sent_to(sink: Callable[[str, float, float | None], None]) -> Iterator[None]:
    """Call `sink(what, done, total)` as work goes on, in place of bars on stderr; a note is something of no total.

    >>> with sent_to(print), track("Reading", total=2) as advance:
    ...     advance(1)
    Reading 0.0 2
    Reading 1.0 2
    """
    global _sink
    before, _sink = _sink, sink
    try:
        yield
    finally:
        _sink = before


def note(message: str) -> None:
    """Print one line on stderr, if progress is shown."""
    if _sink is not None:
        _sink(message, 0.0, None)
    elif _visible():
        print(message, file=sys.stderr)


@contextmanager
def track(what: str, total: float | None = None, *, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Show a progress bar while the body runs; the body calls the function it gets with how much was done."""
    if _sink is not None:
        yield _told(_sink, what, total)
        return
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


def _told(sink: Callable[[str, float, float | None], None], what: str, total: float | None) -> Callable[[float], None]:
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done
        done += amount
        sink(what, done, total)

    sink(what, done, total)
    return advance


def _visible() -> bool:
    return sys.stderr.isatty() if _shown is None else _shown
