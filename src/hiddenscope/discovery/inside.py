"""Inside: where the heads of a block's attention and the neurons of its MLP are.

What a branch adds is made by its last projection, a linear map. Its input is `z` of an
attention, which splits into heads, or the neurons of an MLP. Queries, keys and values
are operands of functions that the code of an attention calls.

A `Write` is what a part of a projection's input adds to the residual stream.
Projections and norms are run by their `forward`: they are run inside a pass, where a
call of the module itself would set off the hooks that watch it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.discovery.trace import Layout, OperationPlace, Tap
from hiddenscope.modules import hooks, operations
from hiddenscope.modules.quantised import quantised_weights
from hiddenscope.sites import Site

# Columns of a weight that are converted to float64 at a time.
COLUMN_BLOCK = 2048


@dataclass(frozen=True)
class HeadLayout:
    """How an operand of attention holds its heads.

    It is [text, head, token, dim], or [text x head, token, dim] with `flat_heads` heads
    of each text, and its last two axes are exchanged if `transposed`. Grouped-query
    attention may repeat each of its `heads`, in some passes and not in others.

    >>> import torch
    >>> layout = HeadLayout(heads=2)
    >>> layout.states(torch.zeros(1, 4, 7, 16), tokens=7).shape
    torch.Size([1, 7, 32])
    """

    heads: int
    flat_heads: int = 0
    transposed: bool = False

    def texts(self, tensor: Tensor, tokens: int) -> int:
        """Return the number of texts in the operand."""
        return self.split(tensor).shape[0]

    def length(self, tensor: Tensor) -> int:
        """Return the number of tokens in the operand, earlier passes included."""
        return self.split(tensor).shape[2]

    def split(self, tensor: Tensor) -> Tensor:
        """Return the operand as [text, head, token, dim], repeated heads included."""
        if self.flat_heads:
            tensor = tensor.reshape(-1, self.flat_heads, *tensor.shape[1:])
        return tensor.mT if self.transposed else tensor

    def states(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the operand as [text, token, head x dim], each head once."""
        heads = self.split(tensor)
        copies = heads.shape[1] // self.heads
        # Keys and values of earlier passes come before those of this one.
        recent = heads[:, ::copies, heads.shape[2] - tokens :]
        return recent.transpose(1, 2).flatten(2)

    def with_states(self, tensor: Tensor, states: Tensor) -> Tensor:
        """Return a copy of the operand that holds other states."""
        # Contiguous, so that to split it makes no copy.
        new = tensor.clone(memory_format=torch.contiguous_format)
        heads = self.split(new)
        copies = heads.shape[1] // self.heads
        texts, tokens = states.shape[:2]
        changed = states.reshape(texts, tokens, self.heads, -1).transpose(1, 2)
        recent = heads[:, :, heads.shape[2] - tokens :]
        recent.copy_(changed.repeat_interleave(copies, dim=1))
        return new


@dataclass(frozen=True)
class OperationTap:
    """Where a state is an operand of an operation, or its output (-1)."""

    place: OperationPlace
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

    def is_at(self, operation: operations.Operation) -> bool:
        """Tell whether an operation of the right call is the one of the state."""
        place = self.place
        return (operation.kind, operation.number) == (place.kind, place.number)

    def read(self, operation: operations.Operation, output: Tensor) -> Tensor | None:
        """Return the tensor of the state; None at any other operation."""
        if not self.is_at(operation):
            return None
        return output if self.operand < 0 else operation.operands[self.operand]

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
    dim: int
    key_dim: int
    weights: OperationPlace
    scores: OperationPlace | None
    queries: HeadLayout
    keys: HeadLayout
    values: HeadLayout
    has_other_keys: bool = False

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


def inner_parts(block: InsideBlock, *, neurons: bool) -> Sequence[str]:
    """Return the parts of sites inside a block; single neurons only if asked for."""
    parts: list[str] = []
    for name, branch in block.branches.items():
        heads = branch.heads
        if heads is not None:
            # The keys of a cross-attention are the encoder's tokens. Those of the
            # attention of T5Gemma 2 are the tokens of both stacks.
            shown = "q" if heads.has_other_keys else "qkv"
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


def place_inside(block: InsideBlock, site: Site) -> tuple[Tap | OperationTap, int]:
    """Return where the state of a site is read, and its width there.

    Those of a head or neuron are where all of them are.
    """
    if site.part == "router":
        assert block.router is not None
        return block.router, block.experts
    branch = block.branches[site.branch]
    heads, name = branch.heads, site.part.rpartition(".")[2]
    if heads is not None and name in ("q", "k", "v"):
        tap = heads.tap(name)
        assert tap is not None
        layouts = {"q": heads.queries, "k": heads.keys, "v": heads.values}
        dim = heads.dim if name == "v" else heads.key_dim
        return tap, layouts[name].heads * dim
    assert branch.projection is not None
    return branch.projection.tap, branch.projection.width


