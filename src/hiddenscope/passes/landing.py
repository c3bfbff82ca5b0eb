"""Landing: where the states of a stack come together, over as many passes as it takes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import nn

from hiddenscope.anatomy import Anatomy
from hiddenscope.errors import StatesError
from hiddenscope.passes.buffer import Buffer, Place
from hiddenscope.passes.encoder import Encoded, Encoder
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Source, States


class Subject(Protocol):
    """What a pass needs to know of a model."""

    @property
    def module(self) -> nn.Module: ...  # noqa: D102
    @property
    def anatomy(self) -> Anatomy: ...  # noqa: D102
    @property
    def encoder(self) -> Encoder: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def batches(self) -> bool: ...  # noqa: D102
    @property
    def turn(self) -> int | None: ...  # noqa: D102
    @property
    def masks(self) -> bool: ...  # noqa: D102
    @property
    def lock(self) -> AbstractContextManager[Any]: ...  # noqa: D102
    def source(self, stack: str | None) -> Source: ...  # noqa: D102


class Landing:
    """Where the states of one stack come together, over as many passes as it takes.

    Its tokens and its source are made last, while a GPU may still be at work.
    """

    def __init__(
        self, subject: Subject, sites: Sequence[Site], encoded: Encoded, dtype: torch.dtype | None, beside: int = 0
    ) -> None:
        widths = {subject.anatomy.width(site): site for site in sites}
        if len(widths) > 1:
            reason = " and ".join(f"{site} is {width} wide" for width, site in widths.items())
            remedy = "Capture 'layer.*' and 'final' one after the other."
            raise StatesError(f"States of {subject.anatomy.name}", reason, remedy)
        proved = subject.anatomy.stack(sites[0]).proof.dtype
        self.subject, self.sites, self.encoded = subject, tuple(sites), encoded
        self._starts = list(accumulate(encoded.lengths, initial=0))
        pinned = subject.device.type == "cuda"
        shape = len(sites), self._starts[-1], next(iter(widths))
        self.buffer = Buffer(*shape, dtype or proved, pinned=pinned, beside=beside)

    def places(self, texts: Sequence[int]) -> list[Place]:
        """The rows of some of the texts."""
        return [Place(self._starts[text], self._starts[text + 1] - self._starts[text]) for text in texts]

    def states(self) -> States:
        """The states, once every pass has been made; a NaN or an infinity among them is an error."""
        tokens, source = self.subject.encoder.tokens(self.encoded), self.subject.source(self.sites[0].stack)
        states = States(self.sites, self.buffer.finish(), tokens, source)
        if not self.buffer.finite:
            states.check_finite()
        return states


def landings(
    subject: Subject, sites: Sequence[Site], encoded: Encoded, targets: Encoded | None, dtype: torch.dtype | None = None
) -> dict[str | None, Landing]:
    """Room for each stack that the sites are in."""
    by_stack: dict[str | None, list[Site]] = defaultdict(list)
    for site in sites:
        by_stack[site.stack].append(site)
    texts = {"decoder": targets or encoded}
    landed: dict[str | None, Landing] = {}
    for stack, own in by_stack.items():
        beside = sum(landing.buffer.values.nbytes for landing in landed.values())
        landed[stack] = Landing(subject, own, texts.get(stack or "", encoded), dtype, beside)
    return landed


def together(landed: Mapping[str | None, Landing]) -> States | Pair:
    """The states of one stack, or the pair of two."""
    states = [landing.states() for landing in landed.values()]
    return states[0] if len(states) == 1 else Pair(*states)
