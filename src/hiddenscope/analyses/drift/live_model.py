"""Live model: one of the two sides of a comparison, where it can be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hiddenscope.analyses.drift.program import run_program
from hiddenscope.discovery import Anatomy, Tap
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes import Inputs, PaddedBatch
from hiddenscope.sites import Site

LOGITS = "logits"
BRANCHES = ("attn", "cross", "mlp")


@dataclass(eq=False)
class LiveModel:
    """A module with the places of its states and the block that makes each layer.

    A port, whose modules have other names than the reference's, has its own `taps` and
    `blocks`. Other models use those of the anatomy. `passes` counts runs.
    """

    name: str
    module: nn.Module
    anatomy: Anatomy
    pad: int
    dtype: torch.dtype
    taps: Mapping[Site, Tap] = field(default_factory=dict)
    blocks: Mapping[Site, str] = field(default_factory=dict)
    is_port: bool = False
    passes: float = 0
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = hooks.input_device(self.module)
        if not self.taps:
            self.taps, self.blocks = self.anatomy.taps, _block_paths(self.anatomy)

    @property
    def kernel(self) -> str:
        """Return the name of its attention kernel."""
        config = getattr(self.module, "config", None)
        return str(getattr(config, "_attn_implementation", None) or "none")

    @property
    def sites(self) -> list[Site]:
        """Return the layers, the branches of every block, and final."""
        return [site for site in self.taps if site.part in ("", *BRANCHES)]

    def part(self, path: str) -> nn.Module:
        """Return the submodule at a path."""
        return self.module.get_submodule(path)

    def batch(self, inputs: Inputs) -> PaddedBatch:
        """Pad texts on its device."""
        targets = None
        if len(self.anatomy.stacks) > 1 and inputs.targets is not None:
            targets = PaddedBatch.of(inputs.targets, self.pad, self.device)
        return PaddedBatch.of(inputs, self.pad, self.device, targets)

    def run(self, batch: PaddedBatch) -> object:
        """Run the module on a batch and return its output."""
        with autograd.restored(inference=False), torch.no_grad():
            if self.is_port:
                return run_program(self.module, batch)
            # A NaN that an attention kernel loses is tolerated: it may be in padding,
            # and what it does elsewhere shows in the comparison.
            return hooks.call_module(
                self.module, batch.arguments(self.module), finite=False
            )


def _block_paths(anatomy: Anatomy) -> dict[Site, str]:
    paths: dict[Site, str] = {}
    for stack in anatomy.stacks:
        name = stack.name if len(anatomy.stacks) > 1 else None
        for number, block in enumerate(stack.blocks, 1):
            paths[Site(number, "", name)] = block.path
    return paths


def layer_before(site: Site) -> Site:
    """Return the layer that enters the block of a site."""
    return Site((site.layer or 1) - 1, "", site.stack)
