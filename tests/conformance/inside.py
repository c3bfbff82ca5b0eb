"""Check the heads of a class against the attention weights that transformers reports.

The weights come from a copy of the module with eager attention. Times the values that
were recorded beside the module's own kernel, they must give the recorded `z`.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery import Anatomy, find_inside
from hiddenscope.discovery.anatomy import AttentionHeads, Inside
from hiddenscope.modules import hooks
from hiddenscope.passes.record import Watcher
from hiddenscope.sites import Site

REPORTS = {
    ("encoder", "attn"): ("encoder_attentions", "attentions"),
    ("decoder", "attn"): ("decoder_attentions", "attentions"),
    ("decoder", "cross"): ("cross_attentions",),
}
# Weights that are not what the values are multiplied with: a report of their own.
OTHER_REPORT = {"big_bird", "bigbird_pegasus", "led", "prophetnet", "reformer"}


class Tried:
    """What came of the heads of one class.

    `blocks` counts the attentions with heads, `checked` those that were compared with
    the report, `refused` holds the reasons, and `wrong` what is not so.
    """

    def __init__(self, module: nn.Module, anatomy: Anatomy) -> None:
        self.inside: Inside = find_inside(module, anatomy)
        self.blocks = self.checked = self.neurons = self.routers = 0
        self.refused: set[str] = set()
        for stack in self.inside.stacks:
            for block in stack:
                for name, branch in block.branches.items():
                    self.blocks += branch.heads is not None
                    self.neurons += name == "mlp" and branch.projection is not None
                    if branch.refused and name != "mlp":
                        self.refused.add(branch.refused)
                self.routers += block.router is not None
        self.wrong: list[str] = []

    def check(
        self, module: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Any]
    ) -> None:
        """Compare what was found with what transformers reports."""
        anatomy = anatomy.with_inside(lambda: self.inside)
        report = reported_by(module, inputs)
        for number, stack in enumerate(anatomy.stacks):
            length = inputs["decoder_input_ids" if number else "input_ids"].shape[1]
            self.wrong += self._compare_inputs(module, anatomy, inputs, number, length)
            for part in ("attn", "cross"):
                names = REPORTS.get((stack.name, part), ())
                weights = weights_in(report, names, stack.depth)
                if weights is None:
                    continue
                self.wrong += self._compare(
                    module, anatomy, inputs, (number, part, length), weights
                )

    def _compare_inputs(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        inputs: Mapping[str, Any],
        number: int,
        length: int,
    ) -> Iterator[str]:
        """Compare the input of each MLP with what torch shows entering a module.

        That is the module of the block which is called `mlp`, where there is one. One
        that is given the stream too is left out.
        """
        name = anatomy.stacks[number].name if len(anatomy.stacks) > 1 else None
        for layer, block in enumerate(anatomy.stacks[number].blocks, 1):
            inside = self.inside.stacks[number][layer - 1]
            part = getattr(module.get_submodule(block.path), "mlp", None)
            if inside.mlp_input is None or not isinstance(part, nn.Module):
                continue
            entered: list[tuple[Any, ...]] = []
            watch = part.register_forward_pre_hook(
                lambda part, args, entered=entered: entered.append(args)
            )
            site = Site(layer, "mlp.input", name)
            try:
                recorded = _recorded(module, anatomy, inputs, site, length)
            finally:
                watch.remove()
            call = inside.mlp_input.call
            if len(entered) <= call or len(entered[call]) != 1:
                continue
            if not torch.equal(entered[call][0].reshape(recorded.shape), recorded):
                yield f"{site} is not what enters {block.path}.mlp"

    def _compare(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        inputs: Mapping[str, Any],
        which: tuple[int, str, int],
        weights: Sequence[Tensor | None],
    ) -> Iterator[str]:
        number, part, length = which
        name = anatomy.stacks[number].name if len(anatomy.stacks) > 1 else None
        for layer, pattern in enumerate(weights, 1):
            branch = self.inside.stacks[number][layer - 1].branches.get(part)
            if branch is None or branch.heads is None or pattern is None:
                continue
            site = Site(layer, f"{part}.z", name)
            z = _recorded(module, anatomy, inputs, site, length)
            values = _values(module, branch.heads, inputs)
            count = branch.heads.heads
            if pattern.shape[1] != count:
                yield f"{site} has {count} heads and the report {pattern.shape[1]}"
                continue
            # T5Gemma 2 reports the keys of each stack apart.
            if pattern.shape[-1] != values.shape[2]:
                continue
            repeated = values.repeat_interleave(count // values.shape[1], dim=1)
            expected = (pattern.double() @ repeated.double()).transpose(1, 2).flatten(2)
            self.checked += 1
            # Two kernels, and as many blocks below as the layer has.
            allowed = 1e-5 * layer * expected.abs().max().item()
            worst = (z.double() - expected).abs().max().item()
            if not worst <= allowed:
                yield f"pattern times values is not {site}: off by {worst:.2g}"


def reported_by(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return the output of a copy with eager attention; None where there is none."""
    if getattr(module.config, "model_type", "") in OTHER_REPORT:
        return None
    try:
        eager: Any = deepcopy(module)
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            plain = module(**inputs, return_dict=True)
            report = eager(**inputs, output_attentions=True, return_dict=True)
    except Exception:
        # No eager attention, or no report: then there is nothing to compare with.
        return None
    # Falcon cannot change its kernel after it is built: it would leave the mask out.
    same = torch.allclose(plain[0], report[0], rtol=1e-3, atol=1e-3)
    return report if same else None


def weights_in(
    report: Any, names: Sequence[str], depth: int
) -> Sequence[Tensor | None] | None:
    for name in names:
        weights = getattr(report, name, None)
        if isinstance(weights, tuple) and len(weights) == depth:
            tensors: list[Tensor | None] = []
            for entry in weights:
                fits = isinstance(entry, Tensor) and entry.ndim == 4
                tensors.append(entry if fits else None)
            return tensors
    return None


def _recorded(
    module: nn.Module,
    anatomy: Anatomy,
    inputs: Mapping[str, Any],
    site: Site,
    length: int,
) -> Tensor:
    kept: list[Tensor] = []

    def keep(site: Site, tap: Any, tensor: Tensor) -> None:
        kept.append(tap.layout.states(tensor, length).clone())

    watcher = Watcher(anatomy, [site], keep)
    with torch.no_grad(), hooks.watching(watcher.watches(module)):
        hooks.call_module(module, inputs)
    return kept[0]


def _values(
    module: nn.Module, heads: AttentionHeads, inputs: Mapping[str, Any]
) -> Tensor:
    """Return the values [text, head, key, dim] that an attention is given."""
    tap = heads.tap("v")
    assert tap is not None
    calls: list[object] = []
    kept: list[Tensor] = []

    def look(operation: Any, run: Any) -> Any:
        if not calls or calls[-1] is not operation.forward:
            calls.append(operation.forward)
        if len(calls) - 1 == tap.call and tap.is_at(operation):
            operand = operation.operands[tap.operand]
            kept.append(heads.values.split(operand).clone())
        return run(operation)

    watch = hooks.Watch(module.get_submodule(tap.path), "inside", look)
    with torch.no_grad(), hooks.watching([watch]):
        hooks.call_module(module, inputs)
    return kept[0]
