"""Anatomy: the stacks of a model, their blocks, the head, and the tap of every site.

What a branch adds is made by its last projection, a linear map. Its input is `z` of an
attention, which splits into heads, or the neurons of an MLP. Queries, keys and values
are operands of functions that the code of an attention calls.

A `Write` is what a part of a projection's input adds to the residual stream.
Projections and norms are run by their `forward`: they are run inside a pass, where a
call of the module itself would set off the hooks that watch it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.discovery.blocks import Block
from hiddenscope.discovery.proof import Proof
from hiddenscope.discovery.trace import Layout, OperationPlace, Tap
from hiddenscope.errors import SiteError
from hiddenscope.modules import hooks, operations
from hiddenscope.modules.quantised import quantised_weights
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
# Columns of a weight that are converted to float64 at a time.
COLUMN_BLOCK = 2048


@dataclass(frozen=True)
class HeadLayout:
    """How an operand of attention holds its heads.

    It is [text, head, token, dim], or [text x head, token, dim] with `flat_heads` heads
    of each text, and its last two axes are exchanged if `transposed`. Grouped-query
    attention may repeat each of its `heads`, in some passes and not in others.

    >>> import torch
    >>> layout = HeadLayout(heads=2)
    >>> layout.states(torch.zeros(1, 4, 7, 16), tokens=7).shape
    torch.Size([1, 7, 32])
    """

    heads: int
    flat_heads: int = 0
    transposed: bool = False

    def texts(self, tensor: Tensor, tokens: int) -> int:
        """Return the number of texts in the operand."""
        return self.split(tensor).shape[0]

    def length(self, tensor: Tensor) -> int:
        """Return the number of tokens in the operand, earlier passes included."""
        return self.split(tensor).shape[2]

    def split(self, tensor: Tensor) -> Tensor:
        """Return the operand as [text, head, token, dim], repeated heads included."""
        if self.flat_heads:
            tensor = tensor.reshape(-1, self.flat_heads, *tensor.shape[1:])
        return tensor.mT if self.transposed else tensor

    def states(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the operand as [text, token, head x dim], each head once."""
        heads = self.split(tensor)
        copies = heads.shape[1] // self.heads
        # Keys and values of earlier passes come before those of this one.
        recent = heads[:, ::copies, heads.shape[2] - tokens :]
        return recent.transpose(1, 2).flatten(2)

    gradients = states

    def with_states(self, tensor: Tensor, states: Tensor) -> Tensor:
        """Return a copy of the operand that holds other states."""
        # Contiguous, so that to split it makes no copy.
        new = tensor.clone(memory_format=torch.contiguous_format)
        heads = self.split(new)
        copies = heads.shape[1] // self.heads
        texts, tokens = states.shape[:2]
        changed = states.reshape(texts, tokens, self.heads, -1).transpose(1, 2)
        recent = heads[:, :, heads.shape[2] - tokens :]
        recent.copy_(changed.repeat_interleave(copies, dim=1))
        return new


@dataclass(frozen=True)
class OperationTap:
    """Where a state is an operand of an operation, or its output (-1)."""

    place: OperationPlace
    operand: int
    layout: HeadLayout | Layout
    side: Literal["inside"] = "inside"

    @property
    def path(self) -> str:
        """Return the path of the module whose code makes the operation."""
        return self.place.path

    @property
    def call(self) -> int:
        """Return the number of that module's call."""
        return self.place.call

    def is_at(self, operation: operations.Operation) -> bool:
        """Tell whether an operation of the right call is the one of the state."""
        place = self.place
        return (operation.kind, operation.number) == (place.kind, place.number)

    def __str__(self) -> str:
        return f"{self.place.kind} inside {self.path}"


@dataclass(frozen=True)
class Projection:
    """The linear map at the end of a branch, and the tap of its input.

    `norm` is the path of a norm that comes after it, which rescales every token, and
    what comes out is added times `scale`.
    """

    tap: Tap
    width: int
    norm: str = ""
    scale: float = 1.0


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one attention, and the operations that show how they attend.

    `weights` is where the pattern meets the values: torch's attention, or a product
    whose first factor is the pattern. `scores` is the product of queries and keys that
    a softmax makes the pattern of; it is None where several products make the scores.
    """

    heads: int
    dim: int
    key_dim: int
    weights: OperationPlace
    scores: OperationPlace | None
    queries: HeadLayout
    keys: HeadLayout
    values: HeadLayout
    has_other_keys: bool = False

    @property
    def is_fused(self) -> bool:
        """Tell whether torch's attention makes the pattern, and never shows it."""
        return self.weights.kind == "attention"

    def tap(self, name: str) -> OperationTap | None:
        """Return where queries, keys or values (q, k, v) are; None if it is unknown."""
        if name == "v":
            operand = 2 if self.is_fused else 1
            return OperationTap(self.weights, operand, self.values)
        place = self.weights if self.is_fused else self.scores
        if place is None:
            return None
        operand, layout = (0, self.queries) if name == "q" else (1, self.keys)
        return OperationTap(place, operand, layout)


