"""Tell how the candidate's weights were made of the reference's, where the two modules are of one make."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hiddenscope.analyses.drift.suspect import Suspect, Trial
from hiddenscope.module_copy import private_copy

NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def weights(suspect: Suspect) -> Iterator[Trial]:
    """Give the reference's module the candidate's weights, and say how these differ."""
    if not suspect.same_make:
        return
    candidates = dict(suspect.candidate.named_parameters())

    def convert(name: str, weight: Tensor) -> Tensor:
        other = candidates.get(name)
        if other is None or other.shape != weight.shape:
            return weight
        return other.detach().to(weight)

    output = suspect.run(private_copy(suspect.reference, convert))
    for name, parameter in suspect.reference.named_parameters():
        if name not in candidates:
            continue
        other = candidates[name].detach()
        # A candidate that is narrow as a whole is compared in its own dtype.
        weight = parameter.detach().to(other.dtype if other.dtype == suspect.made.dtype else parameter.dtype)
        if not torch.equal(weight, other.to(weight)):
            fault, words = _relation(suspect, weight, other.to(weight))
            yield fault, f"`{name}` of the candidate {words}.", output


def _relation(suspect: Suspect, weight: Tensor, other: Tensor) -> tuple[str, str]:
    """Say how a weight was made of another."""
    tolerance = 4 * torch.finfo(weight.dtype).eps
    for fault, words, form in _forms(suspect, weight, other):
        if form.shape == other.shape and torch.allclose(form, other, tolerance, 0.0):
            return fault, words
    if weight.shape != other.shape:
        return "other_shape", f"has the shape {list(other.shape)}, and the reference's {list(weight.shape)}"
    share = float((weight != other).double().mean())
    change = float((other - weight).double().norm() / weight.double().norm())
    return "changed_weight", f"differs in {share:.1%} of its elements, by {change:.2g} of its norm"


def _forms(suspect: Suspect, weight: Tensor, other: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """List what may have become of a weight."""
    value = other.flatten()[0]
    fault = "constant_weight" if value else "zeroed_weight"
    yield fault, f"is {float(value):g} everywhere", value.expand_as(weight)
    if weight.ndim > 1:
        yield "transposed_weight", "is the reference's, transposed", weight.mT
    for dtype in NARROW:
        yield "rounded_weight", f"is the reference's, rounded to {dtype}", weight.to(dtype).to(weight)
    for name, parameter in suspect.model.named_parameters():
        yield "exchanged_weight", f"is the reference's `{name}`", parameter.detach().to(weight)
    if weight.shape != other.shape:
        return
    scale = float((weight * other).double().sum() / weight.double().square().sum())
    yield "scaled_weight", f"is the reference's times {scale:.6g}", scale * weight
    for axis, words in enumerate(("rows", "columns")[: weight.ndim]):
        # Slices are known again by the order of their first numbers.
        first, other_first = (tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])[0] for tensor in (weight, other))
        order = first.argsort()[other_first.argsort().argsort()]
        form = weight.index_select(axis, order)
        yield "permuted_weight", f"has the reference's {words} in another order", form
