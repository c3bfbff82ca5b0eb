"""Landing: where the states of a stack come together, over as many passes as it takes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hiddenscope.anatomy import Anatomy
from hiddenscope.errors import StatesError
from hiddenscope.passes.buffer import Buffer, Place
from hiddenscope.passes.encoder import Encoded, Encoder
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Source, States, Tokens


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
    def lock(self) -> AbstractContextManager[Any]: ...  # noqa: D102
    def source(self, stack: str | None) -> Source: ...  # noqa: D102


@dataclass(frozen=True)
class Landing:
    """Where the states of one stack come together, over as many passes as it takes."""

    sites: tuple[Site, ...]
    encoded: Encoded
    tokens: Tokens
    buffer: Buffer
    source: Source

    @classmethod
    def of(cls, subject: Subject, sites: Sequence[Site], encoded: Encoded, dtype: torch.dtype | None) -> "Landing":
        """Room for the states of encoded texts at sites of one stack."""
        widths = {subject.anatomy.width(site): site for site in sites}
        if len(widths) > 1:
            found = " and ".join(f"{site} is {width} wide" for width, site in widths.items())
            raise StatesError(f"States of {subject.anatomy.name}", found, "Capture them one after another.")
        proved = subject.anatomy.stack(sites[0]).proof.dtype
        pinned = subject.device.type == "cuda"
        buffer = Buffer(len(sites), sum(encoded.lengths), next(iter(widths)), dtype or proved, pinned=pinned)
        source = subject.source(sites[0].stack)
        return cls(tuple(sites), encoded, subject.encoder.tokens(encoded), buffer, source)

    def places(self, texts: Sequence[int]) -> list[Place]:
        """The rows of some of the texts."""
        rows = [self.tokens.rows(text) for text in texts]
        return [Place(row.start, row.stop - row.start) for row in rows]

    def states(self) -> States:
        """The states, once every pass has been made; a NaN or an infinity among them is an error."""
        states = States(self.sites, self.buffer.finish(), self.tokens, self.source)
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
    return {stack: Landing.of(subject, own, texts.get(stack or "", encoded), dtype) for stack, own in by_stack.items()}


def together(landed: Mapping[str | None, Landing]) -> States | Pair:
    """The states of one stack, or the pair of two."""
    states = [landing.states() for landing in landed.values()]
    return states[0] if len(states) == 1 else Pair(*states)
