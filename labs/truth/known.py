"""A model whose inner workings are known: what every score is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

import hiddenscope as hs
from labs.truth.circuit import Circuit
from labs.truth.layout import Compiled
from labs.truth.program import Program


@dataclass(frozen=True)
class KnownModel:
    """A module, and the program and circuit that it runs.

    `host` is the architecture that the program was compiled into, or "trained", which
    has no matrices of a compiler.
    """

    host: str
    program: Program
    circuit: Circuit
    module: nn.Module
    compiled: Compiled | None = None

    @cached_property
    def model(self) -> hs.Model:
        """Return the module as hiddenscope loads it."""
        return hs.load((self.module, None))

    @cached_property
    def sites(self) -> list[str]:
        """Return the states of the residual stream.

        A trained model may have more blocks than its circuit needs.
        """
        return self.circuit.sites(self.model.anatomy.stacks[-1].depth)

    def ids(self, tokens: list[str]) -> list[int]:
        """Return the ids of tokens."""
        return [self.id(token) for token in tokens]

    def id(self, token: str) -> int:
        """Return the id of a token."""
        return self.program.vocabulary.index(token)
