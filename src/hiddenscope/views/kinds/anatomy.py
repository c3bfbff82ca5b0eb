"""The proof of a model's anatomy, shown and told."""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Result, Table
from hiddenscope.views.drawing import labels
from hiddenscope.views.values import Lines, Section, Series, View


def views(result: Result) -> Iterator[View]:
    """Zero at every layer but the raw last one, which stands out."""
    sites, entries = labels(result.data, "site"), result.data["entry"].to_numpy().tolist()
    difference = result.data["difference"].to_numpy().astype(np.float64)
    raw = difference > 0
    note = "Zero means bit for bit the same."
    stacks = np.array([site.rpartition("layer.")[0] or site.rpartition("final")[0] for site in sites])
    series = [
        Series(f"the {stack.replace('.', ' ')}layer that was proved to be it", np.where(here, difference, np.nan))
        for stack in dict.fromkeys(stacks.tolist())
        if (here := ~raw & (stacks == stack)).any()
    ]
    if raw.any():
        named = [
            f"{site} is raw, and {entry} is normed" for site, entry, it in zip(sites, entries, raw, strict=True) if it
        ]
        note += f" {'; '.join(named)}."
        series.append(Series("raw last layer", np.where(raw, difference, np.nan), style="bar"))
    title = f"The layers of {result.source.get('model', 'the model')} against hidden_states"
    yield Lines(title, sites, tuple(series), y_name="largest difference from hidden_states", note=note)


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    model = result.source.get("model", "the model")
    stacks = {name: facts for name, facts in result.facts.items() if isinstance(facts, dict) and "blocks" in facts}
    built = "; ".join(
        f"the {name} has {said['blocks']} blocks of width {said['width']}" for name, said in stacks.items()
    )
    proofs = "; ".join(str(facts["proof"]) for facts in stacks.values())
    normed = any(facts["final norm"] != "none" for facts in stacks.values())
    final = " The last one also goes through a norm, and is then called `final`." if normed else ""
    trap = (
        " The bar that stands out is the raw last layer, which Hugging Face does not report at all: its last entry is "
        "`final`, normed, and the others are not."
    )
    yield Section(
        "What the model computes, and the proof",
        f"A vector for every token enters `{model}` and runs through its blocks, and every block changes it: {built}. "
        f"The vector after k blocks is called `layer.k`; `layer.0` is what enters the first block.{final}\n\n"
        "Names can be wrong, so these were checked on the model itself when it was loaded, against what Hugging Face "
        f"reports as `hidden_states`. They agree: {proofs}.{trap if normed else ''}",
        tuple(views(result)),
    )


def tables(result: Result) -> Iterator[Table]:
    """Every layer with the entry of `hidden_states` that it was compared with, and the largest difference."""
    columns = [name for name, column in result.data.data_vars.items() if column.dims == ("site",)]
    values = (result.data[name].to_numpy().tolist() for name in columns)
    rows = [
        [site, *(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row)]
        for site, *row in zip(labels(result.data, "site"), *values, strict=True)
    ]
    text = [0, *(place for place, name in enumerate(columns, 1) if result.data[name].dtype.kind not in "iuf")]
    yield Table(["site", *map(str, columns)], rows, text)
