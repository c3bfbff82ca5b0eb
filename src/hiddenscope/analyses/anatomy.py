"""Where do the states of a model live, and what proves it?"""

from collections.abc import Iterator
from typing import Any

from hiddenscope.anatomy import Anatomy, Head, Stack
from hiddenscope.model import Model
from hiddenscope.results import Result
from hiddenscope.sites import PARTS, Site

MEANING = {
    "pre-norm": "layer.k-1 + attn{cross} = mid; mid + mlp = layer.k",
    "post-norm": "norm(layer.k-1 + attn{cross}) = mid; norm(mid + mlp) = layer.k",
    "parallel": "layer.k-1 + attn + mlp = layer.k; mid is layer.k-1, which both read",
}


def anatomy(model: Model) -> Result:
    """Where every layer of a model passes, and its largest difference from Hugging Face's own `hidden_states`.

    The difference is 0 for every layer but the last: that is raw, and the entry has gone through the final norm.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.anatomy(hs.load((tiny_model("gpt2"), None)))
    >>> for row in result.data.to_dataframe().itertuples():
    ...     print(row.Index, row.entry, "the same" if row.difference == 0 else "another")
    layer.0 hidden_states[0] the same
    layer.1 hidden_states[1] the same
    layer.2 hidden_states[2] the same
    layer.3 hidden_states[3] another
    final hidden_states[3] the same
    """
    import xarray

    found = model.anatomy
    rows = [row for stack in found.stacks for row in _rows(found, stack)]
    sites, entries, differences, modules, kinds = zip(*rows, strict=True)
    columns = {"entry": entries, "difference": differences, "module": modules, "kind": kinds}
    data = xarray.Dataset({name: ("site", list(column)) for name, column in columns.items()}, {"site": list(sites)})
    facts: dict[str, Any] = {
        "class": type(model.module).__name__,
        **{stack.name: _stack(found, stack) for stack in found.stacks},
        "head": "none" if found.head is None else _head(found.head),
        "batching": model.batching.reason,
        "notes": list(model.notes),
    }
    return Result("anatomy", data, facts, model.source())


def _rows(found: Anatomy, stack: Stack) -> Iterator[tuple[str, str, float, str, str]]:
    """For every whole state of a stack: its site, its entry, the difference from that, its tap, its block's kind."""
    for site, tap in found.taps.items():
        if site.part or found.stack(site) is not stack:
            continue
        entry, difference = _held_against(found, stack, site)
        kind = stack.blocks[site.layer - 1].kind if site.layer else ""
        yield str(site), entry, difference, str(tap), kind


def _held_against(found: Anatomy, stack: Stack, site: Site) -> tuple[str, float]:
    """The entry of Hugging Face's tuple that a state was held against, and the largest difference from it."""
    reported = found.reported(stack)
    name = f"{site.stack}_hidden_states" if site.stack else "hidden_states"
    if site in reported:
        at = reported.index(site)
        return f"{name}[{at}]", stack.proof.differences[at]
    if site.layer == stack.depth:
        return f"{name}[{len(reported) - 1}]", stack.proof.raw_difference
    return "", float("nan")


def _stack(found: Anatomy, stack: Stack) -> dict[str, Any]:
    proof = stack.proof
    return {
        "blocks": stack.depth,
        "width": proof.width,
        "kind": stack.kind,
        "causal": stack.causal,
        "final norm": "none" if proof.final is None else proof.final.path,
        **({"way out": list(proof.exit)} if len(proof.exit) > 1 or (proof.exit and proof.final is None) else {}),
        **_parts(stack),
        "proof": _proved(found, stack),
    }


def _parts(stack: Stack) -> dict[str, Any]:
    """What attn, cross, mid and mlp mean in the blocks of a stack and where they are in the first that has them."""
    facts: dict[str, Any] = {}
    number, shown = next(((k, block) for k, block in enumerate(stack.blocks, 1) if block.parts), (0, None))
    if shown is not None:
        cross = " + cross" if "cross" in shown.parts and shown.kind == "pre-norm" else ""
        meaning = MEANING[shown.kind].format(cross=cross)
        if "cross" in shown.parts and shown.kind == "post-norm":
            meaning = meaning.replace("norm(layer.k-1 + attn)", "norm(norm(layer.k-1 + attn) + cross)")
        facts["parts"] = meaning
        facts |= {f"layer.{number}.{name}": str(shown.parts[name]) for name in PARTS if name in shown.parts}
    refused = [block for block in stack.blocks if block.refused]
    if refused:
        every = "every block" if len(refused) == stack.depth else f"{len(refused)} of {stack.depth} blocks"
        facts["no parts"] = f"in {every}: {'; '.join(dict.fromkeys(block.refused for block in refused))}"
    return facts


def _proved(found: Anatomy, stack: Stack) -> str:
    """The proof in a sentence."""
    reported = found.reported(stack)
    prefix = f"{stack.name}_" if len(found.stacks) > 1 else ""
    same = f"all {len(reported)} entries of {prefix}hidden_states, bit for bit"
    raw = stack.proof.raw_difference
    if Site(stack.depth, "", stack.name if prefix else None) in reported or raw != raw:
        return same
    return f"{same}; raw layer.{stack.depth} differs from the last by {raw:,.4g}"


def _head(head: Head) -> dict[str, Any]:
    return {"path": head.path, "reads final": head.reads_final, "gives logits": head.gives_logits, "tied": head.tied}
