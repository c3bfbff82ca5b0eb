"""Install steps for the length of a `with`, and undo them whatever interrupts.

A `with` that hooks a module or enters a mode of torch must leave nothing behind. If
Ctrl-C interrupts the removal, the rest is removed when the context manager is
garbage-collected, or at the latest before the next pass. Importing this loads no torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol


class Step(Protocol):
    """One change that an installation makes and undoes."""

    def install(self) -> None:
        """Make the change."""

    def remove(self) -> None:
        """Undo the change; safe at any time, in any thread and any number of times."""


class Installation:
    """A context manager that installs its steps in order and removes them in reverse.

    All steps are registered before the first one is installed, so that an interrupt at
    any bytecode leaves nothing that cannot be found again.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)

    def __enter__(self) -> None:
        remove_leftovers()
        _INSTALLED[id(self)] = weakref.ref(self), self._steps
        for step in self._steps:
            step.install()

    def __exit__(self, *error: object) -> None:
        self._remove()

    def __del__(self) -> None:
        self._remove()

    def _remove(self) -> None:
        for step in reversed(self._steps):
            step.remove()
        _INSTALLED.pop(id(self), None)


# Steps that could not be undone when their installation ended.
_STRANDED: list[Step] = []
_INSTALLED: dict[int, tuple[weakref.ref[Installation], tuple[Step, ...]]] = {}


def remove_later(step: Step) -> None:
    """Remove a step once more before the next pass."""
    _STRANDED.append(step)


def remove_leftovers() -> None:
    """Remove the steps of installations whose removal was interrupted."""
    while _STRANDED:
        _STRANDED.pop().remove()
    for key, (owner, steps) in list(_INSTALLED.items()):
        if owner() is None:
            for step in reversed(steps):
                step.remove()
            _INSTALLED.pop(key, None)
