"""A disk that becomes full while something is written, and is free again later.

No file may grow beyond a random length, as on a full disk, while a result, states or a
store are saved or exported, or a series is made. That must be refused in a sentence,
leave what was there, and work when it is tried again.
"""

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hiddenscope as hs
from hiddenscope.errors import Error
from labs.fuzz.calls import TEXTS, model, result, states
from labs.fuzz.sandbox import Case

FORMATS = (".html", ".png", ".svg", ".pdf", ".json", ".csv", ".nc")


def cases(count: int, seed: int, work: Path) -> Iterator[Case]:
    """This many disks for everything that is written."""
    for name, write in _writers().items():
        for number in range(count):
            chance = random.Random(f"disk {name} {seed} {number}")
            yield Case(
                "full disk",
                f"{name} {seed}/{number}",
                lambda write=write, chance=chance: _attempt(write, chance, work),
            )


def _writers() -> dict[str, Callable[[Path], Any]]:
    writers: dict[str, Callable[[Path], Any]] = {}
    for suffix in FORMATS:
        writers[f"result{suffix}"] = lambda to, suffix=suffix: result().save(
            to / f"a{suffix}"
        )
    writers["states"] = lambda to: states().save(to / "a.safetensors")
    writers["extract"] = lambda to: hs.extract(model(), TEXTS, to=to / "store")
    writers["series"] = lambda to: hs.series(
        [model(), model()], "profile", TEXTS, to=to / "series"
    )
    return writers


@contextmanager
def _full(largest: int) -> Iterator[None]:
    """Let no file grow beyond this many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def _attempt(write: Callable[[Path], Any], chance: random.Random, work: Path) -> str:
    folder = work / f"case-{os.getpid()}"
    folder.mkdir()
    try:
        largest = chance.choice((0, 1, 100, 2_000, 20_000, 200_000))
        try:
            with _full(largest):
                write(folder)
        # An error of the system says what is wrong with the disk.
        except (Error, OSError):
            pass
        write(folder)
        return "loaded"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
