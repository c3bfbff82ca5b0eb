"""A model with random weights: what is left of a finding when nothing was learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import private_copy, to_random
from hiddenscope.modules.trials import Trials

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hiddenscope.discovery import Anatomy
    from hiddenscope.model import Model
    from hiddenscope.model.model import PassLock
    from hiddenscope.passes import Batching, Inputs, Texts
    from hiddenscope.passes.text_encoder import TextEncoder
    from hiddenscope.states import Source


@dataclass(frozen=True, eq=False)
class RandomModel:
    """A private copy of a model whose matrices were drawn again.

    The copy runs the code of the original, so its states are in the same places. They
    are not searched for again: that takes longer than measuring several texts.
    """

    original: Model
    module: nn.Module
    trials: Trials

    @classmethod
    def of(cls, model: Model, seed: int) -> RandomModel:
        """Copy a model and draw its matrices."""
        # The user's module keeps its weights: the copy has tensors of its own.
        module = private_copy(model.module, to_random(seed))
        return cls(model, module, Trials(module))

    @property
    def device(self) -> torch.device:
        """Return the device of its inputs."""
        return hooks.input_device(self.module)

    @property
    def anatomy(self) -> Anatomy:
        """Return where the states are."""
        return self.original.anatomy

    @property
    def batching(self) -> Batching:
        """Return what was tried on the original. Texts come singly, without padding."""
        return self.original.batching

    @property
    def text_encoder(self) -> TextEncoder:
        """Return the encoder that turns texts into ids."""
        return self.original.text_encoder

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its states."""
        return self.original.dtype

    @property
    def lock(self) -> PassLock:
        """Return the lock of the original: it is the one that the caller holds."""
        return self.original.lock

    @property
    def pad(self) -> int:
        """Return the id that pads texts."""
        return self.original.pad

    @property
    def encoder_decoder(self) -> bool:
        """Tell whether it has an encoder and a decoder."""
        return self.original.encoder_decoder

    def encode(
        self,
        texts: Texts | Inputs,
        *,
        targets: Texts | Inputs | None = None,
        truncate: bool | int = False,
    ) -> Inputs:
        """Encode texts as the original does."""
        return self.original.encode(texts, targets=targets, truncate=truncate)

    def source(self, stack: str | None, *, checked: bool = False) -> Source:
        """Return where the original comes from."""
        return self.original.source(stack, checked=checked)
