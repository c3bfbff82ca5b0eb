"""Tell how the candidate's weights were made of the reference's, where the two modules
are of one make.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hiddenscope.analyses.drift.suspect import Suspect, Trial
from hiddenscope.modules.module_copy import named_weights, private_copy

NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def weights(suspect: Suspect) -> Iterator[Trial]:
    """Give the reference's module the candidate's weights and buffers, and say how
    these differ.
    """
    if not suspect.same_make:
        return
    candidates = dict(named_weights(suspect.candidate))

    def convert(name: str, weight: Tensor) -> Tensor:
        other = candidates.get(name, weight)
        return other.detach().to(weight) if other.shape == weight.shape else weight

    module = suspect.reference
    # The weights of a whole model are not copied to this device for a hint.
    if suspect.role != "model":
        module = private_copy(module, convert)
    output = suspect.run(module)
    for name, parameter in named_weights(suspect.reference):
        other = candidates.get(name, parameter).detach()
        # A candidate that is narrow as a whole is compared in its own dtype.
        is_narrow = other.dtype == suspect.made.dtype
        weight = parameter.detach().to(other.dtype if is_narrow else parameter.dtype)
        other = other.to(weight)
        if torch.equal(weight, other):
            continue
        fault, words = _relation(suspect, weight, other)
        if name.endswith("inv_freq"):
            fault, words = _rotary(fault, words, other)
        yield fault, f"`{name}` of the candidate {words}.", output


def _rotary(fault: str, words: str, frequencies: Tensor) -> tuple[str, str]:
    """Say how the frequencies of rotary positions differ."""
    if fault == "scaled_weight":
        return "rope_scaling", words
    places = torch.arange(
        len(frequencies), device=frequencies.device, dtype=torch.float64
    )
    exponents = places / len(frequencies)
    logarithms = -frequencies.double().log()
    log_base = (logarithms @ exponents) / exponents.square().sum()
    if not torch.allclose(logarithms, log_base * exponents, atol=1e-3):
        return fault, words
    return "rope_base", f"has the base {float(log_base.exp()):,.0f}"


def _relation(suspect: Suspect, weight: Tensor, other: Tensor) -> tuple[str, str]:
    """Say how a weight was made of another."""
    if weight.shape != other.shape:
        return (
            "other_shape",
            (
                f"has the shape {list(other.shape)}, and the reference's"
                f" {list(weight.shape)}"
            ),
        )
    if weight.is_floating_point():
        tolerance = 4 * torch.finfo(weight.dtype).eps
        for fault, words, form in _forms(suspect, weight, other):
            if form.shape == other.shape and torch.allclose(
                form, other, tolerance, 0.0
            ):
                return fault, words
    share = (weight != other).double().mean()
    change, norm = (tensor.double().norm() for tensor in (other - weight, weight))
    words = (
        f"differs in {share:.1%} of its elements, by a norm of {change:.2g}; the"
        f" reference's norm is {norm:.2g}"
    )
    return "changed_weight", words


def _forms(
    suspect: Suspect, weight: Tensor, other: Tensor
) -> Iterator[tuple[str, str, Tensor]]:
    """List what may have become of a weight."""
    value = other.flatten()[0]
    fault = "constant_weight" if value else "zeroed_weight"
    yield fault, f"is {value:g} everywhere", value.expand_as(weight)
    for dtype in NARROW:
        yield (
            "rounded_weight",
            f"is the reference's, rounded to {dtype}",
            weight.to(dtype).to(weight),
        )
    alike = [
        (name, known)
        for name, known in suspect.model.named_parameters()
        if known.shape == weight.shape
    ]
    for name, parameter in alike if suspect.role != "model" else []:
        yield (
            "exchanged_weight",
            f"is the reference's `{name}`",
            parameter.detach().to(weight),
        )
    scale = (weight * other).double().sum() / weight.double().square().sum()
    yield (
        "scaled_weight",
        f"is the reference's times {scale:.6g}",
        scale.to(weight) * weight,
    )
    if weight.ndim > 1:
        yield "transposed_weight", "is the reference's, transposed", weight.mT
    for axis, words in enumerate(("rows", "columns")[: weight.ndim]):
        # Slices are known again by a weighted sum of their numbers, which is hardly
        # ever the same for two.
        keys, other_keys = (_keys(tensor, axis) for tensor in (weight, other))
        order = keys.argsort()[other_keys.argsort().argsort()]
        yield (
            "permuted_weight",
            f"has the reference's {words} in another order",
            weight.index_select(axis, order),
        )


def _keys(weight: Tensor, axis: int) -> Tensor:
    """Sum up each slice along an axis, with other factors for each of its numbers."""
    slices = weight.movedim(axis, 0).reshape(weight.shape[axis], -1).double()
    return (
        slices
        * torch.linspace(
            1, 2, slices.shape[1], device=slices.device, dtype=slices.dtype
        )
    ).sum(1)
