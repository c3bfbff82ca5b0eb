"""Inputs: texts as a model takes them, and the batches in which they go through it.

`model.encode` makes Inputs of strings or ids. Every pass takes them, so that a text is
encoded only once. Two texts can be aligned, token by token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hiddenscope.arguments import checked, shown
from hiddenscope.discovery import Anatomy, arguments
from hiddenscope.errors import TextError
from hiddenscope.modules import autograd
from hiddenscope.modules.trials import Trials
from hiddenscope.states import Source

if TYPE_CHECKING:
    from hiddenscope.passes.text_encoder import TextEncoder

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
"""One text or many: strings, token ids, the output of a tokenizer, or chat messages."""

TokenColumns: TypeAlias = list[tuple[int | None, int | None]]

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
# The fixed cost of a batch, counted in tokens: past that much padding in all, another
# batch is cheaper.
BATCH_OVERHEAD = {"cpu": 64, "cuda": 2048}


@dataclass(frozen=True)
class Batching:
    """Whether padding a batch changes the states of its texts, as tried on the model.

    `worst` is the largest difference, in units of the rounding tolerance. `needs_mask`
    says whether texts of one length need an attention mask of ones; leaving it out
    spares a GPU the wait while transformers looks into it. `rope_switch` is for
    LongRoPE: one text longer than this changes the rotary scaling of its whole batch.
    """

    padding_safe: bool
    worst: float
    reason: str
    needs_mask: bool = True
    rope_switch: int | None = None


class PassModel(Protocol):
    """A model as a pass sees it; `Model` is one."""

    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    @property
    def anatomy(self) -> Anatomy: ...  # noqa: D102
    @property
    def text_encoder(self) -> TextEncoder: ...  # noqa: D102
    @property
    def batching(self) -> Batching: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def encoder_decoder(self) -> bool: ...  # noqa: D102
    @property
    def pad(self) -> int: ...  # noqa: D102
    @property
    def trials(self) -> Trials: ...  # noqa: D102
    @property
    def lock(self) -> AbstractContextManager[Any]: ...  # noqa: D102
    def encode(  # noqa: D102
        self,
        texts: Texts | Inputs,
        *,
        targets: Texts | Inputs | None = None,
        truncate: bool | int = False,
    ) -> Inputs: ...
    def source(self, stack: str | None, *, checked: bool = False) -> Source: ...  # noqa: D102


@checked
@dataclass(frozen=True)
class Inputs:
    """Texts as token ids, with the character spans of their tokens.

    `targets` are the texts of a decoder beside an encoder.

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
        """Return the number of tokens of each text."""
        return [len(ids) for ids in self.ids]

    @cached_property
    def flat(self) -> NDArray[np.int64]:
        """Return the ids of all texts, one after another."""
        ids = chain.from_iterable(self.ids)
        flat = np.fromiter(ids, dtype=np.int64, count=sum(self.lengths))
        flat.flags.writeable = False
        return flat

    @property
    def costs(self) -> list[int]:
        """Return the number of tokens, with targets, that a pass computes per text."""
        if self.targets is None:
            return self.lengths
        pairs = zip(self.lengths, self.targets.lengths, strict=True)
        return [text + target for text, target in pairs]

    def some(self, indices: Sequence[int]) -> Inputs:
        """Return some of the texts, in this order, with their targets."""
        indices = list(indices)
        count = len(self.ids)
        # The same value, whose flat ids and tokens may be known already.
        if indices == list(range(count)):
            return self
        for index in indices:
            if not -count <= index < count:
                raise TextError(
                    f"No text {shown(index)}",
                    f"there are {count:,} texts",
                    "Number them from 0.",
                )
        for name in ("texts", "spans", "targets"):
            part = getattr(self, name)
            if part is not None and len(part) != count:
                raise TextError(
                    "Cannot choose from these inputs",
                    f"{count:,} texts have ids and {len(part):,} have {name}",
                    "Give one for each text.",
                )
        texts = self.texts and tuple(self.texts[index] for index in indices)
        spans = self.spans and tuple(self.spans[index] for index in indices)
        targets = self.targets and self.targets.some(indices)
        ids = tuple(self.ids[index] for index in indices)
        return Inputs(ids, texts, spans, targets)

    def of(self, stack: str | None) -> Inputs:
        """Return the texts that a stack works on: targets, for a decoder with them."""
        if stack == "decoder" and self.targets is not None:
            return self.targets
        return self

    def with_targets(self, targets: Inputs | None) -> Inputs:
        """Return the same texts with other targets."""
        return replace(self, targets=targets)

    def batches(
        self, model: PassModel, *, batch_tokens: int | None = None
    ) -> Iterator[tuple[list[int], Inputs]]:
        """Return batches of about one length, the longest texts first.

        Each comes as the indices of its texts, and their Inputs. A batch has about
        `batch_tokens` tokens at most, padding included; a longer text is a batch by
        itself. A model that gives a text different states in a padded batch than by
        itself (`model.batching`) gets one text at a time.
        """
        device = model.device.type
        if device not in BATCH_TOKENS:
            device = "cpu"
        batching = model.batching
        batches = compose(
            self.costs,
            batch_tokens or BATCH_TOKENS[device],
            padded=batching.padding_safe,
            rope_switch=batching.rope_switch,
            overhead=BATCH_OVERHEAD[device],
        )
        return ((indices, self.some(indices)) for indices in batches)

    def pad(self, model: PassModel) -> PaddedBatch:
        """Return all texts as one padded batch on the model's device."""
        pad, device = model.pad, model.device
        targets = None
        # A gradient needs ids that were not made in the user's inference mode.
        with autograd.restored(inference=False):
            if model.encoder_decoder:
                # Without targets the decoder gets one token per text, which a pass over
                # the encoder alone never reaches.
                texts = self.targets or Inputs(((pad,),) * len(self))
                targets = PaddedBatch.of(texts, pad, device)
            return PaddedBatch.of(self, pad, device, targets)


