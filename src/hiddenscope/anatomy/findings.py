"""Anatomy: where the states of a module are, and what was shown to prove it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hiddenscope.anatomy.branches import Block
from hiddenscope.anatomy.proof import Proof
from hiddenscope.anatomy.taps import Tap
from hiddenscope.errors import SiteError
from hiddenscope.sites import Site, select


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

    def select(self, patterns: object) -> tuple[Site, ...]:
        """The sites that patterns choose; a part that was refused says why."""
        try:
            return select(patterns, self.sites, owner=self.name)  # type: ignore[arg-type]
        except SiteError as error:
            raise self._why_not(error) from None

    def _why_not(self, error: SiteError) -> SiteError:
        refused = {block.refused: block for stack in self.stacks for block in stack.blocks if block.refused}
        if not refused or not any(part in error.asked for part in ("attn", "cross", "mid", "mlp")):
            return error
        block = next(iter(refused.values()))
        found = f"block {block.path} has no parts to show, for {block.refused}"
        return SiteError(error.asked, found, "Ask for whole layers.")