@dataclass(frozen=True)
class Branch:
    """What is known inside one branch of a block, or why nothing is."""

    projection: Projection | None = None
    heads: AttentionHeads | None = None
    refused: str = ""


@dataclass(frozen=True)
class InsideBlock:
    """The branches of one block by name, what its MLP takes in, and its router.

    The router is the softmax over its experts.
    """

    branches: Mapping[str, Branch] = field(default_factory=dict)
    router: OperationTap | None = None
    experts: int = 0
    no_router: str = ""
    mlp_input: Tap | None = None
    no_input: str = "no state that its modules take in decides by itself what it adds"


@dataclass(frozen=True)
class Inside:
    """What is inside the blocks of a model, for each stack and block."""

    stacks: tuple[tuple[InsideBlock, ...], ...] = ()

    def block(self, stack: int, layer: int) -> InsideBlock:
        """Return the block that makes a layer."""
        return self.stacks[stack][layer - 1]


def inner_parts(block: InsideBlock, *, neurons: bool) -> Sequence[str]:
    """Return the parts of sites inside a block; single neurons only if asked for."""
    parts = []
    for name, branch in block.branches.items():
        heads = branch.heads
        if heads is not None:
            # The keys of a cross-attention are the encoder's tokens. Those of the
            # attention of T5Gemma 2 are the tokens of both stacks.
            shown = "q" if heads.has_other_keys else "qkv"
            parts += [f"{name}.{operand}" for operand in shown if heads.tap(operand)]
        if branch.projection is None:
            continue
        if heads is not None:
            parts.append(f"{name}.z")
            parts += [f"{name}.head.{head}" for head in range(heads.heads)]
        elif name == "mlp":
            parts.append("mlp.neurons")
            count = branch.projection.width if neurons else 0
            parts += [f"mlp.neuron.{neuron}" for neuron in range(count)]
    if block.mlp_input is not None:
        parts.append("mlp.input")
    if block.router is not None:
        parts.append("router")
    return parts


def place_inside(block: InsideBlock, site: Site) -> tuple[Tap | OperationTap, int]:
    """Return where the state of a site is read, and its width there.

    Those of a head or neuron are where all of them are. The width is 0 for that of the
    layers.
    """
    if site.part == "mlp.input":
        assert block.mlp_input is not None
        return block.mlp_input, 0
    if site.part == "router":
        assert block.router is not None
        return block.router, block.experts
    branch = block.branches[site.branch]
    heads, name = branch.heads, site.part.rpartition(".")[2]
    if heads is not None and name in ("q", "k", "v"):
        tap = heads.tap(name)
        assert tap is not None
        layouts = {"q": heads.queries, "k": heads.keys, "v": heads.values}
        dim = heads.dim if name == "v" else heads.key_dim
        return tap, layouts[name].heads * dim
    assert branch.projection is not None
    return branch.projection.tap, branch.projection.width


def why_refused(block: InsideBlock, site: Site) -> str:
    """Say why a block has no such site; empty if nothing is refused there."""
    if site.part == "mlp.input":
        return block.no_input
    if site.part == "router":
        return block.no_router
    branch = block.branches.get(site.branch)
    if branch is None:
        return f"it has no {site.branch}"
    if branch.refused:
        return branch.refused
    if branch.heads is not None and site.kind in ("cross.k", "cross.v"):
        return "its rows are the encoder's tokens, not the decoder's"
    is_of_keys = site.kind in ("attn.k", "attn.v")
    if branch.heads is not None and branch.heads.has_other_keys and is_of_keys:
        return "its rows are the encoder's tokens too"
    if branch.heads is not None and site.kind in ("attn.q", "attn.k", "cross.q"):
        return "" if branch.heads.scores else "several products make its scores"
    return ""


