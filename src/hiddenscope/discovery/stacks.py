"""Anatomy: the stacks of a model, their blocks, the head, and the tap of every site."""

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
    """One run of blocks, proved. `causal` says whether a token's state ignores the
    tokens behind it.
    """

    name: str
    proof: Proof
    blocks: tuple[Block, ...]
    causal: bool

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return self.proof.depth

    @property
    def kind(self) -> str:
        """The kind of its blocks: pre-norm, post-norm, parallel, single or other;
        several where they differ.
        """
        return " and ".join(sorted({block.kind for block in self.blocks}))

    def taps(self, stack: str | None) -> dict[Site, Tap]:
        """Every site of the stack with its tap; `stack` is the name that the sites
        carry.
        """
        taps = {Site(k, "", stack): tap for k, tap in enumerate(self.proof.taps)}
        for k, block in enumerate(self.blocks, 1):
            taps |= {Site(k, part, stack): tap for part, tap in block.parts.items()}
        if self.proof.final is not None:
            taps[Site(None, "", stack)] = self.proof.final
        return taps


@dataclass(frozen=True)
class Head:
    """The unembedding: whether it reads `final` unchanged, whether its output is the
    logits, and whether it is tied.
    """

    path: str
    reads_final: bool
    gives_logits: bool
    tied: bool


@dataclass(frozen=True)
class Anatomy:
    """The stacks of a model, its head, and a tap for each of its sites.

    A model may make logits without a head, a module that makes them: MobileBERT joins
    two weights for that.
    """

    stacks: tuple[Stack, ...]
    head: Head | None
    name: str
    makes_logits: bool = False

    @cached_property
    def taps(self) -> Mapping[Site, Tap]:
        """Where the state of each site can be read, in the order of the pass."""
        two = len(self.stacks) > 1
        taps = {
            site: tap
            for stack in self.stacks
            for site, tap in stack.taps(stack.name if two else None).items()
        }
        return dict(sorted(taps.items()))

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site of the model, in the order of the pass."""
        return tuple(self.taps)

    def stack(self, site: Site) -> Stack:
        """Return the stack that a site belongs to."""
        return self.stack_named(site.stack)

    def stack_named(self, name: str | None) -> Stack:
        """Return the stack of this name; None stands for the only one."""
        return next(stack for stack in self.stacks if name in (None, stack.name))

    def width(self, site: Site) -> int:
        """The width of the state at a site."""
        proof = self.stack(site).proof
        return proof.final_width or proof.width if site.layer is None else proof.width

    def select(self, patterns: SitePatterns) -> tuple[Site, ...]:
        """The sites that match the patterns, none for `()`; for a part that was
        refused, the error gives the reason.

        `layer.*,final` leaves `final` out where there is none or where it is not as
        wide as the layers, so that the sites make one array.
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
            chosen = select(
                patterns, self.sites, owner=self.name, reported=self._entries
            )
        except SiteError as error:
            raise self._with_reason(error) from None
        if patterns == EVERYTHING:
            return tuple(
                site
                for site in chosen
                if self.width(site) == self.stack(site).proof.width
            )
        return chosen

    @cached_property
    def _entries(self) -> Mapping[str | None, tuple[Site | None, ...]]:
        two = len(self.stacks) > 1
        return {
            stack.name if two else None: self.reported(stack) for stack in self.stacks
        }

    def reported(self, stack: Stack) -> tuple[Site | None, ...]:
        """The site of each entry of Hugging Face's `hidden_states`; None for an entry
        that is no site's state.
        """
        name, proof = stack.name if len(self.stacks) > 1 else None, stack.proof
        left = (
            Site(None, "", name)
            if proof.final is not None and proof.final.path == proof.exit[-1]
            else None
        )
        return tuple(
            None if k < 0 else left if k > proof.depth else Site(k, "", name)
            for k in proof.entries
        )

    def reported_names(self, stack: Stack) -> tuple[str, ...]:
        """Return `reported` as strings, empty for an entry that no site names."""
        names = []
        for site in self.reported(stack):
            names.append("" if site is None else str(site))
        return tuple(names)

    def _with_reason(self, error: SiteError) -> SiteError:
        """The same error with the reason why the parts of a block were refused, if it
        is about parts.
        """
        if not any(part in error.problem for part in PARTS):
            return error
        number = re.search(r"layer\.([0-9]+)\.", error.problem)
        refused = [
            (k, block)
            for stack in self.stacks
            for k, block in enumerate(stack.blocks, 1)
            if block.refused
        ]
        for k, block in refused:
            if number is None or int(number[1]) == k:
                reason = (
                    f"the parts of block {k} ({block.path}) are not shown:"
                    f" {block.refused}"
                )
                return SiteError(error.problem, reason, "Choose whole layers.")
        return error
