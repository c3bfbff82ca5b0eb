"""Wiring: the parts of a model that write to its residual stream and that read it.

What a part reads is the sum of what the parts below it wrote. An edge is one term of
that sum. The embeddings, the heads and the MLPs write; the queries of every head, the
keys and values of every group of heads that share them, the MLPs and the logits read.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.causes.encoding import EncodedContrast
from hiddenscope.causes.measures import Into
from hiddenscope.discovery.anatomy import AttentionHeads, Branch
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.modules.trials import rounded_to, tolerance
from hiddenscope.passes.sweep import UnpatchedRun, run_unpatched
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Bools

Kind: TypeAlias = Literal["q", "k", "v", "mlp", "logits"]
OPERANDS: tuple[Kind, ...] = ("q", "k", "v")

OTHER_WAYS = "Use hs.patch."


class Reader(NamedTuple):
    """A part that reads the stream: a head's operand in a block, an MLP, the logits."""

    layer: int
    kind: Kind
    head: int = 0

    def __str__(self) -> str:
        if self.kind == "logits":
            return self.kind
        if self.kind == "mlp":
            return f"layer.{self.layer}.mlp"
        return f"layer.{self.layer}.attn.{self.kind}.{self.head}"


@dataclass(frozen=True)
class Layout:
    """What is inside one block: how its heads are laid out, and where its MLP reads.

    `mlp` is the site whose state decides what the MLP adds, or what it adds itself.
    """

    heads: AttentionHeads
    parallel: bool
    mlp: Site


@dataclass(frozen=True)
class Wiring:
    """The writers and readers of a model, and which may touch.

    `possible` [writer, reader] is True where the reader comes after the writer. The
    first writers make up the stream; those after `summed` are neurons, each a share of
    what its MLP writes.
    """

    layouts: tuple[Layout, ...]
    writers: tuple[Site, ...]
    readers: tuple[Reader, ...]
    possible: Bools
    summed: int

    @classmethod
    def of(cls, model: Model, neurons: tuple[Site, ...] = ()) -> "Wiring":
        """Return the wiring of a model whose parts are proved, or refuse it."""
        problem = f"Cannot tell the edges of {model.name}"
        layouts = []
        writers = [Site(0)]
        readers = []
        for layer, block in enumerate(model.anatomy.stacks[0].blocks, 1):
            inside = model.anatomy.block_inside(Site(layer))
            attn = inside.branches.get("attn", Branch(refused="it has none"))
            reason = ""
            if block.kind not in ("pre-norm", "parallel") or "cross" in block.parts:
                reason = f"block {layer} adds no attention and MLP to its stream"
                if block.kind == "post-norm":
                    reason = f"block {layer} norms the sum of its parts and the stream"
            elif attn.heads is None or attn.projection is None:
                reason = f"the heads of block {layer} are not known: {attn.refused}"
            elif not all(map(attn.heads.tap, OPERANDS)) or attn.heads.has_other_keys:
                reason = f"the queries and keys of block {layer} are not known"
            if reason:
                raise PassError(problem, reason, OTHER_WAYS)
            heads = attn.heads
            assert heads is not None
            part = "mlp.input" if inside.mlp_input else "mlp"
            parallel = block.kind == "parallel"
            layouts.append(Layout(heads, parallel, Site(layer, part)))
            for head in range(heads.heads):
                writers.append(Site(layer, f"attn.head.{head}"))
            writers.append(Site(layer, "mlp"))
            operands: dict[Kind, int] = {
                "q": heads.queries.heads,
                "k": heads.keys.heads,
                "v": heads.values.heads,
            }
            for kind, count in operands.items():
                readers += [Reader(layer, kind, head) for head in range(count)]
            readers.append(Reader(layer, "mlp"))
        readers.append(Reader(len(layouts) + 1, "logits"))
        summed = len(writers)
        writers += neurons
        # Attention comes before the MLP of its block, unless they are side by side.
        written = [2 * _layer(site) - ("attn" in site.part) for site in writers]
        read = []
        for reader in readers:
            aside = reader.kind == "mlp" and not layouts[reader.layer - 1].parallel
            read.append(2 * reader.layer - 1 + aside)
        possible = np.less.outer(np.array(written), np.array(read))
        return cls(tuple(layouts), tuple(writers), tuple(readers), possible, summed)

    def columns(self, layer: int) -> dict[Kind, list[int]]:
        """Return the numbers of the readers in the block below a layer, by kind."""
        numbers: dict[Kind, list[int]] = defaultdict(list)
        for number, reader in enumerate(self.readers):
            if reader.layer == layer:
                numbers[reader.kind].append(number)
        return numbers

    def sites(self) -> tuple[Site, ...]:
        """Return the sites that runs are recorded at."""
        sites = set(self.writers)
        for layer, layout in enumerate(self.layouts, 1):
            for part in ("attn.z", "attn.q", "attn.k", "attn.v"):
                sites.add(Site(layer, part))
            sites.add(layout.mlp)
            if not layout.parallel:
                sites.add(Site(layer, "mid"))
        return tuple(sorted(sites))


