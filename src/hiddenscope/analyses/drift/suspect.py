"""Describe the module at fault, and measure whether a change of the reference's module
gives what it gives.

Nothing of the user's is touched: a hypothesis runs the reference's module on other
arguments, or a private copy of it with another attribute, part or kernel. All tensors
are on the reference's device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import ModuleCall, tensors_in

Trial = tuple[str, str, Tensor | None]
"""A hypothesis: the name of a fault, a sentence, and the output that it leads to; None
where the module refuses it.
"""
# The share of the error that a hypothesis may leave beyond rounding, and the share that
# it may leave at most.
UNEXPLAINED, LARGEST_REST = 0.02, 0.25
_SHAPES = re.compile("shape|size|dimension", re.IGNORECASE)


@dataclass(frozen=True)
class Suspect:
    """A module at fault beside the reference's module of the same role, with a call of
    the latter.

    `path` is its path in the candidate. `made` is what it returned on the input of
    `call`, on the reference's device; the call's output number `place` is what it
    should be. `same_make` says that weights of the same name can be compared. `mask`
    [text, token] is True for real tokens. `distance(expected, other)` is relative and
    leaves padding out; `rounding` is how large rounding alone may make it.
    """

    path: str
    reference: nn.Module
    candidate: nn.Module
    call: ModuleCall
    made: Tensor
    device: torch.device
    role: Literal["module", "block", "model"]
    same_make: bool
    padded: bool
    mask: Tensor
    blocks: Mapping[str, nn.Module]
    model: nn.Module
    distance: Callable[[Tensor, Tensor], float]
    rounding: float
    place: int = 0

    @property
    def expected(self) -> Tensor:
        """What the reference's module returned."""
        return self.call.outputs[self.place]

    @property
    def state(self) -> Tensor | None:
        """The hidden state that both were given, if the output has its shape."""
        state = self.call.state
        if state is None or state.shape != self.expected.shape:
            return None
        return state

    @cached_property
    def error(self) -> float:
        """How far the candidate's output is off, at most 1; also 1 where it has another
        shape.
        """
        if self.made.shape != self.expected.shape:
            return 1.0
        return min(1.0, self.distance(self.expected, self.made))

    @property
    def largest_rest(self) -> float:
        """How much of the error a hypothesis may leave that explains it."""
        if self.error <= self.rounding:
            return self.rounding
        # What is left may be rounding, but what is nearly as large as the error
        # explains nothing.
        return min(
            max(self.rounding, UNEXPLAINED * self.error), LARGEST_REST * self.error
        )

    def rest(self, output: Tensor | None) -> float:
        """Measure how much of the error a hypothesis leaves."""
        if output is None or output.shape != self.made.shape:
            return torch.inf
        return self.distance(self.made, output.to(self.made))

    def run(self, module: nn.Module, call: ModuleCall | None = None) -> Tensor | None:
        """Call a module as the reference's was called, or in another way; None where it
        refuses the arguments.
        """
        # A whole model is not run again for a hint: what differs in it is told as it
        # is.
        if self.role == "model":
            return self.made
        try:
            outputs = list(tensors_in((call or self.call).repeat(module, self.device)))
        except (TypeError, ValueError, IndexError):
            return None
        except RuntimeError as error:
            # A shape that does not fit is an answer. Anything else, such as a wrong
            # device, is a fault of ours.
            if not _SHAPES.search(str(error)):
                raise
            return None
        return outputs[self.place] if self.place < len(outputs) else None
