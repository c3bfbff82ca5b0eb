"""Install steps for the length of a `with`, and undo them whatever interrupts.

A `with` that hooks a module or enters a mode of torch must leave nothing behind. If
Ctrl-C interrupts the removal, the rest is removed when the context manager is
garbage-collected, or at the latest before the next pass.

Hooks on the parts that a module registers are here too: torch has none on a single
module, which is still being built, so they are global, and check the thread themselves.
Importing this loads no torch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn


class Step(Protocol):
    """One change that an installation makes and undoes."""

    def install(self) -> None:
        """Make the change."""

    def remove(self) -> None:
        """Undo the change; safe at any time, in any thread and any number of times."""


@dataclass(eq=False)
class Installation:
    """A context manager that installs its steps in order and removes them in reverse.

    All steps are registered before the first one is installed, so that an interrupt at
    any bytecode leaves nothing that cannot be found again.
    """

    steps: Sequence[Step]

    def __enter__(self) -> None:
        remove_leftovers()
        _INSTALLED[id(self)] = weakref.ref(self), self.steps
        for step in self.steps:
            step.install()

    def __exit__(self, *error: object) -> None:
        for step in reversed(self.steps):
            step.remove()
        _INSTALLED.pop(id(self), None)

    def __del__(self) -> None:
        self.__exit__()


# Steps that could not be undone when their installation ended.
_STRANDED: list[Step] = []
_INSTALLED: dict[int, tuple[weakref.ref[Installation], Sequence[Step]]] = {}


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


PartKind: TypeAlias = Literal["module", "parameter", "buffer"]
Callback: TypeAlias = (
    "Callable[[PartKind, nn.Module, str, nn.Module | Tensor | None], None]"
)
"""Called with the kind of a part, the module that gets it, its name, and the part."""


@dataclass(eq=False)
class _RegistrationHook:
    """A global registration hook of torch that acts in one thread."""

    kind: PartKind
    callback: Callback
    thread: int = field(default_factory=threading.get_ident)

    def __call__(
        self, module: nn.Module, name: str, part: nn.Module | Tensor | None
    ) -> None:
        if threading.get_ident() == self.thread:
            self.callback(self.kind, module, name, part)

    def install(self) -> None:
        from torch.nn.modules import module

        getattr(module, f"register_module_{self.kind}_registration_hook")(self)

    def remove(self) -> None:
        from torch.nn.modules import module

        # torch's handle could be lost to an interrupt before it is stored, so the hook
        # is found by identity.
        table = getattr(module, f"_global_{self.kind}_registration_hooks")
        for key, hook in list(table.items()):
            if hook is self:
                table.pop(key, None)


def registering(callback: Callback) -> Installation:
    """Call back for each submodule, parameter and buffer that any module registers.

    >>> from torch import nn
    >>> names = []
    >>> with registering(lambda kind, module, name, part: names.append((kind, name))):
    ...     _ = nn.Linear(2, 2)
    >>> names
    [('parameter', 'weight'), ('parameter', 'bias')]
    """
    kinds: tuple[PartKind, ...] = ("module", "parameter", "buffer")
    return Installation([_RegistrationHook(kind, callback) for kind in kinds])