def _layer(site: Site) -> int:
    assert site.layer is not None
    return site.layer


@dataclass(frozen=True, eq=False)
class Runs:
    """Two runs of one form: the one that is changed, and the one it is changed towards.

    `written` and `other_written` [writer, token, width] are what every part writes in
    each, in float32 at least.
    """

    wiring: Wiring
    base: UnpatchedRun
    other: UnpatchedRun
    at: int
    written: Tensor
    other_written: Tensor

    @classmethod
    def of(
        cls, model: Model, wiring: Wiring, contrast: EncodedContrast, into: Into
    ) -> "Runs":
        """Run both prompts of a contrast; refuse those that do not align."""
        lengths = contrast.inputs.lengths
        gaps = any(None in pair for pair in contrast.columns[None])
        if lengths[0] != lengths[1] or gaps or contrast.at[0] != contrast.at[1]:
            raise TextError(
                "Cannot tell the edges of two prompts that do not align",
                f"they have {lengths[0]} and {lengths[1]} tokens, and not each a"
                " partner",
                "Give prompts of as many tokens, which differ in some of them.",
            )
        runs = run_unpatched(model, contrast.inputs, wiring.sites())
        base, other = runs[::-1] if into == "corrupt" else runs
        written = [_written(wiring, run) for run in (base, other)]
        for run, parts in zip((base, other), written, strict=True):
            _check_sum(model, wiring, run, parts)
        return cls(wiring, base, other, contrast.at[0], *written)

    @property
    def differences(self) -> Tensor:
        """Return by how much what is written differs [writer, token, width]."""
        return self.other_written - self.written


def _written(wiring: Wiring, run: UnpatchedRun) -> Tensor:
    device = run.states[wiring.writers[0]].device
    wide = []
    for site in wiring.writers:
        state = run.states[site].to(device)
        wide.append(state.to(torch.promote_types(state.dtype, torch.float32)))
    return torch.stack(wide)


@autograd.without_grad
def _check_sum(
    model: Model, wiring: Wiring, run: UnpatchedRun, written: Tensor
) -> None:
    """Refuse a model whose stream moves by anything but what its parts write.

    What attention adds besides its heads, its bias, is no edge, and counts here.
    """
    depth = len(wiring.layouts)
    allowed = tolerance(rounded_to(model.dtype), depth)
    parts = written[: wiring.summed].double()
    last = run.states[Site(depth)].to(parts)
    off = parts.sum(0) - last
    for layer in range(1, depth + 1):
        write = model.anatomy.write(model.module, Site(layer, "attn.head.0"))
        assert write is not None
        off += write.bias(run.states[Site(layer, "attn.z")]).to(off)
    off = off.norm(dim=-1)
    size = parts.norm(dim=-1).square().sum(0).sqrt()
    worst = float((off / (size * allowed)).max())
    if not worst <= 1:
        raise PassError(
            f"Cannot tell the edges of {model.name}",
            "what its parts write does not sum to its last layer: it is off by"
            f" {worst:,.1f} times the rounding tolerance",
            OTHER_WAYS,
        )
