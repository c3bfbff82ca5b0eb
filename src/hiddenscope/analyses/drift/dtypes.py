"""Dtypes of weights: what they were computed and stored in, and a common precision.

A bfloat16 checkpoint is computed in float32 on most CPUs. Whatever their dtype, its
weights are then bfloat16 numbers. They differ from those of a float32 original by the
digits that were rounded away when it was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hiddenscope.modules.module_copy import private_copy
from hiddenscope.modules.quantised import quantised_weights

NARROW = (torch.bfloat16, torch.float16)
# Elements of a weight that are read before all of it is.
SAMPLED = 256
# Elements that are converted at a time, to save memory.
CHUNK = 2**22


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def narrowest(tensors: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """Return the first of bfloat16 and float16 that holds all tensors, or their dtype.

    >>> narrowest([torch.tensor([1.0, 1.5])], torch.float32)
    torch.bfloat16
    >>> narrowest([torch.tensor([0.1])], torch.float32)
    torch.float32
    """
    candidates = [narrow for narrow in NARROW if narrow.itemsize < dtype.itemsize]
    for tensor in tensors:
        candidates = [narrow for narrow in candidates if _holds(narrow, tensor)]
        if not candidates:
            break
    return next(iter(candidates), dtype)


def majority_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of most weights: one layer in another does not decide."""
    counts: Counter[torch.dtype] = Counter()
    for weight in _weights(module):
        counts[weight.dtype] += weight.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def stored_dtype(module: nn.Module) -> torch.dtype:
    """Return the narrow dtype that holds every weight exactly, or the majority dtype.

    >>> linear = nn.Linear(8, 8)
    >>> stored_dtype(linear), stored_dtype(linear.bfloat16().float())
    (torch.float32, torch.bfloat16)
    """
    dtype = majority_dtype(module)
    weights = list(_weights(module))
    if not weights or any(weight.is_meta for weight in weights):
        return dtype
    # What quantisation left as it was says little about the whole.
    if any(quantised_weights(module)):
        return dtype
    # A few elements tell most modules apart; only what may be narrow is read in full.
    samples = []
    for weight in weights:
        step = max(1, weight.numel() // SAMPLED)
        samples.append(weight.flatten()[::step])
    if narrowest(samples, dtype) == dtype:
        return dtype
    return narrowest(weights, dtype)


@dataclass(frozen=True)
class Digits:
    """The dtypes that weights are rounded to before a comparison, if any.

    The weights keep their dtype; only their digits are reduced.
    """

    reference: torch.dtype | None = None
    candidate: torch.dtype | None = None

    @property
    def notes(self) -> list[str]:
        """Return what was rounded, and why."""
        if self.reference is not None:
            name = name_of(self.reference)
            return [
                f"The candidate was saved in {name}, and computes in a wider dtype. The"
                f" reference's weights were rounded to {name} for the comparison."
            ]
        if self.candidate is not None:
            name = name_of(self.candidate)
            return [
                f"The reference was saved in {name}, and the candidate has the digits"
                f" that were rounded away. Its weights were rounded to {name} for the"
                " comparison."
            ]
        return []


def common_digits(reference: nn.Module, candidate: nn.Module) -> Digits:
    """Choose the digits in which the weights of two modules are compared.

    A candidate that was saved in fewer digits than the reference has is no fault: the
    reference is rounded. More digits than a reference that was saved in few are a
    fault, unless they are the digits that were rounded away: then most of the
    candidate's weights, rounded, are the reference's.
    """
    saved = stored_dtype(candidate)
    if saved.itemsize < majority_dtype(candidate).itemsize:
        return Digits() if _all_held(saved, reference) else Digits(reference=saved)
    expected = stored_dtype(reference)
    widest = min(saved.itemsize, majority_dtype(reference).itemsize)
    if expected.itemsize < widest and _rounds_to(candidate, reference, expected):
        return Digits(candidate=expected)
    return Digits()


def digits_of_embeddings(rows: Tensor, reference: nn.Module) -> Digits:
    """Choose the digits by the embeddings, if the candidate's weights are unknown."""
    saved = narrowest([rows], rows.dtype)
    if saved == rows.dtype or _all_held(saved, reference):
        return Digits()
    return Digits(reference=saved)


def with_digits(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module with its parameters rounded to the digits of a dtype.

    Without a dtype the module itself is returned.

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
        # The digits of a quantised weight are another matter.
        is_plain = not hasattr(weight, "__tensor_flatten__")
        if is_plain and weight.is_floating_point():
            yield weight.detach()


def _all_held(dtype: torch.dtype, module: nn.Module) -> bool:
    return all(_holds(dtype, weight) for weight in _weights(module))


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Check whether a dtype holds every element of a tensor exactly."""
    # A NaN says nothing about digits.
    if bool(tensor.isnan().any()):
        return False
    # A bfloat16 is the first half of a float32. Looking at the second half takes a
    # fraction of the time of two conversions.
    reads_bits = tensor.dtype == torch.float32 and dtype == torch.bfloat16
    for chunk in torch.split(tensor.detach().flatten(), CHUNK):
        if reads_bits:
            is_held = not bool((chunk.contiguous().view(torch.int32) & 0xFFFF).any())
        else:
            is_held = torch.equal(chunk.to(dtype).to(chunk.dtype), chunk)
        if not is_held:
            return False
    return True


def _rounds_to(module: nn.Module, rounded: nn.Module, dtype: torch.dtype) -> bool:
    """Check whether most weights of a module, rounded, are those of another.

    Names and order do not matter.
    """
    known = {_fingerprint(weight, dtype) for weight in _weights(rounded)}
    count = matching = 0
    for weight in _weights(module):
        count += weight.numel()
        if _fingerprint(weight, dtype) in known:
            matching += weight.numel()
    return 2 * matching > count


def _fingerprint(weight: Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Sum the bits of rounded weights, so that shape and order do not matter."""
    total = squares = 0
    for chunk in torch.split(weight.flatten(), CHUNK):
        bits = chunk.to(dtype).view(torch.int16).long()
        total += int(bits.sum())
        squares += int(bits.square().sum())
    return weight.numel(), total, squares
