"""Compare weights of modules, also where a port fuses, splits or transposes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


def weights_of(part: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a module holds itself, by name."""
    weights = {}
    for name, weight in part._parameters.items():
        if weight is not None:
            weights[name] = weight.detach()
    return weights


def equal(tensor: Tensor, other: Tensor) -> bool:
    """Check that two tensors hold the same numbers, on any devices."""
    if tensor.shape != other.shape:
        return False
    return torch.equal(tensor.detach().cpu(), other.detach().cpu())


def equal_or_transposed(weight: Tensor, other: Tensor) -> bool:
    """Check that two weights are equal, as they are or with the last axes exchanged."""
    if equal(weight, other):
        return True
    return weight.ndim > 1 and equal(weight.mT, other)


def same_weights(part: nn.Module, other: nn.Module) -> bool:
    """Check that two modules hold equal parameters of the same names."""
    weights, others = weights_of(part), weights_of(other)
    if weights.keys() != others.keys():
        return False
    return all(equal(weight, others[name]) for name, weight in weights.items())


def all_among(weights: Sequence[Tensor], known: Sequence[Tensor]) -> bool:
    """Check that every weight is among the known ones, possibly transposed."""
    for weight in weights:
        if not any(equal_or_transposed(weight, other) for other in known):
            return False
    return True


def matrices_of(part: nn.Module) -> list[Tensor]:
    """Return all matrices inside a module."""
    return [weight.detach() for weight in part.parameters() if weight.ndim > 1]


def cosine(weight: Tensor, other: Tensor) -> float:
    """Return the cosine of two weights, as they are or transposed; -1 if none fits."""
    values, expected = weight.double().cpu(), other.double().cpu()
    forms = [expected]
    if expected.ndim == 2:
        forms.append(expected.T)
    best = -1.0
    for form in forms:
        if form.shape == values.shape:
            flat = values.flatten(), form.flatten()
            best = max(best, float(nn.functional.cosine_similarity(*flat, dim=0)))
    return best


def is_column_scaled(weight: Tensor, other: Tensor, rounding: float) -> bool:
    """Check whether one matrix is the other with each column scaled differently.

    A norm that is folded into a projection does this.
    """
    if weight.ndim != 2 or weight.shape != other.shape:
        return False
    values, expected = weight.detach().double().cpu(), other.detach().double().cpu()
    sizes = expected.square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    scales = (values * expected).sum(0) / sizes
    rest = (values - expected * scales).norm() / values.norm()
    is_one_scale = bool((scales - scales.mean()).abs().max() <= rounding)
    return float(rest) <= rounding and not is_one_scale


class SourceRow(NamedTuple):
    """A row of a weight of the reference, perhaps of the transposed weight."""

    weight: str
    transposed: bool
    number: int

    @property
    def following(self) -> SourceRow:
        """Return the next row of the same weight."""
        return self._replace(number=self.number + 1)


def learn_weights(
    reference: nn.Module, port: nn.Module, *, reordered: bool
) -> dict[str, list[SourceRow]]:
    """Find the rows of each weight of a port's block among those of the reference's.

    With `reordered`, the rows may be in another order. A weight with a row that the
    reference has several times is left out, unless it is the next row of a weight.
    """
    known: dict[bytes, list[SourceRow]] = {}
    for (name, transposed), rows in _oriented_weights(reference).items():
        for number, row in enumerate(_bytes_of_rows(rows)):
            known.setdefault(row, []).append(SourceRow(name, transposed, number))
    learned: dict[str, list[SourceRow]] = {}
    for name, weight in port.named_parameters():
        sources = _sources_of(_bytes_of_rows(_matrix(weight)), known)
        if sources and (reordered or _is_in_order(sources)):
            learned[name] = sources
    return learned


def _sources_of(
    rows: Sequence[bytes], known: Mapping[bytes, Sequence[SourceRow]]
) -> list[SourceRow]:
    """Return the source of each row; nothing if one has none or several."""
    sources: list[SourceRow] = []
    for row in rows:
        places = known.get(row, ())
        if sources and sources[-1].following in places:
            sources.append(sources[-1].following)
        elif len(places) == 1:
            sources.append(places[0])
        else:
            return []
    return sources


def _is_in_order(sources: Sequence[SourceRow]) -> bool:
    """Check that the rows of each weight are taken one after another."""
    for row, following in pairwise(sources):
        is_same_weight = row.weight == following.weight
        if is_same_weight and following.number != row.number + 1:
            return False
    return True


def wrong_weights(
    reference: nn.Module,
    port: nn.Module,
    learned: Mapping[str, Sequence[SourceRow]],
    rounding: float,
) -> list[str]:
    """Return the weights of a port's block that do not consist of the learned rows."""
    known = _oriented_weights(reference)
    wrong: list[str] = []
    for name, weight in port.named_parameters():
        if name not in learned:
            continue
        rows = [known[row.weight, row.transposed][row.number] for row in learned[name]]
        expected = torch.stack(rows).double()
        difference = (_matrix(weight).double() - expected).norm()
        if float(difference) > rounding * float(expected.norm()):
            wrong.append(name)
    return wrong


def _oriented_weights(module: nn.Module) -> dict[tuple[str, bool], Tensor]:
    """Return each weight as a matrix, and each matrix also transposed."""
    oriented: dict[tuple[str, bool], Tensor] = {}
    for name, weight in module.named_parameters():
        oriented[name, False] = _matrix(weight)
        if weight.ndim > 1:
            oriented[name, True] = _matrix(weight.mT)
    return oriented


def _matrix(weight: Tensor) -> Tensor:
    """Flatten a weight to rows; a vector is a single row."""
    width = weight.shape[-1] if weight.ndim else 1
    rows = weight.detach().cpu().reshape(-1, width)
    # `contiguous` would keep odd strides of axes with a single element, and these have
    # no bytes to view.
    return rows.clone(memory_format=torch.contiguous_format)


def _bytes_of_rows(rows: Tensor) -> list[bytes]:
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]
