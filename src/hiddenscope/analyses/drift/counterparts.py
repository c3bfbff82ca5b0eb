"""Learn which tensors inside a port's block correspond to which of the reference's.

A port may split what the reference fuses, fuse what it splits, permute the rows of a
projection or fold a norm into it. Its layout is learned from a block that agrees with
the reference's: a tensor of the port is the counterpart of one of the reference's if it
equals that tensor, some of its columns, or its columns in another order. The same must
then hold in every block of the port. A tensor without a counterpart is a matter of
layout and says nothing.

If no block agrees, the layout is unknown. Then only modules with exactly the weights of
one of the reference's modules have counterparts, and containers of exactly the same
weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import ModuleCall
from hiddenscope.analyses.drift.weights import all_among, learn_weights, weights_of

# Wider tensors are not searched for columns in another order.
MOST_COLUMNS = 8192
# Tokens by which columns are told apart.
SAMPLE = 64
CallKey = tuple[str, int]
"""The path of a module within a block, and the number of its call."""


class BlockTensor(NamedTuple):
    """A tensor in a block: the state that enters a call, or its output."""

    path: str
    number: int
    side: Literal["input", "output"]


class SharedColumns(NamedTuple):
    """Columns of a tensor of the reference and the equal columns of the port's."""

    place: BlockTensor
    reference: Tensor
    port: Tensor
    reference_width: int


@dataclass(frozen=True)
class Counterpart:
    """The columns of the reference's tensors that make up one of the port's."""

    columns: tuple[SharedColumns, ...]

    @classmethod
    def whole(cls, place: BlockTensor, width: int) -> Counterpart:
        """Return a tensor of the reference, column by column."""
        columns = torch.arange(width)
        return cls((SharedColumns(place, columns, columns, width),))

    @property
    def identical_tensor(self) -> BlockTensor | None:
        """Return the reference's tensor if the port's is the same, column by column."""
        if len(self.columns) > 1:
            return None
        place, reference, port, width = self.columns[0]
        in_order = torch.arange(width)
        is_same = torch.equal(reference, in_order) and torch.equal(port, in_order)
        return place if is_same else None


Counterparts = dict[BlockTensor, Counterpart]
Known = Mapping[BlockTensor, Tensor]
Same = Callable[[Tensor, Tensor], bool]
"""Checks whether two tensors of one shape differ by rounding alone."""


def calls_by_place(block: ModuleCall) -> dict[CallKey, ModuleCall]:
    """Return the calls inside a block by path within the block and number."""
    numbers: Counter[str] = Counter()
    calls: dict[CallKey, ModuleCall] = {}
    for call in block.walk():
        path = call.path[len(block.path) :].lstrip(".")
        calls[path, numbers[path]] = call
        numbers[path] += 1
    return calls


def tensors_by_place(block: ModuleCall) -> dict[BlockTensor, Tensor]:
    """Return the states that enter and leave every call inside a block, as rows."""
    tensors: dict[BlockTensor, Tensor] = {}
    for (path, number), call in calls_by_place(block).items():
        if call.state is not None:
            tensors[BlockTensor(path, number, "input")] = as_rows(call.state)
        if call.output is not None:
            tensors[BlockTensor(path, number, "output")] = as_rows(call.output)
    return tensors


def as_rows(tensor: Tensor) -> Tensor:
    """Flatten a tensor of one text to rows, on the CPU."""
    return tensor.reshape(-1, tensor.shape[-1]).cpu()


def learn(
    reference: Known, port: Known, same: Same, *, reordered: bool
) -> Counterparts:
    """Find the counterpart of every tensor in a port's block, on equal input.

    With `reordered`, a tensor may have the reference's columns in another order.
    """
    counterparts: Counterparts = {}
    for place, rows in port.items():
        known = {}
        for other, values in reference.items():
            if len(values) == len(rows):
                known[other] = values
        counterpart = (
            _whole(rows, known, same)
            or _slice(rows, known, same)
            or _tiles(rows, known, same)
        )
        if reordered and counterpart is None:
            counterpart = _permutation(rows, known, same)
        if counterpart is not None:
            counterparts[place] = counterpart
    return counterparts


def _whole(rows: Tensor, known: Known, same: Same) -> Counterpart | None:
    for place, values in known.items():
        if values.shape == rows.shape and same(values, rows):
            return Counterpart.whole(place, rows.shape[1])
    return None


