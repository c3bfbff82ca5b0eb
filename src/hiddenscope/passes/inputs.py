"""Inputs: texts as a model takes them, encoded once and handed down, and the batches in
which they go through it.

`model.encode` makes Inputs of strings or ids. Every pass takes them; what was encoded
is never encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hiddenscope.arguments import checked, require, shown
from hiddenscope.discovery import arguments
from hiddenscope.errors import TextError

Texts: TypeAlias = (
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Tensor
    | Mapping[str, Any]
    | Sequence[Mapping[str, Any]]
    | Sequence[Sequence[Mapping[str, Any]]]
)
"""One text or many, each a string or token ids; what a tokenizer returned; or chat
messages.
"""

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
# The fixed cost of a batch, counted in tokens: past that much padding in all, another
# batch is cheaper.
BATCH_OVERHEAD = {"cpu": 64, "cuda": 2048}


@dataclass(frozen=True)
class Batching:
    """Whether padded batches give each text what it gets alone, as it was tried on the
    model.

    `worst` is the largest difference that was seen, in units of the rounding tolerance.
    `needs_mask` says whether texts of one length need an attention mask of ones;
    leaving it out spares a GPU the wait while transformers looks into it. `rope_switch`
    is for LongRoPE: one text longer than this changes the rotary scaling of its whole
    batch.
    """

    padding_safe: bool
    worst: float
    reason: str
    needs_mask: bool = True
    rope_switch: int | None = None


class BatchModel(Protocol):
    """What batches need to know of a model."""

    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def batching(self) -> Batching: ...  # noqa: D102
    @property
    def pad(self) -> int: ...  # noqa: D102
    @property
    def encoder_decoder(self) -> bool: ...  # noqa: D102


@checked
@dataclass(frozen=True)
class Inputs:
    """Some texts as token ids, with the character span of each token and the decoder's
    targets, where there are any.

    >>> inputs = Inputs(((5, 6), (7, 8, 9)))
    >>> inputs.lengths, inputs.some([1]).ids
    ([2, 3], ((7, 8, 9),))
    """

    ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] | None = None
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None
    targets: Inputs | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each text."""
        return [len(ids) for ids in self.ids]

    @cached_property
    def flat(self) -> NDArray[np.int64]:
        """The ids of all texts, one after another."""
        flat = np.fromiter(
            chain.from_iterable(self.ids), dtype=np.int64, count=sum(map(len, self.ids))
        )
        flat.flags.writeable = False
        return flat

    @property
    def costs(self) -> list[int]:
        """The number of tokens that a pass computes for each text: its own and its
        targets'.
        """
        if self.targets is None:
            return self.lengths
        return [
            sum(pair) for pair in zip(self.lengths, self.targets.lengths, strict=True)
        ]

    def some(self, indices: Sequence[int]) -> Inputs:
        """Some of the texts, in the given order, with their targets."""
        indices = list(indices)
        if indices == list(range(len(self.ids))):
            # The same value, whose flat ids and tokens may be known already.
            return self
        outside = next(
            (i for i in indices if not -len(self.ids) <= i < len(self.ids)), None
        )
        if outside is not None:
            reason = f"there are {len(self.ids):,} texts"
            raise TextError(f"No text {shown(outside)}", reason, "Number them from 0.")
        parts: dict[str, Sized | None] = {
            "texts": self.texts,
            "spans": self.spans,
            "targets": self.targets,
        }
        for name, part in parts.items():
            if part is not None and len(part) != len(self.ids):
                reason = (
                    f"{len(self.ids):,} texts have ids and {len(part):,} have {name}"
                )
                raise TextError(
                    "Cannot choose from these inputs", reason, "Give one for each text."
                )
        return Inputs(
            tuple(self.ids[i] for i in indices),
            None if self.texts is None else tuple(self.texts[i] for i in indices),
            None if self.spans is None else tuple(self.spans[i] for i in indices),
            None if self.targets is None else self.targets.some(indices),
        )

    def of(self, stack: str | None) -> Inputs:
        """The texts that a stack works on: the targets for a decoder beside an encoder."""
        return self.targets if stack == "decoder" and self.targets is not None else self

    def with_targets(self, targets: Inputs | None) -> Inputs:
        """The same texts with other targets."""
        return Inputs(self.ids, self.texts, self.spans, targets)

    def batches(
        self, model: BatchModel, *, batch_tokens: int | None = None
    ) -> Iterator[tuple[list[int], Inputs]]:
        """The texts in batches of about one length, the longest first: the indices of
        each batch, and its Inputs.

        A batch has about `batch_tokens` tokens at most, padding included; a longer text
        is a batch by itself. A model that gives a text different states in a padded
        batch than alone (`model.batching`) gets one text at a time.
        """
        require(model, BatchModel, "model", "Inputs.batches")
        kind, batching = model.device.type, model.batching
        kind = kind if kind in BATCH_TOKENS else "cpu"
        require(batch_tokens, int | None, "batch_tokens", "Inputs.batches")
        for indices in compose(
            self.costs,
            batch_tokens or BATCH_TOKENS[kind],
            padded=batching.padding_safe,
            rope_switch=batching.rope_switch,
            overhead=BATCH_OVERHEAD[kind],
        ):
            yield indices, self.some(indices)

    def pad(self, model: BatchModel) -> PaddedBatch:
        """All texts as one padded batch on the model's device."""
        pad, device = model.pad, model.device
        targets = None
        if model.encoder_decoder:
            # Without targets the decoder gets one token per text, which a pass over the
            # encoder alone never reaches.
            targets = PaddedBatch.of(
                self.targets or Inputs(((pad,),) * len(self)), pad, device
            )
        return PaddedBatch.of(self, pad, device, targets)


