"""Batch: several texts filled up to one length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.anatomy import arguments


@dataclass(frozen=True)
class Batch:
    """Texts filled up on the right to one length; `targets` are an encoder-decoder's decoder ids."""

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    targets: "Batch | None" = None

    @classmethod
    def of(
        cls, ids: Sequence[Sequence[int]], pad: int, device: torch.device, targets: "Batch | None" = None
    ) -> "Batch":
        """A batch of texts given as ids.

        >>> Batch.of([[5, 6, 7], [8]], pad=0, device=torch.device("cpu")).ids
        tensor([[5, 6, 7],
                [8, 0, 0]])
        """
        lengths = tuple(map(len, ids))
        filled = np.full((len(ids), max(lengths)), pad, dtype=np.int64)
        for row, text in enumerate(ids):
            filled[row, : len(text)] = text
        mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
        return cls(_to(device, filled), _to(device, mask.astype(np.int64)), lengths, targets)

    @property
    def padded(self) -> bool:
        """Whether any text was filled up."""
        return len(set(self.lengths)) > 1

    def arguments(self, module: nn.Module, *, masked: bool = True) -> dict[str, Any]:
        """What the module's forward is called with; `masked=False` leaves out a mask that would hide nothing."""
        given = arguments(module, self.ids, self.mask, None if self.targets is None else self.targets.ids)
        if not masked and not self.padded:
            given.pop("attention_mask", None)
        if self.targets is not None and self.targets.padded:
            given["decoder_attention_mask"] = self.targets.mask
        return given

    def tokens(self, stack: str | None) -> "Batch":
        """The texts that a stack works on."""
        return self.targets if stack == "decoder" and self.targets is not None else self


def _to(device: torch.device, array: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    """An array on a device; to a GPU it goes from page-locked memory, so that the pass before need not end first."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
