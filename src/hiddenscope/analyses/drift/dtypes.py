"""Dtypes: what numbers were computed in, and in which digits the weights of two sides
can be compared.

A checkpoint that was saved in bfloat16 is computed in float32 on most CPUs. Its weights
are bfloat16 numbers then, whatever their dtype says, and differ from those of a float32
original by what was rounded away when it was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hiddenscope.modules.module_copy import private_copy

NARROW = (torch.bfloat16, torch.float16)
SAMPLED = 256  # numbers of a tensor that are looked at before all are
CHUNK = 2**22  # numbers that are looked at together


def narrowest(tensors: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """Find the dtype that tensors were computed in: theirs, or the first of bfloat16
    and float16 that holds them all.

    >>> narrowest([torch.tensor([1.0, 1.5])], torch.float32), narrowest([torch.tensor([0.1])], torch.float32)
    (torch.bfloat16, torch.float32)
    """
    narrow = [candidate for candidate in NARROW if candidate.itemsize < dtype.itemsize]
    for tensor in tensors:
        narrow = [candidate for candidate in narrow if _holds(candidate, tensor)]
        if not narrow:
            break
    return next(iter(narrow), dtype)


def majority_dtype(module: nn.Module) -> torch.dtype:
    """Find the dtype of most of a module's weights: one layer in another does not make
    it the model's.
    """
    counts: Counter[torch.dtype] = Counter()
    for weight in _weights(module):
        counts[weight.dtype] += weight.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def stored_dtype(module: nn.Module) -> torch.dtype:
    """Find the narrowest of bfloat16 and float16 that holds every weight exactly; else
    the dtype of most weights.

    >>> linear = nn.Linear(8, 8)
    >>> stored_dtype(linear), stored_dtype(linear.bfloat16().float())
    (torch.float32, torch.bfloat16)
    """
    dtype = majority_dtype(module)
    weights = list(_weights(module))
    if not weights or any(weight.is_meta for weight in weights):
        return dtype
    # Most modules are told apart by a few numbers; only what could be narrow is read
    # whole.
    samples = [
        weight.flatten()[:: max(1, weight.numel() // SAMPLED)] for weight in weights
    ]
    if narrowest(samples, dtype) == dtype:
        return dtype
    return narrowest(weights, dtype)


@dataclass(frozen=True)
class Digits:
    """The dtypes that weights are rounded to before a comparison, each computed in its
    own; None: as they are.
    """

    reference: torch.dtype | None = None
    candidate: torch.dtype | None = None

    @property
    def notes(self) -> list[str]:
        """Say what was rounded, and why."""
        if self.reference is not None:
            name = str(self.reference).removeprefix("torch.")
            saved = f"The candidate was saved in {name}, and computes in a wider dtype."
            return [
                f"{saved} The reference's weights were rounded to {name} for the"
                " comparison."
            ]
        if self.candidate is not None:
            name = str(self.candidate).removeprefix("torch.")
            saved = (
                f"The reference was saved in {name}, and the candidate has the digits"
                " that were rounded away."
            )
            return [f"{saved} Its weights were rounded to {name} for the comparison."]
        return []


def common_digits(reference: nn.Module, candidate: nn.Module) -> Digits:
    """Choose the digits in which the weights of two modules can be compared.

    A candidate that was saved in fewer digits than the reference has is no fault: the
    reference is rounded. More digits than a reference that was saved in few are one,
    unless they are those that were rounded away: then most of the candidate's weights,
    rounded, are the reference's.
    """
    saved = stored_dtype(candidate)
    was_narrow = saved.itemsize < majority_dtype(candidate).itemsize
    if was_narrow:
        reference_is_narrow = all(
            _holds(saved, weight) for weight in _weights(reference)
        )
        return Digits() if reference_is_narrow else Digits(reference=saved)
    expected = stored_dtype(reference)
    has_more = expected.itemsize < min(
        saved.itemsize, majority_dtype(reference).itemsize
    )
    if has_more and _rounds_to(candidate, reference, expected):
        return Digits(candidate=expected)
    return Digits()


def digits_of_embeddings(rows: Tensor, reference: nn.Module) -> Digits:
    """Choose the digits by the embeddings alone, where the weights of a candidate
    cannot be seen.
    """
    saved = narrowest([rows], rows.dtype)
    if saved == rows.dtype or all(
        _holds(saved, weight) for weight in _weights(reference)
    ):
        return Digits()
    return Digits(reference=saved)


def with_digits(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module with its weights rounded to a dtype, each in its own dtype again;
    without a dtype, return it as is.

    >>> linear = nn.Linear(8, 8)
    >>> stored_dtype(with_digits(linear, torch.bfloat16)), stored_dtype(linear)
    (torch.bfloat16, torch.float32)
    """
    if dtype is None:
        return module
    names = {name for name, _ in module.named_parameters()}

    def convert(name: str, tensor: Tensor) -> Tensor:
        if name not in names or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype).to(tensor.dtype)

    return private_copy(module, convert)


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for weight in module.parameters():
        if weight.is_floating_point():
            yield weight.detach()


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Tell whether a dtype holds every number of a tensor exactly."""
    # A NaN tells nothing of the digits of a program.
    if bool(tensor.isnan().any()):
        return False
    if tensor.dtype == torch.float32 and dtype == torch.bfloat16:
        # A bfloat16 is the first half of a float32. Looking at the rest takes a
        # fraction of two conversions.
        bits = tensor.detach().contiguous().view(torch.int32)
        return not any(
            bool((chunk & 0xFFFF).any()) for chunk in torch.split(bits.flatten(), CHUNK)
        )
    return all(
        torch.equal(chunk.to(dtype).to(chunk.dtype), chunk)
        for chunk in torch.split(tensor.flatten(), CHUNK)
    )


def _rounds_to(module: nn.Module, rounded: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether most weights of a module, rounded, are those of another, under any
    names and in any order.
    """
    known = {_fingerprint(weight, dtype) for weight in _weights(rounded)}
    count = matching = 0
    for weight in _weights(module):
        count += weight.numel()
        if _fingerprint(weight, dtype) in known:
            matching += weight.numel()
    return 2 * matching > count


def _fingerprint(weight: Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Sum up the bits of rounded weights, so that neither the shape nor the order
    matters.
    """
    total = squares = 0
    for chunk in torch.split(weight.flatten(), CHUNK):
        bits = chunk.to(dtype).view(torch.int16).long()
        total += int(bits.sum())
        squares += int(bits.square().sum())
    return weight.numel(), total, squares
