"""Anatomy: where the states of a module are, and what was shown to prove it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hiddenscope.anatomy.branches import Block
from hiddenscope.anatomy.proof import Proof
from hiddenscope.anatomy.taps import Tap
from hiddenscope.errors import SiteError
from hiddenscope.sites import PARTS, Site, select

EVERYTHING = "layer.*,final"


@dataclass(frozen=True)
class Stack:
    """One run of blocks, proved."""

    name: str
    proof: Proof
    blocks: tuple[Block, ...]
    causal: bool

    @property
    def depth(self) -> int:
        """How many blocks it has."""
        return self.proof.depth

    @property
    def kind(self) -> str:
        """The kind of its blocks, or kinds, where they differ."""
        return " and ".join(sorted({block.kind for block in self.blocks}))

    def taps(self, stack: str | None) -> dict[Site, Tap]:
        """Every site of the stack with its tap; `stack` is the name that the sites carry."""
        found = {Site(k, "", stack): tap for k, tap in enumerate(self.proof.taps)}
        for k, block in enumerate(self.blocks, 1):
            found |= {Site(k, part, stack): tap for part, tap in block.parts.items()}
        if self.proof.final is not None:
            found[Site(None, "", stack)] = self.proof.final
        return found


@dataclass(frozen=True)
class Head:
    """What makes the logits: whether it reads `final` as it is, gives the logits as they are, and is tied."""

    path: str
    reads_final: bool
    gives_logits: bool
    tied: bool


@dataclass(frozen=True)
class Anatomy:
    """The stacks of a model, its head, and a tap for each of its sites."""

    stacks: tuple[Stack, ...]
    head: Head | None
    name: str

    @cached_property
    def taps(self) -> Mapping[Site, Tap]:
        """Where each site's state passes."""
        two = len(self.stacks) > 1
        found = {site: tap for stack in self.stacks for site, tap in stack.taps(stack.name if two else None).items()}
        return dict(sorted(found.items()))

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site of the model, in the order of the pass."""
        return tuple(self.taps)

    def stack(self, site: Site) -> Stack:
        """The stack that a site belongs to."""
        return next(stack for stack in self.stacks if site.stack in (None, stack.name))

    def width(self, site: Site) -> int:
        """How many numbers the state at a site has."""
        proof = self.stack(site).proof
        return proof.final_width or proof.width if site.layer is None else proof.width

    def select(self, patterns: Any) -> tuple[Site, ...]:
        """The sites that patterns choose, none for `()`; a part that was refused says why.

        `layer.*,final` means `final` where there is one and it is as wide as the layers, so that they make one array.
        """
        if isinstance(patterns, tuple | list) and not patterns:
            return ()
        try:
            chosen = select(patterns, self.sites, owner=self.name, reported=self._entries)
        except SiteError as error:
            raise self._why_not(error) from None
        if patterns == EVERYTHING:
            return tuple(site for site in chosen if self.width(site) == self.stack(site).proof.width)
        return chosen

    @cached_property
    def _entries(self) -> Mapping[str | None, tuple[Site | None, ...]]:
        two = len(self.stacks) > 1
        return {stack.name if two else None: self.reported(stack) for stack in self.stacks}

    def reported(self, stack: Stack) -> tuple[Site | None, ...]:
        """What each entry of Hugging Face's tuple is; None for one that left the stack otherwise than as a site."""
        name, proof = stack.name if len(self.stacks) > 1 else None, stack.proof
        left = Site(None, "", name) if proof.final is not None and proof.final.path == proof.exit[-1] else None
        return tuple(left if k > proof.depth else Site(k, "", name) for k in proof.entries)

    def _why_not(self, error: SiteError) -> SiteError:
        """The same refusal, with the reason of the block that was asked for, if it is refused its parts."""
        if not any(part in error.problem for part in PARTS):
            return error
        number = re.search(r"layer\.([0-9]+)\.", error.problem)
        blocks = [(k, block) for stack in self.stacks for k, block in enumerate(stack.blocks, 1) if block.refused]
        for k, block in blocks:
            if number is None or int(number[1]) == k:
                reason = f"block {k} ({block.path}) has no parts to show, for {block.refused}"
                return SiteError(error.problem, reason, "Ask for whole layers.")
        return error