def why_refused(block: InsideBlock, site: Site) -> str:
    """Say why a block has no such site; empty if nothing is refused there."""
    if site.part == "router":
        return block.no_router
    branch = block.branches.get(site.branch)
    if branch is None:
        return f"it has no {site.branch}"
    if branch.refused:
        return branch.refused
    if branch.heads is not None and site.kind in ("cross.k", "cross.v"):
        return "its rows are the encoder's tokens, not the decoder's"
    is_of_keys = site.kind in ("attn.k", "attn.v")
    if branch.heads is not None and branch.heads.has_other_keys and is_of_keys:
        return "its rows are the encoder's tokens too"
    if branch.heads is not None and site.kind in ("attn.q", "attn.k", "cross.q"):
        return "" if branch.heads.scores else "several products make its scores"
    return ""


class Write:
    """What some columns of a projection's input write: a head, or a neuron.

    The bias belongs to none of them. A norm after the projection is taken with the
    scale that it has for the whole, so that the writes still sum up.
    """

    def __init__(
        self, module: nn.Module, projection: Projection, columns: slice
    ) -> None:
        self.part = module.get_submodule(projection.tap.path)
        self.norm = module.get_submodule(projection.norm) if projection.norm else None
        self.columns = columns
        self.width = projection.width
        self.weight = _weight(self.part)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return what the columns of inputs [..., width] write [..., hidden size]."""
        return self._normed(self.linear(inputs[..., self.columns]), inputs)

    def bias(self, inputs: Tensor) -> Tensor:
        """Return what the projection adds for inputs [..., width] of zeros."""
        return self._normed(self.part.forward(torch.zeros_like(inputs)), inputs)

    def _normed(self, written: Tensor, inputs: Tensor) -> Tensor:
        if self.norm is None:
            return written
        return written * frozen_scale(self.norm, self.part.forward(inputs)).to(written)

    def linear(self, piece: Tensor) -> Tensor:
        """Return what inputs [..., columns] of these columns write before any norm."""
        columns = self.columns
        if self.weight is not None:
            weight = self.weight[:, columns].to(piece)
            return functional.linear(piece, weight)
        # A quantised or adapted projection: only its own code knows its weight.
        masked = piece.new_zeros(*piece.shape[:-1], self.width)
        nothing = torch.zeros_like(masked)
        masked[..., columns] = piece
        biased: Tensor = self.part.forward(masked)
        bias: Tensor = self.part.forward(nothing)
        return biased - bias

    def gain(self, written: Tensor) -> Tensor:
        """Return the gain of the norm for each channel of what is written.

        It is the factor that a norm has besides the scale of each token, and 1 where
        there is no norm.
        """
        if self.norm is None:
            return written.new_ones(written.shape[-1])
        ones = written.new_ones(1, written.shape[-1])
        gain: Tensor = self.norm.forward(ones)[0]
        return gain


def effects_along(
    module: nn.Module, projection: Projection, inputs: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each column of a projection's input, and its bias, add in directions.

    For inputs [row, width] and a direction [row, hidden size] for each, the effects of
    the columns are [row, width] and those of the bias [row], in float64. A norm after
    the projection is taken with its frozen scale.
    """
    part = module.get_submodule(projection.tap.path)
    batch = inputs[None]
    along = directions
    if projection.norm:
        norm = module.get_submodule(projection.norm)
        along = directions * frozen_scale(norm, part.forward(batch))[0]
    bias = part.forward(torch.zeros_like(batch))[0].double()
    weight = _weight(part)
    blocks = []
    for start in range(0, projection.width, COLUMN_BLOCK):
        columns = slice(start, start + COLUMN_BLOCK)
        if weight is not None:
            towards = along @ weight[:, columns].to(along)
            blocks.append(inputs[:, columns].double() * towards)
            continue
        # A quantised or adapted projection: each column goes through its code by
        # itself.
        rows = []
        for row, direction in zip(inputs, along, strict=True):
            piece = row[columns]
            masked = row.new_zeros(len(piece), len(row))
            masked[:, columns] = torch.diag(piece)
            written = part.forward(masked[None])[0].double()
            nothing = part.forward(torch.zeros_like(masked[None, :1]))[0].double()
            rows.append((written - nothing) @ direction)
        blocks.append(torch.stack(rows))
    return torch.cat(blocks, 1), (bias * along).sum(-1)


def frozen_scale(norm: nn.Module, inputs: Tensor) -> Tensor:
    """Return the factor [..., hidden size] by which a norm multiplies each number.

    Such a norm has a gain for each channel and a scale for each token, and nothing
    else.
    """
    gain = norm.forward(torch.ones_like(inputs)).double()
    directed = inputs.double() * gain
    output = norm.forward(inputs).double()
    size = (directed * directed).sum(-1, keepdim=True)
    scale = (output * directed).sum(-1, keepdim=True) / size.clamp_min(1e-300)
    factor: Tensor = gain * scale
    return factor


def _weight(part: nn.Module) -> Tensor | None:
    """Return the weight [output, input] of a plain projection; None of any other."""
    if hooks.foreign_hooks(part) or hooks.is_offloaded(part):
        return None
    for quantised in quantised_weights(part):
        # A product that rounds its input is not linear.
        return None if quantised.rounds_input else quantised.unpack()
    weight: Any = getattr(part, "weight", None)
    if type(part) is nn.Linear:
        return weight if isinstance(weight, Tensor) else None
    # GPT-2's projections hold their weight the other way round.
    if type(part).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.T
    return None
