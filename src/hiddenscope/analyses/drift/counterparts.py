"""Learn which tensors inside a port's block are which of the reference's, whatever the port's layout.

A port may split what the reference fuses, fuse what it splits, permute the rows of a projection or fold a norm into it.
What such a block computes inside is known from a block that agrees with the reference's: there, a tensor of the port
that equals one of the reference's, or some of its columns, or its columns in another order, is its counterpart. The
same must hold in every block of the port. A tensor without a counterpart is a matter of layout and says nothing.

Where no block agrees nothing is known of the layout. Then only modules with the very weights of one of the reference's
modules have counterparts, and modules that hold the same ones of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import Call

MOST_COLUMNS = 8192  # of a tensor whose columns are looked for in another order
SAMPLE = 64  # tokens by which columns are told apart


class Place(NamedTuple):
    """A tensor in a block: the state that a call was given or what it returned. Calls of one path are counted."""

    path: str
    number: int
    side: Literal["input", "output"]


class Columns(NamedTuple):
    """Columns of a tensor of the reference, and the columns of the port's tensor that equal them."""

    place: Place
    reference: Tensor
    port: Tensor


@dataclass(frozen=True)
class Counterpart:
    """The columns of the reference's tensors that make up one of the port's."""

    columns: tuple[Columns, ...]

    @property
    def whole(self) -> Place | None:
        """The reference's tensor, where the port's is the same column by column."""
        first = self.columns[0]
        if len(self.columns) > 1 or len(first.reference) != len(first.port):
            return None
        in_order = torch.arange(len(first.port))
        is_same = torch.equal(first.reference, in_order) and torch.equal(first.port, in_order)
        return first.place if is_same else None


Counterparts = Mapping[Place, Counterpart]
Same = Callable[[Tensor, Tensor], bool]
"""Tells whether two tensors of one shape differ by rounding alone."""


def calls_by_place(block: Call) -> dict[tuple[str, int], Call]:
    """Number the calls inside a block, each under its path within the block."""
    numbers: Counter[str] = Counter()
    calls: dict[tuple[str, int], Call] = {}
    for call in block.walk():
        path = call.path[len(block.path) :].lstrip(".")
        calls[path, numbers[path]] = call
        numbers[path] += 1
    return calls


def tensors_by_place(block: Call) -> dict[Place, Tensor]:
    """List the states that go into and come out of every call inside a block, as rows."""
    tensors: dict[Place, Tensor] = {}
    for (path, number), call in calls_by_place(block).items():
        if call.state is not None and call.state.is_floating_point():
            tensors[Place(path, number, "input")] = as_rows(call.state)
        if call.output is not None:
            tensors[Place(path, number, "output")] = as_rows(call.output)
    return tensors


def as_rows(tensor: Tensor) -> Tensor:
    """Flatten a tensor of one text to rows, on the CPU."""
    return tensor.reshape(-1, tensor.shape[-1]).cpu()


def learn(reference: Call, port: Call, same: Same) -> dict[Place, Counterpart]:
    """Find the counterpart of every tensor in a port's block among those of the reference's, on equal input."""
    known = tensors_by_place(reference)
    counterparts: dict[Place, Counterpart] = {}
    for place, rows in tensors_by_place(port).items():
        candidates = {other: values for other, values in known.items() if len(values) == len(rows)}
        columns = _whole(rows, candidates, same) or _slice(rows, candidates, same)
        columns = columns or _tiles(rows, candidates, same) or _reordered(rows, candidates, same)
        if columns:
            counterparts[place] = Counterpart(tuple(columns))
    return counterparts


def _whole(rows: Tensor, known: Mapping[Place, Tensor], same: Same) -> list[Columns]:
    for place, values in known.items():
        if values.shape == rows.shape and same(values, rows):
            every = torch.arange(rows.shape[1])
            return [Columns(place, every, every)]
    return []


def _slice(rows: Tensor, known: Mapping[Place, Tensor], same: Same) -> list[Columns]:
    """Find a tensor among the columns of a wider one of the reference: one of fused projections."""
    width = rows.shape[1]
    for place, values in known.items():
        for start in range(0, values.shape[1] - width + 1, _step(width, values.shape[1])):
            columns = torch.arange(start, start + width)
            if width < values.shape[1] and same(values[:, columns], rows):
                return [Columns(place, columns, torch.arange(width))]
    return []


def _tiles(rows: Tensor, known: Mapping[Place, Tensor], same: Same) -> list[Columns]:
    """Make a tensor up of several of the reference's, side by side: projections that the port fuses."""
    tiles: list[Columns] = []
    start = 0
    while start < rows.shape[1]:
        tile = _tile_at(start, rows, known, same)
        if tile is None:
            return []
        tiles.append(tile)
        start = int(tile.port[-1]) + 1
    return tiles


