"""Tell the dtype of weights and states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def narrowest(tensors: Iterable[Tensor], own: torch.dtype) -> torch.dtype:
    """Tell the dtype that tensors were computed in."""
    narrow = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype.itemsize < own.itemsize]
    for tensor in tensors:
        narrow = [dtype for dtype in narrow if bool((tensor.to(dtype).to(tensor) == tensor).all())]
        if not narrow:
            break
    return next(iter(narrow), own)


def majority_dtype(module: nn.Module) -> torch.dtype:
    """Tell the dtype of most of a module's weights: one layer in another does not make it the model's."""
    counts: Counter[torch.dtype] = Counter()
    for weight in module.parameters():
        if weight.is_floating_point():
            counts[weight.dtype] += weight.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32