def _slice(rows: Tensor, known: Known, same: Same) -> Counterpart | None:
    """Find a tensor among the columns of a wider one: one of fused projections."""
    width = rows.shape[1]
    for place, values in known.items():
        whole = values.shape[1]
        if width >= whole:
            continue
        # Fused projections have equal or related widths, so slices start at multiples.
        for start in range(0, whole - width + 1, math.gcd(width, whole)):
            columns = torch.arange(start, start + width)
            if same(values[:, columns], rows):
                shared = SharedColumns(place, columns, torch.arange(width), whole)
                return Counterpart((shared,))
    return None


def _tiles(rows: Tensor, known: Known, same: Same) -> Counterpart | None:
    """Compose a tensor of several of the reference's: projections the port fuses."""
    tiles: list[SharedColumns] = []
    start = 0
    while start < rows.shape[1]:
        tile = _tile_at(start, rows, known, same)
        if tile is None:
            return None
        tiles.append(tile)
        start += tile.reference_width
    return Counterpart(tuple(tiles))


def _tile_at(
    start: int, rows: Tensor, known: Known, same: Same
) -> SharedColumns | None:
    for place, values in known.items():
        width = values.shape[1]
        columns = torch.arange(start, start + width)
        fits = place.side == "output" and start + width <= rows.shape[1]
        if fits and same(values, rows[:, columns]):
            return SharedColumns(place, torch.arange(width), columns, width)
    return None


def _permutation(rows: Tensor, known: Known, same: Same) -> Counterpart | None:
    """Find a tensor with the same columns in another order.

    Meta's layout of rotary positions is such an order.
    """
    width = rows.shape[1]
    if width > MOST_COLUMNS:
        return None
    for place, values in known.items():
        if values.shape != rows.shape or place.side == "input":
            continue
        distances = torch.cdist(rows[:SAMPLE].T.double(), values[:SAMPLE].T.double())
        order = distances.argmin(1)
        is_permutation = len(set(order.tolist())) == width
        if is_permutation and same(values[:, order], rows):
            shared = SharedColumns(place, order, torch.arange(width), width)
            return Counterpart((shared,))
    return None


FindPart = Callable[[str], nn.Module]


def by_weights(
    reference: ModuleCall,
    port: ModuleCall,
    reference_part: FindPart,
    port_part: FindPart,
) -> Counterparts:
    """Pair modules that hold exactly the weights of one of the reference's.

    In a module with calls inside it, these may be split, fused or transposed. In one
    without, they may be transposed.
    """
    reference_calls = calls_by_place(reference)
    learned = learn_weights(
        reference_part(reference.path), port_part(port.path), reordered=False
    )
    holders: dict[frozenset[str], CallKey] = {}
    for key, call in reference_calls.items():
        # Inner calls come later, so the smallest module with these weights remains.
        names = _weights_inside(key[0], reference_part(call.path))
        holders[frozenset(names)] = key
    counterparts: Counterparts = {}
    for key, call in calls_by_place(port).items():
        part = port_part(call.path)
        names = _weights_inside(key[0], part)
        if not names or not learned.keys() >= set(names):
            continue
        sources: set[str] = set()
        for name in names:
            sources |= {row.weight for row in learned[name]}
        partner = holders.get(frozenset(sources))
        if partner is None:
            continue
        expected = reference_calls[partner]
        if _hold_same(part, reference_part(expected.path), is_leaf=not call.inner):
            counterparts |= pair_calls(key, call, partner, expected)
    return counterparts


def _weights_inside(path: str, part: nn.Module) -> list[str]:
    """Return the weights inside a module by their paths within the block."""
    return [f"{path}.{name}".lstrip(".") for name, _ in part.named_parameters()]


def _hold_same(part: nn.Module, other: nn.Module, *, is_leaf: bool) -> bool:
    if is_leaf:
        weights = list(weights_of(part).values())
        others = list(weights_of(other).values())
        return len(weights) == len(others) and all_among(weights, others)
    size = sum(weight.numel() for weight in part.parameters())
    return size == sum(weight.numel() for weight in other.parameters())


def pair_calls(
    key: CallKey, call: ModuleCall, partner: CallKey, expected: ModuleCall
) -> Counterparts:
    """Pair what enters and leaves two calls, where it has the same shape."""
    pairs: Counterparts = {}
    tensors, others = tensors_by_place(call), tensors_by_place(expected)
    sides: tuple[Literal["input", "output"], ...] = ("input", "output")
    for side in sides:
        tensor = tensors.get(BlockTensor("", 0, side))
        other = others.get(BlockTensor("", 0, side))
        if tensor is not None and other is not None and tensor.shape == other.shape:
            place = BlockTensor(*partner, side)
            pairs[BlockTensor(*key, side)] = Counterpart.whole(place, tensor.shape[1])
    return pairs
