"""The proof of a model's anatomy, as views and sentences."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import Result, Table
from hiddenscope.views.drawing import labels
from hiddenscope.views.values import Lines, Section, Series, View

SUMS = {
    "pre-norm": "layer.k-1 + attn{cross} = mid and mid + mlp = layer.k",
    "post-norm": "norm(layer.k-1 + attn) = mid and norm(mid + mlp) = layer.k",
    "parallel": (
        "layer.k-1 + attn + mlp = layer.k, and mid is layer.k-1, which both read"
    ),
}
POST_NORM_CROSS = (
    "norm(norm(layer.k-1 + attn) + cross) = mid and norm(mid + mlp) = layer.k"
)


def views(result: Result) -> Iterator[View]:
    """The difference of every layer from `hidden_states`: zero everywhere but at the
    raw last layer.
    """
    sites, entries = (
        labels(result.data, "site"),
        result.data["entry"].to_numpy().tolist(),
    )
    difference = result.data["difference"].to_numpy().astype(np.float64)
    raw = difference > 0
    note = "0 means equal bit for bit."
    stacks = np.array(
        [site.rpartition("layer.")[0] or site.rpartition("final")[0] for site in sites]
    )
    series = [
        Series(
            f"{stack.replace('.', ' ')}layers that equal their entry",
            np.where(here, difference, np.nan),
        )
        for stack in dict.fromkeys(stacks.tolist())
        if (here := ~raw & (stacks == stack)).any()
    ]
    if raw.any():
        pairs = [
            f"{site} is raw, and {entry} is normed"
            for site, entry, it in zip(sites, entries, raw, strict=True)
            if it
        ]
        note += f" {'; '.join(pairs)}."
        series.append(
            Series("raw last layer", np.where(raw, difference, np.nan), style="bar")
        )
    title = (
        f"The layers of {result.source.get('model', 'the model')} compared with"
        " hidden_states"
    )
    yield Lines(
        title, sites, tuple(series), y_name="largest absolute difference", note=note
    )


def findings(result: Result) -> Iterator[str]:
    """What the model is made of, what was proved, and what its parts mean."""
    stacks, two = result.facts["stacks"], len(result.facts["stacks"]) > 1
    for facts in stacks:
        yield f"{result.facts['model_class']} has {_built(facts)}."
        yield f"{_proof(facts, two)}."
        yield from _sums(facts)
    yield _head(result.facts["head"], result.facts.get("makes_logits", False))
    yield from result.facts["notes"]


def _built(facts: dict[str, Any]) -> str:
    causal = "a causal" if facts["causal"] else "a bidirectional"
    final = (
        f"and the final norm {facts['final_norm']}"
        if facts["final_norm"]
        else "and no final norm"
    )
    kind = {"single": "single-branch ", "other": ""}.get(
        facts["block_kind"], f"{facts['block_kind']} "
    )
    return (
        f"{causal} {facts['stack']}: {facts['blocks']} {kind}blocks of hidden size"
        f" {facts['width']}, {final}"
    )


def _proof(facts: dict[str, Any], two: bool) -> str:
    name = f"{facts['stack']}_hidden_states" if two else "hidden_states"
    which = "last " if facts.get("earlier_entries") else ""
    proof = (
        f"Each of the {which}{facts['proved_entries']} entries of {name} equals a named"
        " state bit for bit"
    )
    if facts["raw_difference"] is None:
        return proof
    raw = (
        f"layer.{facts['blocks']}, before the final norm, differs from it by up to"
        f" {facts['raw_difference']:,.4g}"
    )
    return f"{proof}; the last entry is final, and {raw}"


def _sums(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["parts"]:
        return
    kind = facts["parts"][0]["block_kind"]
    cross = any(part["site"].endswith(".cross") for part in facts["parts"])
    sums = (
        POST_NORM_CROSS
        if cross and kind == "post-norm"
        else SUMS[kind].format(cross=" + cross" if cross else "")
    )
    places = ", ".join(
        f"{part['site']} is the {part['module']}" for part in facts["parts"]
    )
    yield f"In a {kind} block {sums}: {places}."


def _head(head: dict[str, Any] | None, makes_logits: bool) -> str:
    if head is None:
        return (
            "No single module makes its logits."
            if makes_logits
            else "The model has no head, and so no logits."
        )
    reads = (
        "reads final directly"
        if head["reads_final"]
        else "reads the last layer through other modules"
    )
    gives = (
        "gives the logits"
        if head["gives_logits"]
        else "gives what the logits are computed from"
    )
    tied = "; it shares its weight with the token embedding" if head["tied"] else ""
    return f"The unembedding, {head['path']}, {reads} and {gives}{tied}."


def sections(result: Result) -> Iterator[Section]:
    """The proof as a part of a page."""
    model, stacks = result.source.get("model", "the model"), result.facts["stacks"]
    built = "; ".join(
        f"the {one['stack']} has {one['blocks']} blocks of width {one['width']}"
        for one in stacks
    )
    proofs = " ".join(f"{_proof(one, len(stacks) > 1)}." for one in stacks)
    normed = any(one["final_norm"] for one in stacks)
    final = " After the final norm the last one is called `final`." if normed else ""
    trap = (
        " The bar is the raw last layer. Hugging Face does not report it: the last"
        " entry of `hidden_states` is `final`, which is normed, while all others are"
        " raw."
    )
    reading = (
        "The picture shows the largest absolute difference between each layer and its"
        " entry in Hugging Face's `hidden_states`, measured when the model was loaded."
    )
    yield Section(
        "How do we know which state is which?",
        f"{proofs}\n\nEvery block of `{model}` changes the vector of every token:"
        f" {built}. The vector after k blocks is the hidden state `layer.k`; `layer.0`"
        f" enters the first block.{final}{trap if normed else ''}",
        tuple(views(result)),
        reading,
    )


def tables(result: Result) -> Iterator[Table]:
    """Every layer with the entry of `hidden_states` that it was compared with, and the
    largest difference.
    """
    columns = [
        name
        for name, column in result.data.data_vars.items()
        if column.dims == ("site",)
    ]
    values = (result.data[name].to_numpy().tolist() for name in columns)
    rows = [
        [
            site,
            *(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row),
        ]
        for site, *row in zip(labels(result.data, "site"), *values, strict=True)
    ]
    text = [
        0,
        *(
            place
            for place, name in enumerate(columns, 1)
            if result.data[name].dtype.kind not in "iuf"
        ),
    ]
    yield Table(["site", *map(str, columns)], rows, text)
