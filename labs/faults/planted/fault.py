"""A kind of fault, a planted fault, and the replacement of a module's forward.

A fault is planted in a deep copy. It declares at once the first site at which it shows
and the module that is at fault.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.errors import ModuleError
from labs.faults.planted.parts import ModelParts


@dataclass(frozen=True)
class Planted:
    """A fault in a copy of a model, with what is true of it.

    `path` is the module at fault. `also` are paths that are as right, because the fault
    is in several modules at once; `why` says so. `detail` is what was changed.
    """

    kind: str
    module: nn.Module
    first_site: str
    path: str
    also: tuple[str, ...] = ()
    why: str = ""
    detail: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Return every module path that names the fault."""
        return (self.path, *self.also)


@dataclass(frozen=True)
class Damage:
    """What a kind did to a copy: in words, and where it is not simply the chosen module
    that is at fault.
    """

    detail: str
    also: tuple[str, ...] = ()
    why: str = ""
    site: str | None = None


Rng = random.Random
Places = Callable[[ModelParts], list[str]]
Change = Callable[[ModelParts, str, Rng], Damage]


@dataclass(frozen=True)
class Fault:
    """A kind of fault: its name, what it is, the modules of a model that may have it,
    and how one is given it.
    """

    name: str
    says: str
    places: Places
    change: Change

    def applies(self, module: nn.Module) -> bool:
        """Check whether there is a place for it in a model."""
        return bool(self.places(ModelParts(module)))

    def plant(
        self, module: nn.Module, layer: int | None = None, rng: Rng | int | str = 0
    ) -> Planted:
        """Plant it in a copy of a module, in one block or anywhere.

        The block is counted from 0 within its stack.

        >>> from hiddenscope.testing import tiny_model
        >>> from labs.faults.planted import KINDS
        >>> planted = KINDS["layer_skipped"].plant(tiny_model("gpt2"), layer=1)
        >>> planted.first_site, planted.path
        ('layer.2', 'transformer.h.1')
        """
        rng = rng if isinstance(rng, Rng) else Rng(f"{self.name} {rng}")
        parts = ModelParts(copy.deepcopy(module))
        places = self.places(parts)
        if layer is not None:
            blocks = {path: parts.block_of(path) for path in places}
            places = [
                path
                for path, block in blocks.items()
                if block is None or block.number == layer
            ]
        if not places:
            where = "" if layer is None else f" in block {layer}"
            problem = f"Cannot plant {self.name}{where} of {type(module).__name__}"
            raise ModuleError(
                problem,
                "it has no module for it",
                "Choose another layer, model or kind.",
            )
        path = rng.choice(places)
        with torch.no_grad():
            damage = self.change(parts, path, rng)
        parts.module.train(module.training)
        site = damage.site or parts.site(path)
        return Planted(
            self.name, parts.module, site, path, damage.also, damage.why, damage.detail
        )


def generator(rng: Rng) -> torch.Generator:
    """Return a generator of tensors, seeded by a generator of choices."""
    return torch.Generator().manual_seed(rng.getrandbits(48))


def noise_like(weight: Tensor, rng: Rng) -> Tensor:
    """Normal noise in the shape of a weight."""
    return torch.randn(weight.shape, generator=generator(rng)).to(weight)


def replace_forward(part: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward, `forward(original, self, ...)`, by a subclass.

    A subclass keeps the module's name, signature and type, as an edited source file
    would, and a copy of it too.
    """
    true = type(part)

    class Edited(true):  # type: ignore[misc, valid-type]
        @wraps(true.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(super().forward, self, *args, **kwargs)

    Edited.__name__, Edited.__qualname__, Edited.__module__ = (
        true.__name__,
        true.__qualname__,
        true.__module__,
    )
    part.__class__ = Edited


def first(output: Any) -> Tensor:
    """Return the tensor that a module returns, alone or first in a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def with_first(output: Any, tensor: Tensor) -> Any:
    """Return the output with another first tensor."""
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor
