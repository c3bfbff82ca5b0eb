"""Where do the states of a model live, and how is that known?"""

from collections.abc import Iterator
from typing import Any

from hiddenscope.arguments import checked
from hiddenscope.discovery import Anatomy, Stack
from hiddenscope.model import ModelLike, as_model
from hiddenscope.results import Facts, Result
from hiddenscope.sites import PARTS, Site


@checked
def anatomy(model: ModelLike) -> Result:
    """Where every layer of a model can be read, and its largest difference from Hugging
    Face's own `hidden_states`.

    The difference is 0 for every layer but the last: `layer.L` is raw, and the last
    entry has gone through the final norm.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.anatomy(hs.load((tiny_model("gpt2"), None)))
    >>> for row in result.data.to_dataframe().itertuples():
    ...     print(row.Index, row.entry, "the same" if row.difference == 0 else "different")
    layer.0 hidden_states[0] the same
    layer.1 hidden_states[1] the same
    layer.2 hidden_states[2] the same
    layer.3 hidden_states[3] different
    final hidden_states[3] the same
    """
    model = as_model(model)
    import xarray

    parts = model.anatomy
    rows = [row for stack in parts.stacks for row in _rows(parts, stack)]
    sites, entries, differences, modules, kinds = zip(*rows, strict=True)
    columns = {
        "entry": entries,
        "difference": differences,
        "module": modules,
        "kind": kinds,
    }
    data = xarray.Dataset(
        {name: ("site", list(column)) for name, column in columns.items()},
        {"site": list(sites)},
    )
    head = parts.head
    facts: Facts = {
        "model_class": type(model.module).__name__,
        "stacks": [_stack(parts, stack) for stack in parts.stacks],
        "head": None if head is None else {**vars(head)},
        "makes_logits": parts.makes_logits,
        "padded_batches": model.batching.padding_safe,
        "notes": [
            *_refused_parts(parts),
            f"On padded batches: {model.batching.reason}.",
            *model.notes,
        ],
    }
    return Result("anatomy", data, facts, model.source())


def _rows(parts: Anatomy, stack: Stack) -> Iterator[tuple[str, str, float, str, str]]:
    """For every whole state of a stack: site, entry of `hidden_states`, difference,
    module, kind of block.
    """
    for site, tap in parts.taps.items():
        if site.part or parts.stack(site) is not stack:
            continue
        entry, difference = _compared(parts, stack, site)
        kind = stack.blocks[site.layer - 1].kind if site.layer else ""
        yield str(site), entry, difference, str(tap), kind


def _compared(parts: Anatomy, stack: Stack, site: Site) -> tuple[str, float]:
    """The entry of Hugging Face's tuple that a state was compared with, and the largest
    difference from it.
    """
    reported = parts.reported(stack)
    name = f"{site.stack}_hidden_states" if site.stack else "hidden_states"
    if site in reported:
        place = reported.index(site)
        return f"{name}[{place}]", stack.proof.differences[place]
    if site.layer == stack.depth:
        return f"{name}[{len(reported) - 1}]", stack.proof.raw_difference
    return "", float("nan")


def _stack(parts: Anatomy, stack: Stack) -> dict[str, Any]:
    proof, reported = stack.proof, parts.reported(stack)
    ends_raw = any(site is not None and site.layer == stack.depth for site in reported)
    return {
        "stack": stack.name,
        "blocks": stack.depth,
        "width": proof.width,
        "block_kind": stack.kind,
        "causal": stack.causal,
        "final_norm": None if proof.final is None else proof.final.path,
        "exit": list(proof.exit),
        "parts": _parts(stack, stack.name if len(parts.stacks) > 1 else None),
        "proved_entries": len(reported) - proof.earlier,
        "earlier_entries": proof.earlier,
        "largest_difference": max(proof.differences),
        "raw_difference": (
            None
            if ends_raw or proof.raw_difference != proof.raw_difference
            else proof.raw_difference
        ),
    }


def _parts(stack: Stack, name: str | None) -> list[dict[str, str]]:
    """Where the parts of the first block that has any can be read."""
    number, block = next(
        ((k, block) for k, block in enumerate(stack.blocks, 1) if block.parts),
        (0, None),
    )
    if block is None:
        return []
    return [
        {
            "site": str(Site(number, part, name)),
            "module": str(block.parts[part]),
            "block_kind": block.kind,
        }
        for part in PARTS
        if part in block.parts
    ]


def _refused_parts(parts: Anatomy) -> Iterator[str]:
    """Which blocks show no attention and MLP of their own, and why."""
    for stack in parts.stacks:
        refused = [block.refused for block in stack.blocks if block.refused]
        if refused:
            count = (
                "No block"
                if len(refused) == stack.depth
                else f"{len(refused)} of the {stack.depth} blocks"
            )
            shows = "shows" if len(refused) == stack.depth else "do not show"
            of_stack = f" of the {stack.name}" if len(parts.stacks) > 1 else ""
            reasons = "; ".join(dict.fromkeys(refused))
            yield f"{count}{of_stack} {shows} attn, mid and mlp: {reasons}."
