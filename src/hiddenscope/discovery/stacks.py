"""Anatomy: the stacks of a model, their blocks, the head, and the tap of every site."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hiddenscope.discovery.blocks import Block
from hiddenscope.discovery.proof import Proof
from hiddenscope.discovery.taps import Tap
from hiddenscope.errors import SiteError
from hiddenscope.sites import PARTS, Site, SitePatterns, select

EVERYTHING = "layer.*,final"


@dataclass(frozen=True)
class Stack:
    """One run of blocks, proved.

    `causal` says whether a token's state ignores the tokens after it.
    """

    name: str
    proof: Proof
    blocks: tuple[Block, ...]
    causal: bool

    @property
    def depth(self) -> int:
        """Return the number of blocks."""
        return self.proof.depth

    @property
    def kind(self) -> str:
        """Return the kind of its blocks, or all kinds where they differ.

        A block is pre-norm, post-norm, parallel, single or other.
        """
        return " and ".join(sorted({block.kind for block in self.blocks}))

    def taps(self, stack: str | None) -> dict[Site, Tap]:
        """Return the tap of every site; `stack` is the name that the sites carry."""
        taps = {Site(k, "", stack): tap for k, tap in enumerate(self.proof.taps)}
        for k, block in enumerate(self.blocks, 1):
            for part, tap in block.parts.items():
                taps[Site(k, part, stack)] = tap
        if self.proof.final is not None:
            taps[Site(None, "", stack)] = self.proof.final
        return taps


@dataclass(frozen=True)
class Head:
    """The unembedding.

    `reads_final` says whether it reads `final` unchanged, `gives_logits` whether its
    output is the logits, and `tied` whether its weight is the token embedding's.
    """

    path: str
    reads_final: bool
    gives_logits: bool
    tied: bool


@dataclass(frozen=True)
class Anatomy:
    """The stacks of a model, its head, and a tap for each of its sites.

    A model may make logits without a module that is its head: MobileBERT joins two
    weights for that.
    """

    stacks: tuple[Stack, ...]
    head: Head | None
    name: str
    makes_logits: bool = False

    @cached_property
    def taps(self) -> Mapping[Site, Tap]:
        """Return where the state of each site can be read, in the order of the pass."""
        taps: dict[Site, Tap] = {}
        for stack in self.stacks:
            taps |= stack.taps(self._name_in_sites(stack))
        return dict(sorted(taps.items()))

    def _name_in_sites(self, stack: Stack) -> str | None:
        """Return the name of a stack in sites, which have one only if there are two."""
        return stack.name if len(self.stacks) > 1 else None

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return every site of the model, in the order of the pass."""
        return tuple(self.taps)

    def stack(self, site: Site) -> Stack:
        """Return the stack that a site belongs to."""
        return self.stack_named(site.stack)

    def stack_named(self, name: str | None) -> Stack:
        """Return the stack of this name; None stands for the first."""
        return next(stack for stack in self.stacks if name in (None, stack.name))

    def width(self, site: Site) -> int:
        """Return the width of the state at a site."""
        proof = self.stack(site).proof
        if site.layer is None and proof.final_width:
            return proof.final_width
        return proof.width

    def select(self, patterns: SitePatterns) -> tuple[Site, ...]:
        """Return the sites that match the patterns, none for `()`.

        `layer.*,final` leaves `final` out where there is none or where it is not as
        wide as the layers, so that the sites make one array. The error for a part that
        was refused gives the reason.
        """
        if isinstance(patterns, tuple | list) and not patterns:
            return ()
        if not isinstance(patterns, str):
            return self._select(patterns)
        # Sorting the sites of a deep model takes longer than a short pass's hooks.
        if patterns not in self._selected:
            self._selected[patterns] = self._select(patterns)
        return self._selected[patterns]

    @cached_property
    def _selected(self) -> dict[str, tuple[Site, ...]]:
        return {}

    def _select(self, patterns: SitePatterns) -> tuple[Site, ...]:
        try:
            selected = select(
                patterns, self.sites, owner=self.name, reported=self._entries
            )
        except SiteError as error:
            raise self._with_reason(error) from None
        if patterns != EVERYTHING:
            return selected
        in_one_array = []
        for site in selected:
            if self.width(site) == self.stack(site).proof.width:
                in_one_array.append(site)
        return tuple(in_one_array)

    @cached_property
    def _entries(self) -> Mapping[str | None, tuple[Site | None, ...]]:
        return {
            self._name_in_sites(stack): self.reported(stack) for stack in self.stacks
        }

    def reported(self, stack: Stack) -> tuple[Site | None, ...]:
        """Return the site of each entry of Hugging Face's `hidden_states`.

        It is None for an entry that is the state of no site.
        """
        name, proof = self._name_in_sites(stack), stack.proof
        after_exit = None
        if proof.final is not None and proof.final.path == proof.exit[-1]:
            after_exit = Site(None, "", name)
        sites: list[Site | None] = []
        for layer in proof.entries:
            if layer < 0:
                sites.append(None)
            elif layer > proof.depth:
                sites.append(after_exit)
            else:
                sites.append(Site(layer, "", name))
        return tuple(sites)

    def reported_names(self, stack: Stack) -> tuple[str, ...]:
        """Return `reported` as strings, empty for the state of no site."""
        names = []
        for site in self.reported(stack):
            names.append("" if site is None else str(site))
        return tuple(names)

    def _with_reason(self, error: SiteError) -> SiteError:
        """Add the reason why a block's parts were refused to an error about parts."""
        if not any(part in error.problem for part in PARTS):
            return error
        number = re.search(r"layer\.([0-9]+)\.", error.problem)
        for stack in self.stacks:
            for k, block in enumerate(stack.blocks, 1):
                if block.refused and (number is None or int(number[1]) == k):
                    reason = (
                        f"the parts of block {k} ({block.path}) are not shown:"
                        f" {block.refused}"
                    )
                    return SiteError(error.problem, reason, "Choose whole layers.")
        return error
