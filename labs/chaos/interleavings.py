"""Interleavings: at each line of one job, another job on the same store runs from
beginning to end.

A race between two jobs needs one of them at a certain line, and the other to do
something meanwhile. Here the first is stopped in turn at every line of the store's
code, when it comes there first and last, and the other runs in a thread of the same
process. If the other is not done in a moment (it may wait for a lock that the first
holds), the first goes on.
"""

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hiddenscope import store
from hiddenscope.testing import tiny_store
from labs.chaos.crashes import contents
from labs.chaos.flips import intact

CODE = str(Path(store.__file__).parent)
PATIENCE = 0.2  # seconds after which the other job is taken to wait for a lock
# Where there is one: a job syncs often, and a disk is slow.
IN_MEMORY = Path("/dev/shm")


def _no_plan(path: Path) -> None:
    (tiny_store(path, units=["000001"]).path / "plan.json").unlink()


def _no_folder(path: Path) -> None:
    shutil.rmtree(tiny_store(path, units=["000001"]).path / "plan")


BEGINNINGS: dict[str, Callable[[Path], Any]] = {
    "no folder": lambda path: None,
    "an empty folder": Path.mkdir,
    "a store with one unit": lambda path: tiny_store(path, units=["000001"]),
    "a store that lost its plan.json": _no_plan,
    "a store that lost its folder plan/": _no_folder,
}


def run(count: int | None = None) -> list[str]:
    """Try every line from every beginning, or about this many lines of each."""
    tried, wrong = 0, []
    with tempfile.TemporaryDirectory(
        dir=IN_MEMORY if IN_MEMORY.is_dir() else None
    ) as folder:
        for number, beginning in enumerate(BEGINNINGS):
            lines, found = races(Path(folder, str(number)), beginning, count)
            tried, wrong = tried + lines, wrong + found
    return [
        (
            f"interleavings: a second job at each of {tried:,} lines of a first;"
            f" {len(wrong)} wrong"
        ),
        *wrong,
    ]


def races(
    path: Path, beginning: str, count: int | None = None
) -> tuple[int, list[str]]:
    """How many lines were tried from a beginning, and what was wrong at which."""
    path.mkdir()
    sound = contents(tiny_store(path / "sound").path)
    store = path / "store"  # always the same: a longer name takes more steps
    steps = _steps_of_lines(store, beginning)
    chosen, wrong = steps[:: max(1, len(steps) // (count or len(steps)))], []
    for step in chosen:
        shutil.rmtree(store)
        where, raised = _disturbed(store, beginning, step)
        wrong += [
            f"{beginning}, {where}: {type(error).__name__}: {error}" for error in raised
        ]
        if not raised and not (intact(store) and contents(store) == sound):
            wrong.append(
                f"{beginning}, {where}: the store is not the one of an undisturbed job"
            )
    return len(chosen), wrong


def _steps_of_lines(path: Path, beginning: str) -> list[int]:
    """The steps of an undisturbed job at which it comes to a line for the first and for
    the last time.
    """
    first, last = dict[str, int](), dict[str, int]()
    BEGINNINGS[beginning](path)

    def seen(step: int, line: str) -> None:
        first.setdefault(line, step)
        last[line] = step

    with _lines(seen):
        tiny_store(path)
    return sorted({*first.values(), *last.values()})


def _disturbed(
    path: Path, beginning: str, step: int
) -> tuple[str, list[BaseException]]:
    """Run a job, and at this step of it another: the line where that was (if it came so
    far), and what was raised.
    """
    where, raised = "", list[BaseException]()

    def job() -> None:
        try:
            tiny_store(path)
        except BaseException as error:
            raised.append(error)

    def seen(number: int, line: str) -> None:
        nonlocal where
        if number == step:
            where = line
            other.start()
            other.join(PATIENCE)

    BEGINNINGS[beginning](path)
    other = threading.Thread(target=job)
    with _lines(seen):
        job()
    if where:  # a job may be shorter than the one before it by a few steps
        other.join()
    return where, raised


@contextmanager
def _lines(seen: Callable[[int, str], None]) -> Iterator[None]:
    """Call `seen` before each line of the store's code that this thread runs, with the
    step's number and name.
    """
    step = -1

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal step
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        if event == "line":
            step += 1
            seen(step, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(before)
