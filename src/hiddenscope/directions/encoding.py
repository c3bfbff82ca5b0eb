"""Encoding: how the activations of a dictionary are computed from a state."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError

Gate: TypeAlias = Literal["linear", "relu", "threshold", "topk", "groups", "gated"]
StateNorm: TypeAlias = Literal["", "length", "layer", "mean", "centred", "model"]
# What gates do not work without.
NEEDED = {
    "threshold": ["threshold"],
    "topk": ["k"],
    "groups": ["k"],
    "gated": ["gate_bias", "gain"],
}


@checked
@dataclass(frozen=True, eq=False)
class Encoding:
    """Say how the activations of a dictionary are computed from a state.

    The products are `x @ W_enc + b_enc`. `gate` says which of them are kept: "linear",
    all; "relu", those above 0; "threshold", those above the `threshold` of their
    feature (JumpReLU); "topk", the `k` largest of a state, if above 0; "groups", the
    largest of each of `k` groups of features, if above 0 (groupmax of sparsify);
    "gated", features with `x @ W_enc + gate_bias` above 0, whose activation is then
    `relu(x @ W_enc * gain + b_enc)`.

    `centred`: the decoder's bias is subtracted from the state first. `state_norm`: each
    state is first brought to the length sqrt(width), or normed as by a layer norm, or
    its mean over the width is taken out ("mean"), and then it is brought to that length
    ("centred"); unless it is a transcoder's, what is decoded is brought back. "model"
    is one of "length" and "centred", and only the model says which. `by_norm`: what the
    threshold, or the rank among the k largest, is about is the product times the norm
    of the direction.

    >>> Encoding("topk", k=32).gate
    'topk'
    """

    gate: Gate = "relu"
    threshold: Tensor | None = None
    k: int | None = None
    gate_bias: Tensor | None = None
    gain: Tensor | None = None
    centred: bool = False
    state_norm: StateNorm = ""
    by_norm: bool = False

    def __post_init__(self) -> None:
        for name in NEEDED.get(self.gate, ()):
            if getattr(self, name) is None:
                problem = f"Cannot make a dictionary with gate={self.gate!r}"
                raise StatesError(problem, f"{name} is missing", f"Give {name}.")


def largest(values: Tensor, count: int) -> Tensor:
    """Mark the largest of the last dimension with 1, the others with 0.

    >>> largest(torch.tensor([3.0, 1.0, 2.0]), 2)
    tensor([1., 0., 1.])
    """
    places = values.topk(count).indices
    return torch.zeros_like(values).scatter(-1, places, 1)
