"""The story of an anatomy: what a model is made of, and the proof of its states."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from hiddenscope.results import (
    Aside,
    Explanation,
    Report,
    Result,
    Section,
    Table,
    frozen,
)
from hiddenscope.results.drawing import by_stack, labels
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.sentences import counted, model_name

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


@frozen
class PartPlace:
    """Where a part of a block can be read."""

    site: str
    module: str
    block_kind: str


@frozen
class StackProof:
    """What one stack is made of, and what was proved about it."""

    stack: str
    blocks: int
    width: int
    block_kind: str
    causal: bool
    final_norm: str | None
    exit: list[str]
    parts: list[PartPlace]
    proof: Literal["hidden_states", "resuming"]
    proved_entries: int
    earlier_entries: int
    largest_difference: float
    raw_difference: float | None


@frozen
class Head:
    """The module that computes the logits."""

    path: str
    reads_final: bool
    gives_logits: bool
    tied: bool


@frozen
class AnatomyReport(Report):
    """What a model is made of."""

    model_class: str
    stacks: list[StackProof]
    head: Head | None
    makes_logits: bool
    padded_batches: bool
    notes: list[str]


def story(report: AnatomyReport, result: Result) -> Iterator[Section]:
    """Yield the proof, with what it means."""
    stacks = report.stacks
    entries = labels(result.data, "entry")
    findings = []
    proofs = []
    for stack in stacks:
        proof = f"{_proof(stack, len(stacks) > 1, entries)}."
        proofs.append(proof)
        causal = "causal" if stack.causal else "bidirectional"
        names = {"single": "single-branch ", "other": ""}
        kind = names.get(stack.block_kind, f"{stack.block_kind} ")
        final = "no final norm"
        if stack.final_norm:
            final = f"the final norm {stack.final_norm}"
        findings.append(
            f"{report.model_class} has a {causal} {stack.stack}:"
            f" {counted(stack.blocks, f'{kind}block')} of hidden size {stack.width},"
            f" and {final}."
        )
        findings.append(proof)
        if stack.parts:
            parts = stack.parts
            block_kind = parts[0].block_kind
            has_cross = any(part.site.endswith(".cross") for part in parts)
            sums = SUMS[block_kind].format(cross=" + cross" if has_cross else "")
            if has_cross and block_kind == "post-norm":
                sums = POST_NORM_CROSS
            places = ", ".join(f"{part.site} is the {part.module}" for part in parts)
            findings.append(f"In a {block_kind} block {sums}: {places}.")
    findings += [_head(report), *report.notes]
    built = [
        f"the {stack.stack} has {counted(stack.blocks, 'block')} of width {stack.width}"
        for stack in stacks
    ]
    meaning = (
        f"Every block of `{model_name(result)}` changes the vector of every token:"
        f" {'; '.join(built)}. The vector after k blocks is the hidden state `layer.k`;"
        " `layer.0` enters the first block."
    )
    caption = (
        "The picture shows the largest absolute difference between each layer and its"
        " entry in Hugging Face's `hidden_states`, measured when the model was loaded."
    )
    if any(stack.proof == "resuming" for stack in stacks):
        caption = (
            "The picture shows the largest absolute difference of the output, where the"
            " pass was resumed at each state when the model was loaded."
        )
    elif any(stack.final_norm for stack in stacks):
        meaning += " After the final norm the last one is called `final`."
        if any(stack.raw_difference is not None for stack in stacks):
            meaning += (
                " The bar is the raw last layer. Hugging Face does not report it: the"
                " last entry of `hidden_states` is `final`, which is normed, while all"
                " others are raw."
            )
    data = result.data
    columns = ["site", "entry", "difference", "module", "kind"]
    cells = [labels(data, name) for name in columns]
    cells[2] = tuple(f"{value:.3g}" for value in data["difference"].to_numpy())
    rows = list(map(list, zip(*cells, strict=True)))
    yield Section(
        "How do we know which state is which?",
        (*map(Aside, findings), *map(Explanation, (" ".join(proofs), meaning))),
        (_differences(result),),
        caption,
        tables=(Table(columns, rows, text_columns=(0, 1, 3, 4)),),
    )


def _differences(result: Result) -> Lines:
    """Draw how far every layer is from its entry of `hidden_states`."""
    sites, entries = labels(result.data, "site"), labels(result.data, "entry")
    difference = result.data["difference"].to_numpy().astype(np.float64)
    # Only the raw last layer may differ: Hugging Face reports it after the final norm.
    is_raw = difference > 0
    series = []
    for prefix, here in by_stack(sites):
        equal = here & ~is_raw
        if equal.any():
            equals = f"{prefix}layers that equal their entry"
            series.append(Series(equals, np.where(equal, difference, np.nan)))
    note = "0 means equal bit for bit."
    if is_raw.any():
        raw_layers = [
            f"{sites[row]} is raw, and {entries[row]} is normed"
            for row in np.flatnonzero(is_raw)
        ]
        note += f" {'; '.join(raw_layers)}."
        raw = np.where(is_raw, difference, np.nan)
        series.append(Series("raw last layer", raw, style="bar"))
    title = f"The layers of {model_name(result)} compared with hidden_states"
    # The output has no entry: the model was resumed at each state instead.
    if "output" in entries:
        title = f"The output of {model_name(result)}, resumed at each of its states"
    return Lines(
        title,
        sites,
        tuple(series),
        y_name="largest absolute difference",
        note=note,
    )


def _proof(stack: StackProof, several: bool, entries: Sequence[str]) -> str:
    if stack.proof == "resuming":
        return (
            "It reports no hidden_states, and was resumed: each of layer.0 to"
            f" layer.{stack.blocks}, put into a pass over another text, gives the"
            " output of its own text bit for bit"
        )
    name = f"{stack.stack}_hidden_states" if several else "hidden_states"
    which = "last " if stack.earlier_entries else ""
    proof = (
        f"Each of the {which}{stack.proved_entries} entries of {name} equals a named"
        " state bit for bit"
    )
    last = "last_hidden_state"
    if several and stack.stack == "encoder":
        last = f"encoder_{last}"
    if last in entries:
        return (
            f"{proof}; the last entry is layer.{stack.blocks}, and {last} is final, bit"
            " for bit"
        )
    if stack.raw_difference is None:
        return proof
    return (
        f"{proof}; the last entry is final, and layer.{stack.blocks}, before the"
        f" final norm, differs from it by up to {stack.raw_difference:,.4g}"
    )


def _head(report: AnatomyReport) -> str:
    head = report.head
    if head is None and report.makes_logits:
        return "No single module makes its logits."
    if head is None:
        return "The model has no head, and so no logits."
    reads = "reads the last layer through other modules"
    if head.reads_final:
        reads = "reads final directly"
    gives = "gives what the logits are computed from"
    if head.gives_logits:
        gives = "gives the logits"
    tied = "; it shares its weight with the token embedding" if head.tied else ""
    return f"The unembedding, {head.path}, {reads} and {gives}{tied}."