def _tile_at(start: int, rows: Tensor, known: Mapping[Place, Tensor], same: Same) -> Columns | None:
    for place, values in known.items():
        columns = torch.arange(start, start + values.shape[1])
        fits = place.side == "output" and int(columns[-1]) < rows.shape[1]
        if fits and same(values, rows[:, columns]):
            return Columns(place, torch.arange(values.shape[1]), columns)
    return None


def _reordered(rows: Tensor, known: Mapping[Place, Tensor], same: Same) -> list[Columns]:
    """Find a tensor whose columns are the reference's in another order: Meta's layout of rotary positions."""
    width = rows.shape[1]
    if width > MOST_COLUMNS:
        return []
    for place, values in known.items():
        if values.shape != rows.shape or place.side == "input":
            continue
        distances = torch.cdist(rows[:SAMPLE].T.double(), values[:SAMPLE].T.double())
        order = distances.argmin(1)
        is_permutation = len(set(order.tolist())) == width
        if is_permutation and same(values[:, order], rows):
            return [Columns(place, order, torch.arange(width))]
    return []


def _step(width: int, whole: int) -> int:
    """Choose the distance between the places where a slice may begin: projections are of equal or related sizes."""
    return math.gcd(width, whole)


def by_weights(
    reference: Call, port: Call, reference_part: Callable[[str], nn.Module], port_part: Callable[[str], nn.Module]
) -> dict[Place, Counterpart]:
    """Pair modules that hold the very weights of one of the reference's, and modules that hold the same of these."""
    reference_calls, port_calls = calls_by_place(reference), calls_by_place(port)
    leaves = {key: call for key, call in reference_calls.items() if _weights_of(reference_part(call.path))}
    partners: dict[tuple[str, int], tuple[str, int]] = {}
    for key, call in port_calls.items():
        weights = _weights_of(port_part(call.path))
        if weights:
            for other, reference_call in leaves.items():
                if _are_equal(weights, _weights_of(reference_part(reference_call.path))):
                    partners[key] = other
                    break
    for key, call in port_calls.items():
        inside = _leaves_inside(key, call, port_calls, port_part)
        if call.inner and inside and all(leaf in partners for leaf in inside):
            holder = _holder({partners[leaf] for leaf in inside}, reference_calls, reference_part)
            if holder is not None:
                partners[key] = holder
    return dict(_as_counterparts(partners, reference_calls, port_calls))


def _as_counterparts(
    partners: Mapping[tuple[str, int], tuple[str, int]],
    reference_calls: Mapping[tuple[str, int], Call],
    port_calls: Mapping[tuple[str, int], Call],
) -> Iterator[tuple[Place, Counterpart]]:
    for key, other in partners.items():
        pairs = (
            ("input", port_calls[key].state, reference_calls[other].state),
            ("output", port_calls[key].output, reference_calls[other].output),
        )
        for side, tensor, expected in pairs:
            if tensor is not None and expected is not None and as_rows(tensor).shape == as_rows(expected).shape:
                every = torch.arange(tensor.shape[-1])
                place = Place(*other, side)  # type: ignore[arg-type]
                yield Place(*key, side), Counterpart((Columns(place, every, every),))  # type: ignore[arg-type]


def _weights_of(part: nn.Module) -> list[Tensor]:
    return [weight.detach() for weight in part._parameters.values() if weight is not None]


def _are_equal(weights: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Check that two modules hold the same weights, as they are or transposed."""
    if len(weights) != len(others):
        return False
    return all(any(_is_equal(weight, other) for other in others) for weight in weights)


def _is_equal(weight: Tensor, other: Tensor) -> bool:
    values, expected = weight.cpu(), other.cpu()
    if values.shape == expected.shape and torch.equal(values, expected):
        return True
    return values.ndim == 2 and values.shape == expected.T.shape and torch.equal(values, expected.T)


def _leaves_inside(
    key: tuple[str, int],
    call: Call,
    calls: Mapping[tuple[str, int], Call],
    part: Callable[[str], nn.Module],
) -> list[tuple[str, int]]:
    """List the calls inside a call whose modules hold weights themselves."""
    inside = {id(inner) for inner in call.walk()}
    return [
        other
        for other, inner in calls.items()
        if other != key and id(inner) in inside and _weights_of(part(inner.path))
    ]


def _holder(
    leaves: set[tuple[str, int]], calls: Mapping[tuple[str, int], Call], part: Callable[[str], nn.Module]
) -> tuple[str, int] | None:
    """Find the smallest call that holds these leaves and no other."""
    holders = []
    for key, call in calls.items():
        inside = set(_leaves_inside(key, call, calls, part))
        if call.inner and inside == leaves:
            holders.append(key)
    return max(holders, key=lambda key: len(key[0]), default=None)