def compose(
    lengths: Sequence[int],
    batch_tokens: int,
    *,
    padded: bool = True,
    rope_switch: int | None = None,
    overhead: int = 64,
) -> list[list[int]]:
    """Group texts into batches of at most `batch_tokens` tokens, the longest first.

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
        may_share = padded and bool(batches) and padding <= overhead
        if may_share:
            may_share = (len(batches[-1]) + 1) * longest <= batch_tokens
        if rope_switch is not None and lengths[text] <= rope_switch < longest:
            may_share = False
        if may_share:
            batches[-1].append(text)
        else:
            batches.append([text])
            padding = 0
    return batches


@dataclass(frozen=True)
class PaddedBatch:
    """Texts as tensors, padded on the right to one length.

    `targets` are the decoder's, in an encoder-decoder. `holds_pad` says that a text
    itself holds the padding id.
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
        """Pad encoded texts.

        >>> inputs = Inputs(((5, 6, 7), (8,)))
        >>> PaddedBatch.of(inputs, pad=0, device=torch.device("cpu")).ids
        tensor([[5, 6, 7],
                [8, 0, 0]])
        """
        lengths = inputs.lengths
        mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
        filled = np.full(mask.shape, pad, dtype=np.int64)
        filled[mask] = inputs.flat
        holds_pad = bool((inputs.flat == pad).any())
        both = torch.from_numpy(np.stack([filled, mask]))
        if device.type == "cuda":
            # From page-locked memory, so that it need not wait for the pass before.
            both = both.pin_memory()
        ids, ones = both.to(device, non_blocking=both.is_pinned())
        return cls(ids, ones, tuple(lengths), targets, holds_pad)

    @property
    def has_padding(self) -> bool:
        """Tell whether any text, or any target, is shorter than the longest."""
        if len(set(self.lengths)) > 1:
            return True
        return self.targets is not None and self.targets.has_padding

    def arguments(self, module: nn.Module, *, masked: bool = True) -> dict[str, Any]:
        """Return the keyword arguments of the module's forward.

        `masked=False` leaves out a mask that would hide nothing.
        """
        targets = self.targets
        target_ids = None if targets is None else targets.ids
        keywords = arguments(module, self.ids, self.mask, target_ids)
        if not masked and len(set(self.lengths)) == 1:
            keywords.pop("attention_mask", None)
        # Without a mask T5Gemma hides padding ids inside a text, but only where it
        # keeps no cache.
        if targets is not None and (targets.has_padding or targets.holds_pad):
            keywords["decoder_attention_mask"] = targets.mask
        return keywords

    def of_stack(self, stack: str | None) -> PaddedBatch:
        """Return the texts that a stack works on."""
        if stack == "decoder" and self.targets is not None:
            return self.targets
        return self


def in_columns(
    a: Sequence[Any], b: Sequence[Any], *, pair: bool = True
) -> TokenColumns:
    """Align two texts by difflib; a side without a token in a column has None there.

    The columns are the same whichever side comes first. Where some tokens take the
    place of others the last of each are paired: there a causal model has read all of
    them. Without `pair` only equal tokens stand in one column.

    >>> in_columns([5, 6, 7], [5, 9, 10, 7])
    [(0, 0), (None, 1), (1, 2), (2, 3)]

    Texts of one length stand token by token, unless that tears more equal tokens apart.

    >>> in_columns([5, 6, 7, 7], [5, 7, 7, 7])
    [(0, 0), (1, 1), (2, 2), (3, 3)]
    """
    if list(b) < list(a):
        return [(i, j) for j, i in in_columns(b, a, pair=pair)]
    columns: TokenColumns = []
    matcher: SequenceMatcher[Hashable] = SequenceMatcher(None, a, b, autojunk=False)
    if pair and len(a) == len(b):
        in_place = sum(token == other for token, other in zip(a, b, strict=True))
        if in_place >= sum(match.size for match in matcher.get_matching_blocks()):
            rows = range(len(a))
            return list(zip(rows, rows, strict=True))
    for tag, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        paired = 0
        if pair or tag == "equal":
            paired = min(a_end - a_start, b_end - b_start)
        columns += [(row, None) for row in range(a_start, a_end - paired)]
        columns += [(None, row) for row in range(b_start, b_end - paired)]
        a_rows, b_rows = range(a_end - paired, a_end), range(b_end - paired, b_end)
        columns += zip(a_rows, b_rows, strict=True)
    return columns
