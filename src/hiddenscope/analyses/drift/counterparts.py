"""Learn which tensors inside a port's block are which of the reference's, whatever the
port's layout.

A port may split what the reference fuses, fuse what it splits, permute the rows of a
projection or fold a norm into it. What such a block computes inside is known from a
block that agrees with the reference's: there, a tensor of the port that equals one of
the reference's, or some of its columns, or its columns in another order, is its
counterpart. The same must hold in every block of the port. A tensor without a
counterpart is a matter of layout and says nothing.

Where no block agrees nothing is known of the layout. Then only modules with the very
weights of one of the reference's modules have counterparts, and containers that hold
exactly the same weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import ModuleCall

MOST_COLUMNS = 8192  # of a tensor whose columns are looked for in another order
SAMPLE = 64  # tokens by which columns are told apart


TensorSide = Literal["input", "output"]
CallKey = tuple[str, int]
"""The path of a module within a block, and which of its calls."""


class BlockTensor(NamedTuple):
    """A tensor in a block: the state that a call was given or what it returned. Calls
    of one path are counted.
    """

    path: str
    number: int
    side: TensorSide


class SharedColumns(NamedTuple):
    """Columns of a tensor of the reference, and the columns of the port's tensor that
    equal them.
    """

    place: BlockTensor
    reference: Tensor
    port: Tensor
    reference_width: int


@dataclass(frozen=True)
class Counterpart:
    """The columns of the reference's tensors that make up one of the port's."""

    columns: tuple[SharedColumns, ...]

    @property
    def identical_tensor(self) -> BlockTensor | None:
        """The reference's tensor, where the port's is the same column by column."""
        first = self.columns[0]
        in_order = torch.arange(first.reference_width)
        is_same = torch.equal(first.reference, in_order) and torch.equal(
            first.port, in_order
        )
        return first.place if is_same and len(self.columns) == 1 else None


Counterparts = Mapping[BlockTensor, Counterpart]
Same = Callable[[Tensor, Tensor], bool]
"""Tells whether two tensors of one shape differ by rounding alone."""


def calls_by_place(block: ModuleCall) -> dict[CallKey, ModuleCall]:
    """Number the calls inside a block, each under its path within the block."""
    numbers: Counter[str] = Counter()
    calls: dict[CallKey, ModuleCall] = {}
    for call in block.walk():
        path = call.path[len(block.path) :].lstrip(".")
        calls[path, numbers[path]] = call
        numbers[path] += 1
    return calls


def tensors_by_place(block: ModuleCall) -> dict[BlockTensor, Tensor]:
    """List the states that go into and come out of every call inside a block, as rows."""
    tensors: dict[BlockTensor, Tensor] = {}
    for (path, number), call in calls_by_place(block).items():
        if call.state is not None and call.state.is_floating_point():
            tensors[BlockTensor(path, number, "input")] = as_rows(call.state)
        if call.output is not None:
            tensors[BlockTensor(path, number, "output")] = as_rows(call.output)
    return tensors


def as_rows(tensor: Tensor) -> Tensor:
    """Flatten a tensor of one text to rows, on the CPU."""
    return tensor.reshape(-1, tensor.shape[-1]).cpu()


def learn(
    known: Mapping[BlockTensor, Tensor],
    tensors: Mapping[BlockTensor, Tensor],
    same: Same,
    *,
    reordered: bool,
) -> dict[BlockTensor, Counterpart]:
    """Find the counterpart of every tensor in a port's block among those of the
    reference's, on equal input.

    With `reordered`, a tensor may have the reference's columns in another order.
    """
    counterparts: dict[BlockTensor, Counterpart] = {}
    for place, rows in tensors.items():
        candidates = {
            other: values for other, values in known.items() if len(values) == len(rows)
        }
        columns = _whole(rows, candidates, same) or _slice(rows, candidates, same)
        columns = columns or _tiles(rows, candidates, same)
        if reordered and not columns:
            columns = _reordered(rows, candidates, same)
        if columns:
            counterparts[place] = Counterpart(tuple(columns))
    return counterparts


def _whole(
    rows: Tensor, known: Mapping[BlockTensor, Tensor], same: Same
) -> list[SharedColumns]:
    for place, values in known.items():
        if values.shape == rows.shape and same(values, rows):
            every = torch.arange(rows.shape[1])
            return [SharedColumns(place, every, every, len(every))]
    return []


def _slice(
    rows: Tensor, known: Mapping[BlockTensor, Tensor], same: Same
) -> list[SharedColumns]:
    """Find a tensor among the columns of a wider one of the reference: one of fused
    projections.
    """
    width = rows.shape[1]
    for place, values in known.items():
        for start in range(
            0, values.shape[1] - width + 1, _step(width, values.shape[1])
        ):
            columns = torch.arange(start, start + width)
            if width < values.shape[1] and same(values[:, columns], rows):
                return [
                    SharedColumns(place, columns, torch.arange(width), values.shape[1])
                ]
    return []


def _tiles(
    rows: Tensor, known: Mapping[BlockTensor, Tensor], same: Same
) -> list[SharedColumns]:
    """Make a tensor up of several of the reference's, side by side: projections that
    the port fuses.
    """
    tiles: list[SharedColumns] = []
    start = 0
    while start < rows.shape[1]:
        tile = _tile_at(start, rows, known, same)
        if tile is None:
            return []
        tiles.append(tile)
        start = int(tile.port[-1]) + 1
    return tiles


def _tile_at(
    start: int, rows: Tensor, known: Mapping[BlockTensor, Tensor], same: Same
) -> SharedColumns | None:
    for place, values in known.items():
        columns = torch.arange(start, start + values.shape[1])
        fits = place.side == "output" and int(columns[-1]) < rows.shape[1]
        if fits and same(values, rows[:, columns]):
            return SharedColumns(
                place, torch.arange(values.shape[1]), columns, values.shape[1]
            )
    return None


def _reordered(
    rows: Tensor, known: Mapping[BlockTensor, Tensor], same: Same
) -> list[SharedColumns]:
    """Find a tensor whose columns are the reference's in another order: Meta's layout
    of rotary positions.
    """
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
            return [SharedColumns(place, order, torch.arange(width), width)]
    return []


def _step(width: int, whole: int) -> int:
    """Choose the distance between the places where a slice may begin: projections are
    of equal or related sizes.
    """
    return math.gcd(width, whole)


FindPart = Callable[[str], nn.Module]


def by_weights(
    reference: ModuleCall,
    port: ModuleCall,
    reference_part: FindPart,
    port_part: FindPart,
) -> dict[BlockTensor, Counterpart]:
    """Pair modules that hold the very weights of one of the reference's, however these
    are laid out inside it.

    A module without calls inside it must hold all of these weights, as they are or
    transposed.
    """
    reference_calls, port_calls = calls_by_place(reference), calls_by_place(port)
    learned = learn_weights(
        reference_part(reference.path), port_part(port.path), reordered=False
    )
    holders: dict[frozenset[str], tuple[str, int]] = {}
    for key, call in reference_calls.items():
        # Inner calls come later, so that the smallest module which holds these weights
        # stays.
        holders[frozenset(_names_inside(key[0], reference_part(call.path)))] = key
    counterparts: dict[BlockTensor, Counterpart] = {}
    for key, call in port_calls.items():
        names = _names_inside(key[0], port_part(call.path))
        if not names or not all(name in learned for name in names):
            continue
        sources: set[str] = set()
        for name in names:
            sources |= set(learned[name].weights)
        partner = holders.get(frozenset(sources))
        if partner is None:
            continue
        part, other = (
            port_part(call.path),
            reference_part(reference_calls[partner].path),
        )
        holds_all = _size(part) == _size(other)
        is_same_leaf = not call.inner and _are_equal(
            _weights_of(part), _weights_of(other)
        )
        if (call.inner and holds_all) or is_same_leaf:
            counterparts |= _as_counterparts(
                key, call, partner, reference_calls[partner]
            )
    return counterparts


def _size(part: nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters())


def _names_inside(path: str, part: nn.Module) -> list[str]:
    """List the weights inside a module by their paths within the block."""
    return [f"{path}.{name}".lstrip(".") for name, _ in part.named_parameters()]


def _as_counterparts(
    key: tuple[str, int],
    call: ModuleCall,
    partner: tuple[str, int],
    expected: ModuleCall,
) -> dict[BlockTensor, Counterpart]:
    """Pair what goes into and comes out of two calls, where it is of one shape."""
    pairs: dict[BlockTensor, Counterpart] = {}
    tensors: dict[TensorSide, tuple[Tensor | None, Tensor | None]] = {
        "input": (call.state, expected.state),
        "output": (call.output, expected.output),
    }
    for side, (tensor, other) in tensors.items():
        if (
            tensor is not None
            and other is not None
            and as_rows(tensor).shape == as_rows(other).shape
        ):
            every = torch.arange(tensor.shape[-1])
            pairs[BlockTensor(*key, side)] = Counterpart(
                (SharedColumns(BlockTensor(*partner, side), every, every, len(every)),)
            )
    return pairs


def _weights_of(part: nn.Module) -> list[Tensor]:
    return [
        weight.detach() for weight in part._parameters.values() if weight is not None
    ]


def _are_equal(weights: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Check that two modules hold the same weights, as they are or transposed."""
    if len(weights) != len(others):
        return False
    return all(any(_is_equal(weight, other) for other in others) for weight in weights)


def _is_equal(weight: Tensor, other: Tensor) -> bool:
    values, expected = weight.cpu(), other.cpu()
    if values.shape == expected.shape and torch.equal(values, expected):
        return True
    are_matrices = values.ndim == 2 and expected.ndim == 2
    return (
        are_matrices
        and values.shape == expected.T.shape
        and torch.equal(values, expected.T)
    )


class SourceRows(NamedTuple):
    """The rows of the reference's weights that make up a weight of the port, by weight,
    orientation and number.
    """

    weights: tuple[str, ...]
    transposed: tuple[bool, ...]
    numbers: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """Whether the rows of each weight are taken one after another."""
        steps = zip(
            self.weights, self.numbers, self.weights[1:], self.numbers[1:], strict=False
        )
        return all(
            name != next_name or next_row == row + 1
            for name, row, next_name, next_row in steps
        )


def learn_weights(
    reference: nn.Module, port: nn.Module, *, reordered: bool
) -> dict[str, SourceRows]:
    """Find every weight of a port's block among the rows of the reference's: fused,
    split or transposed.

    With `reordered`, the rows may be in another order. A weight with a row that the
    reference has several times is left out, unless it is the next row of the same
    weight.
    """
    known: dict[bytes, list[_Row]] = {}
    for name, weight in reference.named_parameters():
        for transposed, rows in _orientations(weight):
            for number, row in enumerate(_bytes_of_rows(rows)):
                known.setdefault(row, []).append(_Row(name, transposed, number))
    learned: dict[str, SourceRows] = {}
    for name, weight in port.named_parameters():
        rows_of_reference = _source_rows(_bytes_of_rows(_matrix(weight)), known)
        if rows_of_reference is not None and (reordered or rows_of_reference.in_order):
            learned[name] = rows_of_reference
    return learned


class _Row(NamedTuple):
    weight: str
    transposed: bool
    number: int


def _source_rows(
    rows: Sequence[bytes], known: Mapping[bytes, Sequence[_Row]]
) -> SourceRows | None:
    """Find where each row comes from; None where one comes from nowhere or from several
    places.
    """
    sources: list[_Row] = []
    for row in rows:
        places = known.get(row, ())
        following = (
            sources[-1]._replace(number=sources[-1].number + 1) if sources else None
        )
        if following is not None and following in places:
            sources.append(following)
        elif len(places) == 1:
            sources.append(places[0])
        else:
            return None
    return SourceRows(*zip(*sources, strict=True)) if sources else None


def wrong_weights(
    reference: nn.Module,
    port: nn.Module,
    learned: Mapping[str, SourceRows],
    rounding: float,
) -> list[str]:
    """List the weights of a port's block that are not made of the reference's in the
    way that was learned.
    """
    known: dict[tuple[str, bool], Tensor] = {}
    for name, weight in reference.named_parameters():
        for transposed, rows in _orientations(weight):
            known[name, transposed] = rows
    wrong: list[str] = []
    for name, weight in port.named_parameters():
        if name in learned:
            sources = zip(*learned[name], strict=True)
            expected = torch.stack(
                [known[source, turned][number] for source, turned, number in sources]
            ).double()
            difference = (_matrix(weight).double() - expected).norm()
            if float(difference) > rounding * float(expected.norm()):
                wrong.append(name)
    return wrong


def _orientations(weight: Tensor) -> list[tuple[bool, Tensor]]:
    """Give a weight as it is and with the last two axes exchanged; a vector is a single
    row.
    """
    if weight.ndim < 2:
        return [(False, _matrix(weight))]
    return [(False, _matrix(weight)), (True, _matrix(weight.mT))]


def _matrix(weight: Tensor) -> Tensor:
    """Flatten a weight to rows; a vector is a single row."""
    width = weight.shape[-1] if weight.ndim else 1
    rows = weight.detach().cpu().reshape(-1, width)
    # `contiguous` would keep odd strides of axes with a single element, and these have
    # no bytes to view.
    return rows.clone(memory_format=torch.contiguous_format)


def _bytes_of_rows(rows: Tensor) -> list[bytes]:
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def is_column_scaled(weight: Tensor, other: Tensor, rounding: float) -> bool:
    """Check whether one matrix is the other with its columns scaled by different
    numbers, as by a folded norm.
    """
    if weight.ndim != 2 or weight.shape != other.shape:
        return False
    values, expected = weight.detach().double().cpu(), other.detach().double().cpu()
    scales = (values * expected).sum(0) / expected.square().sum(0).clamp_min(
        torch.finfo(torch.float64).tiny
    )
    rest = (values - expected * scales).norm() / values.norm()
    is_one_scale = bool((scales - scales.mean()).abs().max() <= rounding)
    return float(rest) <= rounding and not is_one_scale
