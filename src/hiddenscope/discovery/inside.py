"""Inside: where the heads of a block's attention and the neurons of its MLP are.

What a branch adds is made by its last projection, a linear map. Its input is `z` of an
attention, which splits into heads, or the neurons of an MLP. Queries, keys and values
are operands of functions that the code of an attention calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from hiddenscope.discovery.taps import Layout, Tap
from hiddenscope.modules import hooks, operations


@dataclass(frozen=True)
class HeadLayout:
    """How an operand of attention holds its heads.

    It is [text, head, token, dim], or [text x head, token, dim] if `flat`, with its
    last two axes exchanged if `transposed`. Each head is repeated `copies` times, as
    grouped-query attention does with keys and values.

    >>> import torch
    >>> layout = HeadLayout(heads=4, copies=2)
    >>> layout.states(torch.zeros(1, 4, 7, 16), tokens=7).shape
    torch.Size([1, 7, 32])
    """

    heads: int
    copies: int = 1
    is_flat: bool = False
    transposed: bool = False

    def split(self, tensor: Tensor) -> Tensor:
        """Return the operand as [text, head, token, dim], copies included."""
        if self.is_flat:
            tensor = tensor.unflatten(0, (-1, self.heads))
        return tensor.mT if self.transposed else tensor

    def states(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the operand as [text, token, head x dim], each head once."""
        heads = self.split(tensor)[:, :: self.copies]
        # Keys and values of earlier passes come before those of this one.
        recent = heads[:, :, heads.shape[2] - tokens :]
        return recent.transpose(1, 2).flatten(2)

    def with_states(self, tensor: Tensor, states: Tensor) -> Tensor:
        """Return a copy of the operand that holds other states."""
        new = tensor.clone()
        heads = self.split(new)
        tokens = states.shape[1]
        changed = states.unflatten(2, (self.heads // self.copies, -1)).transpose(1, 2)
        changed = changed.repeat_interleave(self.copies, dim=1)
        heads[:, :, heads.shape[2] - tokens :] = changed
        return new


@dataclass(frozen=True)
class Place:
    """An operation in a pass.

    It is the `number`th of its kind in the `call`th call of the module at `path`.
    """

    path: str
    call: int
    kind: operations.Kind
    number: int


@dataclass(frozen=True)
class OperationTap:
    """Where a state is an operand of an operation, or its output (-1)."""

    place: Place
    operand: int
    layout: HeadLayout | Layout
    side: Literal["inside"] = "inside"

    @property
    def path(self) -> str:
        """Return the path of the module whose code makes the operation."""
        return self.place.path

    @property
    def call(self) -> int:
        """Return the number of that module's call."""
        return self.place.call

    def __str__(self) -> str:
        return f"{self.place.kind} inside {self.path}"


@dataclass(frozen=True)
class Projection:
    """The linear map at the end of a branch, and the tap of its input.

    `norm` is the path of a norm that comes after it, which rescales every token.
    """

    tap: Tap
    width: int
    norm: str = ""


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one attention, and the operations that show how they attend.

    `weights` is where the pattern meets the values: torch's attention, or a product
    whose first factor is the pattern. `scores` is the product of queries and keys that
    a softmax makes the pattern of; it is None where several products make the scores.
    """

    heads: int
    key_heads: int
    dim: int
    key_dim: int
    weights: Place
    scores: Place | None
    queries: HeadLayout
    keys: HeadLayout
    values: HeadLayout
    has_sink: bool = False
    sees_source: bool = False

    @property
    def is_fused(self) -> bool:
        """Tell whether torch's attention makes the pattern, and never shows it."""
        return self.weights.kind == "attention"

    def tap(self, name: str) -> OperationTap | None:
        """Return where queries, keys or values (q, k, v) are; None if it is unknown."""
        if name == "v":
            operand = 2 if self.is_fused else 1
            return OperationTap(self.weights, operand, self.values)
        place = self.weights if self.is_fused else self.scores
        if place is None:
            return None
        operand, layout = (0, self.queries) if name == "q" else (1, self.keys)
        return OperationTap(place, operand, layout)


@dataclass(frozen=True)
class Branch:
    """What is known inside one branch of a block, or why nothing is."""

    projection: Projection | None = None
    heads: AttentionHeads | None = None
    refused: str = ""


@dataclass(frozen=True)
class InsideBlock:
    """The branches of one block by name, and the softmax over its experts."""

    branches: Mapping[str, Branch] = field(default_factory=dict)
    router: OperationTap | None = None
    experts: int = 0
    no_router: str = ""


@dataclass(frozen=True)
class Inside:
    """What is inside the blocks of a model, for each stack and block."""

    stacks: tuple[tuple[InsideBlock, ...], ...] = ()

    def block(self, stack: int, layer: int) -> InsideBlock:
        """Return the block that makes a layer."""
        return self.stacks[stack][layer - 1]


def parts_inside(block: InsideBlock, *, neurons: bool) -> Sequence[str]:
    """Return the parts of sites inside a block; single neurons only if asked for."""
    parts: list[str] = []
    for name, branch in block.branches.items():
        heads = branch.heads
        if heads is not None:
            # The rows of a cross-attention's keys and values are the encoder's tokens.
            shown = "q" if heads.sees_source else "qkv"
            parts += [f"{name}.{operand}" for operand in shown if heads.tap(operand)]
        if branch.projection is None:
            continue
        if heads is not None:
            parts.append(f"{name}.z")
            parts += [f"{name}.head.{head}" for head in range(heads.heads)]
        elif name == "mlp":
            parts.append("mlp.neurons")
            count = branch.projection.width if neurons else 0
            parts += [f"mlp.neuron.{neuron}" for neuron in range(count)]
    if block.router is not None:
        parts.append("router")
    return parts


Taps = Tap | OperationTap
Side = hooks.Side
