"""Progress, for everything that takes long: on stderr, or where a program wants it.

On a terminal one line says what is being done, with a spinner and the seconds so far,
or a bar. Where stderr goes to a file, each step is a plain line, and only if progress
was requested.

>>> with status("Loading"), track("Reading", total=3) as advance:
...     for _ in range(3):
...         advance(1)
"""

import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import TypeAlias

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
PLAIN_SPINNER = "|/-\\"
# Seconds between two pictures of the spinner.
STEP = 0.1
# Seconds: an estimate that is longer comes of the first bytes, which are slow.
LONGEST = 12 * 3600
ERASE = "\r\x1b[2K"
SHOW_CURSOR = "\x1b[?25h"

Sink: TypeAlias = Callable[[str, float, float | None], None]
"""A function that is told what is being done, how much is done, and the total."""
Advance: TypeAlias = Callable[[float], None]
"""A function that is told how much more is done."""

_shown: bool | None = None
_sink: Sink | None = None


def show(choice: bool | None) -> None:
    """Show progress always, never, or (None) when stderr is a terminal."""
    global _shown
    _shown = choice


@contextmanager
def sent_to(sink: Sink) -> Iterator[None]:
    """Call `sink(what, done, total)` as work goes on, in place of bars on stderr.

    A note has no total.

    >>> with sent_to(print), track("Reading", total=2) as advance:
    ...     advance(1)
    Reading 0.0 2
    Reading 1.0 2
    """
    global _sink
    before = _sink
    _sink = sink
    try:
        yield
    finally:
        _sink = before


def quieten_torchao() -> None:
    """Keep torchao's tidings of kernels that it cannot use here off stderr.

    transformers imports it wherever it is installed. A level that somebody has set
    stays.
    """
    for library in ("torchao", "torch.utils._pytree"):
        logger = logging.getLogger(library)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


def quieten_tqdm() -> None:
    """Import tqdm's notebook bars before another library does, without its warning.

    transformers imports `tqdm.auto`, which asks for ipywidgets in every notebook that
    has none. Nothing here needs them: without them, bars are lines of text.
    """
    if "ipykernel" not in sys.modules:
        return
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        import_module("tqdm.auto")


def note(message: str) -> None:
    """Print one line on stderr, if progress is shown."""
    if _sink is not None:
        _sink(message, 0.0, None)
    elif _visible():
        with _line.aside():
            print(message, file=sys.stderr)


@contextmanager
def status(what: str) -> Iterator[None]:
    """Say what is being done while the body runs, in place of an outer status.

    An outer status of the same words is the same one: it ends with the body.
    """
    if _sink is not None:
        _sink(what, 0.0, None)
        yield
        return
    before = _line.message if _line.message != what else ""
    _line.say(what if _visible() else "")
    try:
        yield
    finally:
        _line.say(before, again=True)


def begin(what: str) -> None:
    """Say what is being done until the next `status` or `clear`."""
    _line.say(what if _visible() else "")


def clear() -> None:
    """Take the status off the terminal, so that results can be printed there.

    The next `status` brings it back.
    """
    _line.say("")


@contextmanager
def track(
    what: str, total: float | None = None, *, unit: str = ""
) -> Iterator[Advance]:
    """Show a progress bar while the body runs.

    The body calls the function that it gets with how much was done.
    """
    if _sink is not None:
        sink = _sink
        done = 0.0

        def tell(amount: float) -> None:
            nonlocal done
            done += amount
            sink(what, done, total)

        tell(0.0)
        yield tell
        return
    if not _visible() or not _drawable():
        with status(what):
            yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
    )

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        count,
        TextColumn("{task.fields[left]}"),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with _line.aside(), progress as bars:
        task = bars.add_task(what, total=total, left="")

        def advance(amount: float) -> None:
            bars.advance(task, amount)
            seconds = bars.tasks[0].time_remaining or LONGEST
            left = timedelta(seconds=seconds) if seconds < LONGEST else ""
            bars.update(task, left=left)

        yield advance


def _visible() -> bool:
    return _on_terminal() if _shown is None else _shown


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _drawable() -> bool:
    """Tell whether a line on stderr can be drawn again in its place."""
    return _on_terminal() and os.environ.get("TERM") != "dumb"


class _Line:
    """The last line of a terminal, which a thread draws while it has a message."""

    def __init__(self) -> None:
        self.message = ""
        self._since = 0.0
        self._aside = 0
        self._lock = threading.RLock()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, message: str, *, again: bool = False) -> None:
        """Show another message, or none; a plain line is not written `again`."""
        with self._lock:
            if message == self.message:
                return
            self._erase()
            self.message = message
            self._since = time.monotonic()
            if message and not _drawable():
                if not again:
                    print(f"{message} ...", file=sys.stderr, flush=True)
            elif message:
                self._draw()
                self._work.set()
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(
                        target=self._draw_again, name="status", daemon=True
                    )
                    self._thread.start()
            else:
                self._work.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the line to something else."""
        with self._lock:
            self._erase()
            self._aside += 1
        try:
            yield
        finally:
            with self._lock:
                self._aside -= 1

    def _draw_again(self) -> None:
        while True:
            self._work.wait()
            time.sleep(STEP)
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        if self.message and not self._aside and _drawable():
            encoding = sys.stderr.encoding or ""
            spinner = SPINNER if "utf" in encoding.lower() else PLAIN_SPINNER
            seconds = time.monotonic() - self._since
            picture = spinner[round(seconds / STEP) % len(spinner)]
            text = f"{picture} {self.message} {seconds:.1f} s"
            columns = shutil.get_terminal_size().columns
            sys.stderr.write(f"{ERASE}{text[: columns - 1]}")
            sys.stderr.flush()

    def _erase(self) -> None:
        if self.message and not self._aside and _drawable():
            sys.stderr.write(ERASE)
            sys.stderr.flush()


_line = _Line()
