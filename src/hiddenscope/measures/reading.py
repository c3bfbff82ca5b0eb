"""Reading: rows regrouped, so that no number depends on how a source cuts them, and widened once."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

AT_ONCE = 1 << 20  # numbers that are looked at together: 8 MiB of float64


def chunks(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same rows in order, as many at a time as make about a million numbers, however they come.

    >>> [len(chunk) for chunk in chunks([torch.zeros(3, 400_000), torch.zeros(2, 400_000)])]
    [2, 2, 1]
    """
    waiting: list[Tensor] = []
    held = rows = 0
    for block in blocks:
        rows = rows or max(1, AT_ONCE // max(1, block.shape[-1]))
        while held + len(block) >= rows:
            yield torch.cat([*waiting, block[: rows - held]]) if waiting else block[:rows]
            block, waiting, held = block[rows - held :], [], 0
        if len(block):
            waiting, held = [*waiting, block], held + len(block)
    if waiting:
        yield torch.cat(waiting)


def widened(rows: Tensor) -> Tensor:
    """The rows in float64, where they are; a device that has no float64 hands them to the CPU."""
    rows = rows.detach()
    return (rows.cpu() if rows.device.type == "mps" else rows).to(torch.float64)