class Write:
    """What some columns of a projection's input write: a head, or a neuron.

    The bias belongs to none of them. A norm after the projection is taken with the
    scale that it has for the whole, so that the writes still sum up.
    """

    def __init__(
        self, module: nn.Module, projection: Projection, columns: slice
    ) -> None:
        self.part = module.get_submodule(projection.tap.path)
        self.norm = module.get_submodule(projection.norm) if projection.norm else None
        self.columns = columns
        self.width = projection.width
        self.scale = projection.scale
        self.weight = _weight(self.part)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return what the columns of inputs [..., width] write [..., hidden size]."""
        return self._normed(self.linear(inputs[..., self.columns]), inputs)

    def bias(self, inputs: Tensor) -> Tensor:
        """Return what the projection adds for inputs [..., width] of zeros."""
        bias = self._scaled(self.part.forward(torch.zeros_like(inputs)))
        return self._normed(bias, inputs)

    def _normed(self, written: Tensor, inputs: Tensor) -> Tensor:
        if self.norm is None:
            return written
        return written * frozen_scale(self.norm, self.part.forward(inputs)).to(written)

    def linear(self, piece: Tensor) -> Tensor:
        """Return what inputs [..., columns] of these columns write before any norm."""
        columns = self.columns
        if self.weight is not None:
            weight = self.weight[:, columns].to(piece)
            return self._scaled(functional.linear(piece, weight))
        # A quantised or adapted projection: only its own code knows its weight.
        masked = piece.new_zeros(*piece.shape[:-1], self.width)
        nothing = torch.zeros_like(masked)
        masked[..., columns] = piece
        biased: Tensor = self.part.forward(masked)
        bias: Tensor = self.part.forward(nothing)
        return self._scaled(biased - bias)

    def _scaled(self, written: Tensor) -> Tensor:
        return written if self.scale == 1 else written * self.scale

    def gain(self, written: Tensor) -> Tensor:
        """Return the gain of the norm for each channel of what is written.

        It is the factor that a norm has besides the scale of each token, and 1 where
        there is no norm.
        """
        if self.norm is None:
            return written.new_ones(written.shape[-1])
        ones = written.new_ones(1, written.shape[-1])
        gain: Tensor = self.norm.forward(ones)[0]
        return gain


def effects_along(
    module: nn.Module, projection: Projection, inputs: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each column of a projection's input, and its bias, add in directions.

    For inputs [row, width] and a direction [row, hidden size] for each, the effects of
    the columns are [row, width] and those of the bias [row], in float64. A norm after
    the projection is taken with its frozen scale.
    """
    whole = Write(module, projection, slice(None))
    batch = inputs[None]
    along = directions * projection.scale
    if whole.norm is not None:
        along = along * frozen_scale(whole.norm, whole.part.forward(batch))[0]
    bias = whole.part.forward(torch.zeros_like(batch))[0].double()
    blocks = []
    for start in range(0, projection.width, COLUMN_BLOCK):
        columns = slice(start, start + COLUMN_BLOCK)
        if whole.weight is not None:
            towards = along @ whole.weight[:, columns].to(along)
            blocks.append(inputs[:, columns].double() * towards)
            continue
        # A quantised or adapted projection: each column goes through its code by
        # itself.
        write = Write(module, replace(projection, scale=1.0), columns)
        rows = []
        for row, direction in zip(inputs, along, strict=True):
            written = write.linear(torch.diag(row[columns])[None])[0]
            rows.append(written.double() @ direction)
        blocks.append(torch.stack(rows))
    return torch.cat(blocks, 1), (bias * along).sum(-1)


def frozen_scale(norm: nn.Module, inputs: Tensor) -> Tensor:
    """Return the factor [..., hidden size] by which a norm multiplies each number.

    Such a norm has a gain for each channel and a scale for each token, and nothing
    else.
    """
    gain = norm.forward(torch.ones_like(inputs)).double()
    directed = inputs.double() * gain
    output = norm.forward(inputs).double()
    size = (directed * directed).sum(-1, keepdim=True)
    scale = (output * directed).sum(-1, keepdim=True) / size.clamp_min(1e-300)
    factor: Tensor = gain * scale
    return factor


def _weight(part: nn.Module) -> Tensor | None:
    """Return the weight [output, input] of a plain projection; None of any other."""
    if hooks.foreign_hooks(part) or hooks.is_offloaded(part):
        return None
    for quantised in quantised_weights(part):
        # A product that rounds its input is not linear.
        return None if quantised.rounds_input else quantised.unpack()
    weight = getattr(part, "weight", None)
    if type(part) is nn.Linear:
        return weight if isinstance(weight, Tensor) else None
    # GPT-2's projections hold their weight the other way round.
    if type(part).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.T
    return None


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

    def write(self, module: nn.Module, site: Site) -> Write:
        """Return what computes the state of a head or neuron from its tap's tensor."""
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
            return place_inside(self.block_inside(site), site)[1] or proof.width
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
        reported = {
            self._name_in_sites(stack): self.reported(stack) for stack in self.stacks
        }
        try:
            selected = select(patterns, sites, owner=self.name, reported=reported)
        except SiteError as error:
            raise self._with_reason(error) from None
        if patterns != EVERYTHING:
            return selected
        in_one_array = [
            site
            for site in selected
            if self.width(site) == self.stack(site).proof.width
        ]
        return tuple(in_one_array)

    def reported(self, stack: Stack) -> tuple[Site | None, ...]:
        """Return the site of each entry of Hugging Face's `hidden_states`.

        It is None for an entry that is the state of no site.
        """
        name, proof = self._name_in_sites(stack), stack.proof
        after_exit = None
        if proof.ends_with_final:
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
