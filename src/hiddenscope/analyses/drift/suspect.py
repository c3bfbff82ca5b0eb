"""The module at fault beside the reference's, for testing hypotheses about the fault.

A hypothesis is a change of the reference's module, made on a private copy. It explains
the fault if the changed module returns what the module at fault returns. All tensors
are on the reference's device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import ModuleCall, tensors_in

# The share of the error that a hypothesis may leave unexplained, beyond rounding.
UNEXPLAINED = 0.02
# The share that it may leave including rounding: a change that leaves nearly all of the
# error explains nothing.
LARGEST_REST = 0.25
_SHAPE_ERROR = re.compile("shape|size|dimension", re.IGNORECASE)


class Hypothesis(NamedTuple):
    """A possible fault, a sentence about it, and the output that it would lead to.

    There is no output if the module does not accept the change.
    """

    fault: str
    evidence: str
    output: Tensor | None


@dataclass(frozen=True)
class Suspect:
    """A module at fault, the reference's module of the same role, and a call of it.

    `path` is its path in the candidate, and `output` what it returned on the input of
    `call`. With `same_make`, weights of the same name can be compared. `mask` [text,
    token] is True for real tokens. `distance(expected, other)` is relative and ignores
    padding; rounding alone can make it as large as `rounding`.
    """

    path: str
    reference: nn.Module
    candidate: nn.Module
    call: ModuleCall
    output: Tensor
    device: torch.device
    role: Literal["module", "block"]
    same_make: bool
    padded: bool
    mask: Tensor
    blocks: Mapping[str, nn.Module]
    model: nn.Module
    distance: Callable[[Tensor, Tensor], float]
    rounding: float

    @property
    def expected(self) -> Tensor:
        """Return what the reference's module returned."""
        return self.call.outputs[0]

    @property
    def state(self) -> Tensor | None:
        """Return the hidden state that both received, if it has the output's shape."""
        state = self.call.state
        if state is None or state.shape != self.expected.shape:
            return None
        return state

    @cached_property
    def error(self) -> float:
        """Return how far the output is off: at most 1, and 1 for another shape."""
        if self.output.shape != self.expected.shape:
            return 1.0
        return min(1.0, self.distance(self.expected, self.output))

    @property
    def largest_rest(self) -> float:
        """Return how much of the error a hypothesis may leave unexplained."""
        if self.error <= self.rounding:
            return self.rounding
        allowed = max(self.rounding, UNEXPLAINED * self.error)
        return min(allowed, LARGEST_REST * self.error)

    def rest(self, output: Tensor | None) -> float:
        """Return how much of the error the output of a hypothesis leaves."""
        if output is None or output.shape != self.output.shape:
            return torch.inf
        return self.distance(self.output, output.to(self.output))

    def run(self, module: nn.Module, call: ModuleCall | None = None) -> Tensor | None:
        """Call a module with the recorded arguments, or with those of another call.

        The result is None if the module does not accept them.
        """
        try:
            outputs = list(tensors_in((call or self.call).repeat(module, self.device)))
        except (TypeError, ValueError, IndexError):
            return None
        except RuntimeError as error:
            # A shape that does not fit is an answer. Anything else, such as tensors on
            # two devices, is a mistake of the hypothesis.
            if not _SHAPE_ERROR.search(str(error)):
                raise
            return None
        return outputs[0] if outputs else None
