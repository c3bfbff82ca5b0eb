"""Anatomy: the stacks of a model, their blocks, the head, and the tap of every site."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from hiddenscope.discovery.blocks import Block
from hiddenscope.discovery.inside import (
    Inside,
    InsideBlock,
    OperationTap,
    Projection,
    Write,
    inner_parts,
    place_inside,
    why_refused,
)
from hiddenscope.discovery.proof import Proof
from hiddenscope.discovery.trace import Tap
from hiddenscope.errors import SiteError
from hiddenscope.sites import (
    PARTS,
    Site,
    SitePatterns,
    names_inner,
    names_neurons,
    select,
    split_patterns,
)

EVERYTHING = "layer.*,final"
# The quoted name of a site inside a branch, in an error.
_INNER_NAME = re.compile(
    r"'(?:(?P<stack>encoder|decoder)\.)?(?:\*|layer\.[^'.]+)"
    r"\.(?P<part>[^'.]+\.[^']+|router)'"
)


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
        return len(self.blocks)

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
    # Found when a site inside attention or the MLP is first asked for.
    find_inside: Callable[[], Inside] = field(
        default=Inside, init=False, compare=False, repr=False
    )

    def with_inside(self, find_inside: Callable[[], Inside]) -> Anatomy:
        """Return the same anatomy, which finds what is inside its blocks like this."""
        anatomy = replace(self)
        object.__setattr__(anatomy, "find_inside", find_inside)
        return anatomy

    def look_inside(self) -> Inside:
        """Return what is inside the blocks, found again if the model has changed.

        To look whether it has takes longer than a hook, so taps and widths are those of
        the last look: that of `select`, before each pass.
        """
        inside = self.find_inside()
        vars(self)["inside"] = inside
        return inside

    @cached_property
    def inside(self) -> Inside:
        """Return what is inside the blocks: heads, neurons and routers."""
        return self.look_inside()

    def block_inside(self, site: Site) -> InsideBlock:
        """Return what is inside the block of a site."""
        number = 0
        if site.stack is not None:
            number = self.stacks.index(self.stack(site))
        return self.inside.block(number, site.layer or 0)

    def tap(self, site: Site) -> Tap | OperationTap:
        """Return where the state of a site can be read.

        That of a head or a neuron is computed from all heads or neurons (`written`).
        """
        if not site.is_inner:
            return self.taps[site]
        return place_inside(self.block_inside(site), site)[0]

    def projection(self, site: Site) -> Projection:
        """Return the last projection of the branch that a site is in."""
        projection = self.block_inside(site).branches[site.branch].projection
        assert projection is not None, "a site inside a refused branch is not selected"
        return projection

    def columns(self, site: Site) -> slice:
        """Return the columns of a projection's input that a head or neuron is."""
        assert site.index is not None, "only heads and neurons are some columns"
        heads = self.block_inside(site).branches[site.branch].heads
        width = 1 if heads is None else heads.dim
        return slice(site.index * width, (site.index + 1) * width)

    def write(self, module: nn.Module, site: Site) -> Write | None:
        """Return what computes the state of a head or neuron from its tap's tensor."""
        if site.index is None:
            return None
        return Write(module, self.projection(site), self.columns(site))

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
        # What a head or neuron adds is as wide as a layer.
        if site.is_inner and site.index is None:
            return place_inside(self.block_inside(site), site)[1]
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
            patterns = tuple(split_patterns(patterns))
        # Sorting the sites of a deep model takes longer than a short pass's hooks.
        selected = self._selected.get((patterns, 0))
        if selected is None:
            # What is inside depends on the attention kernel, which may be changed.
            key = (patterns, id(self.look_inside()) if names_inner(patterns) else 0)
            selected = self._selected.get(key) or self._select(patterns)
            self._selected[key] = selected
        return selected

    @cached_property
    def _selected(self) -> dict[tuple[SitePatterns, int], tuple[Site, ...]]:
        return {}

    def _select(self, patterns: SitePatterns) -> tuple[Site, ...]:
        sites = [*self.sites]
        if names_inner(patterns):
            neurons = names_neurons(patterns)
            for stack, blocks in zip(self.stacks, self.inside.stacks, strict=False):
                name = self._name_in_sites(stack)
                for layer, block in enumerate(blocks, 1):
                    for part in inner_parts(block, neurons=neurons):
                        sites.append(Site(layer, part, name))
        reported = {}
        for stack in self.stacks:
            reported[self._name_in_sites(stack)] = self.reported(stack)
        try:
            selected = select(patterns, sites, owner=self.name, reported=reported)
        except SiteError as error:
            raise self._with_reason(error) from None
        if patterns != EVERYTHING:
            return selected
        in_one_array = []
        for site in selected:
            if self.width(site) == self.stack(site).proof.width:
                in_one_array.append(site)
        return tuple(in_one_array)

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
            elif layer > stack.depth:
                sites.append(after_exit)
            else:
                sites.append(Site(layer, "", name))
        return tuple(sites)

    def reported_names(self, stack: Stack) -> tuple[str, ...]:
        """Return `reported` as strings, empty for the state of no site."""
        return self._reported_names[stack.name]

    @cached_property
    def _reported_names(self) -> dict[str, tuple[str, ...]]:
        names = {}
        for stack in self.stacks:
            sites = self.reported(stack)
            names[stack.name] = tuple(str(site or "") for site in sites)
        return names

    def _with_reason(self, error: SiteError) -> SiteError:
        """Add the reason why a block's parts were refused to an error about parts."""
        number = re.search(r"layer\.([0-9]+)\.", error.problem)
        inner = _INNER_NAME.search(error.problem)
        if inner is None and not any(part in error.problem for part in PARTS):
            return error
        if inner is not None and not self.inside.stacks:
            return error
        for stack_number, stack in enumerate(self.stacks):
            if inner is not None and inner["stack"] not in (None, stack.name):
                continue
            for layer, block in enumerate(stack.blocks, 1):
                if number is not None and int(number[1]) != layer:
                    continue
                where = f"block {layer} ({block.path})"
                if inner is None:
                    reason, remedy = block.refused, "Choose whole layers."
                    shown = f"the parts of {where} are not shown"
                else:
                    kind = re.sub(r"\.[0-9*-]+$", ".0", inner["part"])
                    try:
                        site = Site(layer, kind, self._name_in_sites(stack))
                    except SiteError:
                        return error
                    reason = why_refused(self.inside.block(stack_number, layer), site)
                    remedy = "Choose the whole part, or whole layers."
                    shown = f"{site.branch} of {where} is not shown inside"
                if reason:
                    return SiteError(error.problem, f"{shown}: {reason}", remedy)
        return error