def compose(
    lengths: Sequence[int],
    batch_tokens: int,
    *,
    padded: bool = True,
    rope_switch: int | None = None,
    overhead: int = 64,
) -> list[list[int]]:
    """Which texts go together: batches of about one length, of at most `batch_tokens`
    tokens, the longest texts first.

    A batch costs as much as `overhead` tokens whatever is in it, so none gets more
    padding than that. Texts of up to `rope_switch` tokens and longer ones stay apart.

    >>> compose([2, 9, 3, 8], 18)
    [[1, 3], [2, 0]]
    >>> compose([100, 100, 10, 10], 1000)
    [[0, 1], [2, 3]]
    >>> compose([2, 9], 18, padded=False)
    [[1], [0]]
    """
    batches: list[list[int]] = []
    padding = 0
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        longest = lengths[batches[-1][0]] if batches else 0
        padding += longest - lengths[text]
        fits = (
            batches
            and (len(batches[-1]) + 1) * longest <= batch_tokens
            and padding <= overhead
        )
        if (
            fits
            and padded
            and (
                rope_switch is None
                or lengths[text] > rope_switch
                or longest <= rope_switch
            )
        ):
            batches[-1].append(text)
        else:
            batches.append([text])
            padding = 0
    return batches


@dataclass(frozen=True)
class PaddedBatch:
    """Texts as tensors, padded on the right to one length; `targets` are the decoder's,
    in an encoder-decoder.

    `holds_pad` says that a text itself holds the padding id.
    """

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    targets: PaddedBatch | None = None
    holds_pad: bool = False

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        pad: int,
        device: torch.device,
        targets: PaddedBatch | None = None,
    ) -> PaddedBatch:
        """A batch of encoded texts.

        >>> PaddedBatch.of(Inputs(((5, 6, 7), (8,))), pad=0, device=torch.device("cpu")).ids
        tensor([[5, 6, 7],
                [8, 0, 0]])
        """
        lengths = inputs.lengths
        mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
        filled = np.full(mask.shape, pad, dtype=np.int64)
        filled[mask] = inputs.flat
        holds_pad = bool((inputs.flat == pad).any())
        return cls(
            _to(device, filled),
            _to(device, mask.astype(np.int64)),
            tuple(lengths),
            targets,
            holds_pad,
        )

    @property
    def has_padding(self) -> bool:
        """Whether any text, or any target, is shorter than the longest."""
        return len(set(self.lengths)) > 1 or (
            self.targets is not None and self.targets.has_padding
        )

    def arguments(self, module: nn.Module, *, masked: bool = True) -> dict[str, Any]:
        """The keyword arguments of the module's forward; `masked=False` leaves out a
        mask that would hide nothing.
        """
        given = arguments(
            module,
            self.ids,
            self.mask,
            None if self.targets is None else self.targets.ids,
        )
        if not masked and len(set(self.lengths)) == 1:
            given.pop("attention_mask", None)
        # Without a mask T5Gemma hides padding ids inside a text, but only where it
        # keeps no cache.
        if self.targets is not None and (
            self.targets.has_padding or self.targets.holds_pad
        ):
            given["decoder_attention_mask"] = self.targets.mask
        return given

    def of_stack(self, stack: str | None) -> PaddedBatch:
        """The texts that a stack works on."""
        return self.targets if stack == "decoder" and self.targets is not None else self


def _to(device: torch.device, array: NDArray[np.int64]) -> Tensor:
    """An array on a device. To a GPU it goes from page-locked memory, so that the pass
    before need not end first.
    """
    tensor = torch.from_numpy(array)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )
