"""Contributions: what each head, MLP, embedding and bias adds to the answer's logit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Listing, Result, Section, Table, table_of
from hiddenscope.results.drawing import of_type
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, View
from hiddenscope.results.sentences import (
    as_prose,
    model_name,
    quoted_token,
    quoted_tokens,
    shortened,
)

if TYPE_CHECKING:
    import xarray

    from hiddenscope.analyses.contributions.facts import StrongPartFacts

# Lists are shown for so many tokens of an answer.
MOST_LISTED = 4
# An answer is cut here in titles and sentences, in characters.
LONGEST_ANSWER = 60
# Parts beside the heads, as the data and as a reader calls them.
SUMS = {
    "embedding": "embedding",
    "attn_head": "heads",
    "cross_head": "cross-attention heads",
    "attn_bias": "attention biases",
    "cross_bias": "cross-attention biases",
    "attn_whole": "attention that is not split into heads",
    "cross_whole": "cross-attention that is not split into heads",
    "mlp": "MLPs",
    "norm_bias": "final norm's bias",
    "head_bias": "unembedding's bias",
}
# Shown even where they add nothing.
ALWAYS = ("embedding", "attn_head", "mlp")
READING = (
    "Every coloured cell is what one attention head adds to the logit, and every bar is"
    " what the MLP of that layer adds: orange raises it, blue lowers it. Layers run up."
    " The model's logit is the sum of all parts, once the scale of the final norm is"
    " frozen at its value in this text. These are direct effects: what a part changes"
    " by way of later layers is counted there."
)


def views(result: Result) -> Iterator[View]:
    """Yield layer by head with a bar for each MLP, then the sums of each kind."""
    yield _grid(result)
    yield _sums(result)


def _grid(result: Result) -> Grid:
    data = result.data
    steps = range(data.sizes["step"])
    columns = [f"head.{head}" for head in data["head"].to_numpy().tolist()]
    bars = _bars(data)
    title = f"What each part of {model_name(result)} adds to {_logit(result)}"
    measures = []
    for step in steps:
        of_step = _step_name(result, step)
        measure = Measure(
            f"contribution to {of_step}",
            _rows_of_step(data.isel(step=step), bars),
            "logits",
            meaning="diverging",
            title=f"{title}{_step_ending(result, step)}",
        )
        measures.append(measure)
    return Grid(
        title,
        _row_names(data),
        (*columns, *bars),
        tuple(measures),
        note="Bars have the scale of the colours: the longest is as far as these go.",
        x_name="part",
        y_name="layer",
        # A grid has a coloured column: without heads that is the whole attention.
        bars=len(bars) if columns else len(bars) - 1,
    )


def _row_names(data: "xarray.Dataset") -> tuple[str, ...]:
    names = []
    for layer in data["layer"].to_numpy().tolist():
        if "cross_head" in data:
            names += [f"layer.{layer} self", f"layer.{layer} cross"]
        else:
            names.append(f"layer.{layer}")
    return tuple(names)


def _bars(data: "xarray.Dataset") -> list[str]:
    """Name the columns behind the heads, which are drawn as bars."""
    bars = []
    if any(f"{branch}_whole" in data for branch in ("attn", "cross")):
        bars.append("attention")
    if any(_has_numbers(data, f"{branch}_bias") for branch in ("attn", "cross")):
        bars.append("bias")
    return [*bars, "MLP"]


def _rows_of_step(data: "xarray.Dataset", bars: list[str]) -> NDArray[np.float32]:
    """Return the numbers of one answer token: a row for each layer, two where layers
    have cross-attention, with the bars behind the heads.
    """
    parts = _columns(data, "attn", bars)
    mlp = data["mlp"].to_numpy()[:, None]
    if "cross_head" not in data:
        return np.concatenate([*parts, mlp], axis=1).astype(np.float32)
    # The MLP comes after both, so its bar stands in the upper row.
    lower = np.concatenate([*parts, np.full_like(mlp, np.nan)], axis=1)
    upper = np.concatenate([*_columns(data, "cross", bars), mlp], axis=1)
    both = np.stack([lower, upper], axis=1).astype(np.float32)
    return both.reshape(-1, both.shape[-1])


def _columns(
    data: "xarray.Dataset", branch: str, bars: list[str]
) -> list[NDArray[np.float64]]:
    """Return the columns of an attention: its heads, then its bars."""
    columns = [data[f"{branch}_head"].transpose("layer", "head").to_numpy()]
    for bar, name in (("attention", "whole"), ("bias", "bias")):
        if bar not in bars:
            continue
        values = np.full(data.sizes["layer"], np.nan)
        if f"{branch}_{name}" in data:
            values = data[f"{branch}_{name}"].to_numpy()
        columns.append(values[:, None])
    return columns


def _has_numbers(data: "xarray.Dataset", name: str) -> bool:
    """Tell whether a part is there and is anything but zero."""
    return name in data and bool(np.nan_to_num(data[name].to_numpy()).any())


def _sums(result: Result) -> Lines:
    """Draw the sum of each kind of part as bars, one bar for each answer token."""
    data = result.data
    names = []
    for name in SUMS:
        if name in ALWAYS or _has_numbers(data, name):
            names.append(name)
    sums = np.array([_sum_by_step(data, name) for name in names])
    series = []
    for step in range(data.sizes["step"]):
        series.append(Series(_step_name(result, step), sums[:, step], style="bar"))
    return Lines(
        f"What all parts of a kind add to {_logit(result)}, in {model_name(result)}",
        tuple(SUMS[name] for name in names),
        tuple(series),
        x_name="part",
        y_name="contribution",
        unit="logits",
    )


def _sum_by_step(data: "xarray.Dataset", name: str) -> NDArray[np.float64]:
    variable = data[name]
    others = [dim for dim in variable.dims if dim != "step"]
    return cast("NDArray[np.float64]", variable.sum(others).to_numpy())


def _strings(result: Result) -> list[str]:
    return [str(text) for text in result.data["step_string"].to_numpy().tolist()]


def _step_name(result: Result, step: int) -> str:
    """Name one token of the answer, with its number where there are several."""
    strings = _strings(result)
    number = f" (token {step + 1} of the answer)" if len(strings) > 1 else ""
    return f"{_quoted(strings[step])}{number}"


def _step_ending(result: Result, step: int) -> str:
    if len(_strings(result)) == 1:
        return ""
    return f": {_step_name(result, step)}"


def _logit(result: Result) -> str:
    """Name the logit, or the difference of two, that the parts add up to."""
    answers = [result.facts["answer"], result.facts.get("other")]
    names = [shortened(str(answer), LONGEST_ANSWER) for answer in answers if answer]
    return f"the logit of {' over '.join(quoted_tokens(names))}"


def _quoted(text: str) -> str:
    return quoted_token(shortened(text, LONGEST_ANSWER))


def findings(result: Result) -> Iterator[str]:
    """Yield the strongest part, what each kind adds up to, whether the sum holds, and
    notes.
    """
    strongest = _strongest(result, 0)
    if strongest:
        yield _lead(result, strongest[0])
    yield _kinds_finding(result)
    yield _sum_finding(result)
    softcap = result.facts.get("softcap")
    if softcap:
        yield (
            f"The model caps its logits softly at {softcap}: the parts add up to the"
            " logit before the cap."
        )
    yield (
        "These are direct effects in one text; other texts were not tested, and a part"
        " that adds much need not be needed."
    )
    yield from cast("list[str]", result.facts.get("notes") or [])


def _strongest(result: Result, step: int) -> "list[StrongPartFacts]":
    """Return the strongest parts of one step, as the analysis lists them."""
    parts = cast("list[StrongPartFacts]", result.facts.get("strongest") or [])
    return [part for part in parts if part["step"] == step]


def _lead(result: Result, part: "StrongPartFacts") -> str:
    amount = abs(part["contribution"])
    verb = "adds most to"
    if part["contribution"] < 0:
        verb = "takes most from"
    logit = float(result.data["logit"].to_numpy()[0])
    target = _logit(result)
    if len(_strings(result)) > 1:
        target = f"the first token of {target.removeprefix('the logit of ')}"
    return (
        f"{part['site']} {verb} {target}: {amount:.2f}, where the sum of all parts"
        f" is {_signed(logit).removeprefix('+')}."
    )


def _kinds_finding(result: Result) -> str:
    data = result.data
    sums = []
    for name, words in SUMS.items():
        if name in ALWAYS or _has_numbers(data, name):
            amount = float(_sum_by_step(data, name)[0])
            sums.append(f"{words} {_signed(amount)}")
    ending = ""
    if data.sizes["step"] > 1:
        ending = " for the first token of the answer"
    return f"By kind{ending}: {', '.join(sums)}."


def _signed(amount: float) -> str:
    return f"{amount:+.2f}".replace("-", "−")


def _sum_finding(result: Result) -> str:
    error = float(np.abs(result.data["error"].to_numpy()).max())
    return (
        "The parts sum to the model's own logit with an error of at most"
        f" {error:.1g}, which is checked on every call."
    )


def tables(result: Result) -> Iterator[Table]:
    """Yield the strongest parts and neurons of each answer token."""
    yield from map(table_of, _listings(result))


def sections(result: Result) -> Iterator[Section]:
    """Yield the grid with what it shows, then the sums by kind."""
    shown, sentences = tuple(views(result)), list(findings(result))
    yield Section(
        "Which parts write the answer?",
        as_prose(sentences),
        of_type(shown, Grid),
        READING,
        tables=tuple(_listings(result)),
    )
    yield Section(
        "Embedding, heads, MLPs and biases",
        _kinds_finding(result),
        of_type(shown, Lines),
        "Each bar is the sum of all parts of one kind. The bars add up to the logit.",
        folded=True,
    )


def _listings(result: Result) -> Iterator[Listing]:
    steps = min(MOST_LISTED, result.data.sizes["step"])
    for step in range(steps):
        parts = _strongest(result, step)
        ending = _step_ending(result, step)
        if parts:
            yield _part_listing(parts, ending)
        neurons = _neuron_rows(result, step)
        if neurons:
            yield Listing(
                f"Strongest neurons{ending}",
                ("neuron", "contribution"),
                tuple(neurons),
                note="They are parts of their MLP, which the grid shows as a whole.",
            )


def _part_listing(parts: "list[StrongPartFacts]", ending: str) -> Listing:
    rows = []
    for part in parts:
        rows.append((part["site"], part["contribution"], 100 * part["share"]))
    return Listing(
        f"Strongest parts{ending}",
        ("part", "contribution", "percent of the sum"),
        tuple(rows),
    )


def _neuron_rows(result: Result, step: int) -> list[tuple[str, float]]:
    """Name the neurons of one step, the strongest first."""
    if "neuron" not in result.data:
        return []
    data = result.data.isel(step=step)
    rows = []
    for rank, amount in enumerate(data["neuron"].to_numpy().tolist()):
        if not np.isfinite(amount):
            continue
        layer = int(data["neuron_layer"].to_numpy()[rank])
        index = int(data["neuron_index"].to_numpy()[rank])
        rows.append((f"layer.{layer}.mlp.neuron.{index}", float(amount)))
    return rows
