"""Crashes: a process that dies at a chosen step on the disk, so that whatever it would
do after that is not done.
"""

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hiddenscope.store import gc
from hiddenscope.testing import tiny_store
from labs.chaos.flips import intact, readable

STEPS = ("write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")


class Died(BaseException):
    """The process is no more: nothing catches it, and no step on the disk has an
    effect.
    """


@contextmanager
def dying(steps: int) -> Iterator[list[str]]:
    """Let the body die after this many steps on the disk; the steps that were done are
    listed as they are done.

    Nothing is removed by what runs on the way out, as nothing would be in a process
    that was killed. A write may be cut short: of the last one, half is done.
    """
    before = {name: getattr(os, name) for name in STEPS}
    done: list[str] = []

    def step(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(done) >= steps:
                if name == "write" and len(done) == steps:
                    before["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
                done.append(f"died at {name}")
                raise Died
            done.append(name)
            return before[name](*args, **kwargs)

        return call

    for name in STEPS:
        setattr(os, name, step(name))
    try:
        yield done
    except Died:
        pass
    finally:
        for name, function in before.items():
            setattr(os, name, function)


def contents(path: Path) -> dict[str, bytes]:
    """All files of a store."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def run(count: int = 300) -> list[str]:
    """Let a job die again and again, at random steps, until its store is complete; and
    so on with another store.
    """
    draw, wrong, died, stores = random.Random(0), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        sound = contents(tiny_store(Path(folder, "sound")).path)
        while died < count:
            path, stores = Path(folder, str(stores)), stores + 1
            while not (path / "complete.json").exists():
                with dying(draw.randrange(60)) as steps:
                    tiny_store(path)
                died += steps[-1].startswith("died")
                if (path / "plan.json").exists() and not (
                    intact(path) and readable(path)
                ):
                    wrong.append(
                        f"after {steps[-1]}, step {len(steps)}: the store is not intact"
                    )
            gc(path)
            if contents(path) != sound:
                wrong.append(f"store {stores} is not the one of an undisturbed job")
    return [
        (
            f"crashes: {died:,} at random steps of jobs on {stores:,} stores;"
            f" {len(wrong)} stores wrong"
        ),
        *wrong,
    ]
