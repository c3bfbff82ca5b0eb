"""Call back for every part that a module registers while the body runs in this thread.

torch has no such hook on a single module, since the modules are still being built: its
hooks are global, so they check the thread themselves. Importing this loads no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from hiddenscope.modules.installation import Installation

if TYPE_CHECKING:
    from torch import Tensor, nn

PartKind: TypeAlias = Literal["module", "parameter", "buffer"]
Callback: TypeAlias = (
    "Callable[[PartKind, nn.Module, str, nn.Module | Tensor | None], None]"
)
"""Called with the kind of a part, the module that gets it, its name, and the part."""


class _RegistrationHook:
    """A global registration hook of torch that acts in one thread."""

    def __init__(self, kind: PartKind, callback: Callback) -> None:
        self.kind = kind
        self.callback = callback
        self.thread = threading.get_ident()

    def __call__(
        self, module: nn.Module, name: str, part: nn.Module | Tensor | None
    ) -> None:
        if threading.get_ident() == self.thread:
            self.callback(self.kind, module, name, part)

    def install(self) -> None:
        from torch.nn.modules.module import (
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
        )

        if self.kind == "module":
            register_module_module_registration_hook(self)
        elif self.kind == "parameter":
            register_module_parameter_registration_hook(self)
        else:
            register_module_buffer_registration_hook(self)

    def remove(self) -> None:
        from torch.nn.modules import module

        tables: Mapping[PartKind, MutableMapping[int, Callable[..., object]]] = {
            "module": module._global_module_registration_hooks,
            "parameter": module._global_parameter_registration_hooks,
            "buffer": module._global_buffer_registration_hooks,
        }
        # torch's handle could be lost to an interrupt before it is stored, so the hook
        # is found by identity.
        table = tables[self.kind]
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
    return Installation(
        [
            _RegistrationHook("module", callback),
            _RegistrationHook("parameter", callback),
            _RegistrationHook("buffer", callback),
        ]
    )
