"""Batch: several texts filled up to one length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        filled = torch.full((len(ids), max(lengths)), pad, dtype=torch.long)
        mask = torch.zeros_like(filled)
        for row, text in enumerate(ids):
            filled[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        return cls(filled.to(device), mask.to(device), lengths, targets)

    def arguments(self, module: nn.Module) -> dict[str, Any]:
        """What the module's forward is called with."""
        if self.targets is None:
            return arguments(module, self.ids, self.mask)
        given = arguments(module, self.ids, self.mask, self.targets.ids)
        if len(set(self.targets.lengths)) > 1:
            given["decoder_attention_mask"] = self.targets.mask
        return given

    def tokens(self, stack: str | None) -> "Batch":
        """The texts that a stack works on."""
        return self.targets if stack == "decoder" and self.targets is not None else self
