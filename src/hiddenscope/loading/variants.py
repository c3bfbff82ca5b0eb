"""Ways to load a model that is not a plain checkpoint: with adapters, or quantised.

A variant wraps what `hs.load` takes, and variants nest: an adapter on a quantised base
is `Adapted(Quantised("smollm2", "nf4"), "lora/")`. They are values: nothing is read
before they are loaded. This module imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from hiddenscope.arguments import checked
from hiddenscope.errors import LoadError

if TYPE_CHECKING:
    from torch import nn

    Plain: TypeAlias = str | os.PathLike[str] | nn.Module | tuple[nn.Module, Any]
    Base: TypeAlias = "Plain | ModelVariant | None"

SCHEMES = {
    "int8": "8-bit integers for weights (torchao)",
    "fp8": "8-bit floats for weights (torchao)",
    "bnb-int8": "8-bit integers with outliers apart, LLM.int8() (bitsandbytes)",
    "nf4": "4-bit normal floats for weights (bitsandbytes)",
    "fp4": "4-bit floats for weights (bitsandbytes)",
}
"""The schemes that `Quantised` takes, and what each does."""


@checked
@dataclass(frozen=True)
class Quantised:
    """A model whose weights are quantised while they are loaded.

    `scheme` is one of "int8", "fp8", "bnb-int8", "nf4" and "fp4". A folder that was
    saved with quantised weights needs no scheme: load it by its path.

    >>> Quantised("smollm2", "int8").scheme
    'int8'
    """

    base: Base
    scheme: str

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise LoadError(
                f"No scheme {str(self.scheme)[:40]!r}",
                f"weights can be quantised to {', '.join(SCHEMES)}",
                "Name one of them.",
            )


@checked
@dataclass(frozen=True)
class Adapted:
    """A model with one or more PEFT adapters on top of it.

    `adapters` is a folder that PEFT wrote, or several; all of them are active at once.
    `strength` multiplies what they add: 1 is as trained, 0 the base. With `merged` they
    are added to the weights, as for deployment. Without a base, the folder names it.

    >>> Adapted("smollm2", "lora/", strength=0.5).folders
    ('lora/',)
    """

    base: Base
    adapters: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    strength: float = 1.0
    merged: bool = False

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the folders of all adapters."""
        if isinstance(self.adapters, str | os.PathLike):
            return (os.fspath(self.adapters),)
        return tuple(os.fspath(adapter) for adapter in self.adapters)

    def __post_init__(self) -> None:
        if not self.folders:
            raise LoadError(
                "Cannot adapt a model",
                "the list of adapters is empty",
                "Give the folder of an adapter, or load the base itself.",
            )
        if not math.isfinite(self.strength):
            raise LoadError(
                f"Cannot adapt a model at strength {self.strength}",
                "it is not a finite number",
                "Give 1 for the adapter as it was trained.",
            )


ModelVariant: TypeAlias = Adapted | Quantised


def variant_steps(source: Base) -> list[dict[str, Any]]:
    """Return the variants of a source as JSON, outermost first, without its base.

    >>> variant_steps(Adapted(Quantised("smollm2", "nf4"), "/lora"))
    [{'adapters': ['/lora'], 'strength': 1.0, 'merged': False}, {'scheme': 'nf4'}]
    """
    if isinstance(source, Quantised):
        return [{"scheme": source.scheme}, *variant_steps(source.base)]
    if not isinstance(source, Adapted):
        return []
    folders = [os.path.abspath(os.path.expanduser(path)) for path in source.folders]
    step = {"adapters": folders, "strength": source.strength, "merged": source.merged}
    return [step, *variant_steps(source.base)]


def with_steps(base: Base, steps: Sequence[dict[str, Any]]) -> Base:
    """Return a base with the variants that `variant_steps` listed.

    >>> with_steps("smollm2", [{"scheme": "nf4"}])
    Quantised(base='smollm2', scheme='nf4')
    """
    for step in reversed(steps):
        wrap = Quantised if "scheme" in step else Adapted
        base = wrap(base, **step)
    return base
