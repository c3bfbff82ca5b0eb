"""The parts of a model as labelled arrays, and what was proved of them."""

import math
from collections.abc import Sequence

import numpy as np

from hiddenscope.analyses.anatomy.story import (
    AnatomyReport,
    Head,
    PartPlace,
    StackProof,
)
from hiddenscope.discovery import Stack
from hiddenscope.model import ModelLike, as_model
from hiddenscope.results import Result
from hiddenscope.results.dataset import Variables, to_dataset
from hiddenscope.sites import PARTS, Site

COLUMNS = {
    "entry": "entry of hidden_states",
    "difference": "largest difference from it",
    "module": "where it is read",
    "kind": "kind of the block",
}


def describe_parts(model: ModelLike) -> Result:
    """Return where every layer can be read, and what was proved of it."""
    model = as_model(model)
    parts = model.anatomy
    stacks, notes, rows = [], [], []
    for stack in parts.stacks:
        proof = stack.proof
        reported = parts.reported(stack)
        raw_difference = None
        # Where the last entry is raw itself, there is nothing to tell apart.
        ends_raw = any(entry and entry.layer == stack.depth for entry in reported)
        if not ends_raw and not math.isnan(proof.raw_difference):
            raw_difference = proof.raw_difference
        name = stack.name if len(parts.stacks) > 1 else None
        stack_proof = StackProof(
            stack=stack.name,
            blocks=stack.depth,
            width=proof.width,
            block_kind=stack.kind,
            causal=stack.causal,
            final_norm=None if proof.final is None else proof.final.path,
            exit=list(proof.exit),
            parts=_part_places(stack, name),
            proof="hidden_states" if proof.entries else "resuming",
            proved_entries=len(reported) - proof.earlier,
            earlier_entries=proof.earlier,
            # An entry that is not the same bit for bit proves nothing.
            largest_difference=0.0,
            raw_difference=raw_difference,
        )
        stacks.append(stack_proof)
        # Which blocks show no attention and MLP of their own, and why.
        reasons = [block.refused for block in stack.blocks if block.refused]
        if reasons:
            of_stack = f" of the {name}" if name else ""
            verb = "does" if len(reasons) == 1 else "do"
            blocks = f"{len(reasons)} of the {stack.depth} blocks{of_stack} {verb} not"
            blocks += " show"
            if len(reasons) == stack.depth:
                blocks = f"No block{of_stack} shows"
            distinct = "; ".join(dict.fromkeys(reasons))
            notes.append(f"{blocks} attn, mid and mlp: {distinct}.")
        for site, tap in parts.taps.items():
            if site.part or parts.stack(site) is not stack:
                continue
            kind = stack.blocks[site.layer - 1].kind if site.layer else ""
            entry, difference = _compared(reported, stack, site)
            rows.append((str(site), entry, difference, str(tap), kind))
    sites, *columns = zip(*rows, strict=True)
    variables: Variables = {}
    for (name, words), column in zip(COLUMNS.items(), columns, strict=True):
        variables[name] = "site", np.array(column), {"long_name": words}
    report = AnatomyReport(
        model_class=type(model.module).__name__,
        stacks=stacks,
        head=None if parts.head is None else Head(**vars(parts.head)),
        makes_logits=parts.makes_logits,
        padded_batches=model.batching.padding_safe,
        notes=[*notes, f"On padded batches: {model.batching.reason}.", *model.notes],
    )
    data = to_dataset(variables, {"site": list(sites)})
    return Result("anatomy", data, report, model.source())


def _part_places(stack: Stack, name: str | None) -> list[PartPlace]:
    """Return where the parts of the first block that has any can be read."""
    for layer, block in enumerate(stack.blocks, 1):
        if block.parts:
            return [
                PartPlace(
                    site=str(Site(layer, part, name)),
                    module=str(block.parts[part]),
                    block_kind=block.kind,
                )
                for part in PARTS
                if part in block.parts
            ]
    return []


def _compared(
    reported: Sequence[Site | None], stack: Stack, site: Site
) -> tuple[str, float]:
    """Return the entry of `hidden_states` that a state was compared with, and how far.

    The number is the largest difference; NaN where there is no such entry. In a model
    without them it is that of the output, resumed there.
    """
    if not stack.proof.entries:
        return "output", 0.0
    name = f"{site.stack}_hidden_states" if site.stack else "hidden_states"
    if site in reported:
        return f"{name}[{reported.index(site)}]", 0.0
    # Hugging Face reports the last layer after the final norm: the raw one differs.
    if site.layer == stack.depth:
        return f"{name}[{len(reported) - 1}]", stack.proof.raw_difference
    # In a tuple that ends with the raw layer, `final` is no entry: the model returns it
    # beside the tuple, and it was proved against that.
    if site.layer is None and stack.proof.ends_with_final:
        prefix = "encoder_" if site.stack == "encoder" else ""
        return f"{prefix}last_hidden_state", 0.0
    return "", math.nan
