"""Crashes: a process that dies at a chosen step on the disk, so that whatever it would do after that is not done."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STEPS = ("write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")


class Died(BaseException):
    """The process is no more: nothing catches it, and no step on the disk has an effect."""


@contextmanager
def dying(steps: int) -> Iterator[list[str]]:
    """Let the body die after so many steps on the disk; the steps that were done are listed as they are done.

    Nothing is removed by what runs on the way out, as nothing would be in a process that was killed. A write may be cut
    short: of the last one, half is done.
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
