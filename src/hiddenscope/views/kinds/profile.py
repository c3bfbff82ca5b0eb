"""The profile of a model's states: how large they are, and how they spread."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from hiddenscope.results import Result, Section
from hiddenscope.results.drawing import by_stack, grid_of, labels, long_name, of_type
from hiddenscope.results.pictures import ColourScale, Grid, Lines, Measure, Series, View
from hiddenscope.results.sentences import (
    UNTESTED,
    as_prose,
    counted,
    in_series,
    model_name,
    number,
    of_model,
    plural,
    quote,
    quoted_token,
)

if TYPE_CHECKING:
    from hiddenscope.analyses.profile.facts import (
        ProfileFacts,
        ProfileStackFacts,
        RowFacts,
    )

Sentences: TypeAlias = Callable[["ProfileStackFacts"], Iterator[str]]
NormName: TypeAlias = Literal["first_token_norm", "other_tokens_norm", "vector_norm"]

MEASURES = ("norm", "kurtosis", "mean", "deviation")
# The variables of each picture along the layers, with the names of their lines. Pooled
# states have no first tokens.
SIDES = {"first": "first token", "median": "other tokens, median"}
SIDES_POOLED = {"median": "vectors, median"}
ANISOTROPY = {"anisotropy": "all tokens", "anisotropy_others": "without first tokens"}
ANISOTROPY_POOLED = {"anisotropy": "all vectors"}
SPREAD = {
    "effective_rank": "effective rank",
    "effective_rank_others": "effective rank, without first tokens",
    "intrinsic_dimension_others": "intrinsic dimension, without first tokens",
}
SPREAD_POOLED = {
    "effective_rank": "effective rank",
    "intrinsic_dimension": "intrinsic dimension",
}
WHOSE_NORM: dict[NormName, str] = {
    "first_token_norm": "the first token",
    "other_tokens_norm": "the other tokens",
    "vector_norm": "the vectors",
}
# What each line of norms shows, by the end of its name.
NORM_LINES = {
    "first token": (
        "the norm of the first token (the median, where there are several texts)"
    ),
    "other tokens, median": (
        "the median norm of all other tokens, with a band that holds the middle half of"
        " them"
    ),
    "vectors, median": (
        "the median norm of the vectors, with a band that holds the middle half of them"
    ),
}
# What each picture shows, by words in its title.
PICTURES = {
    "What each block adds": (
        "the norm of what each block adds over the norm of its input"
    ),
    "kurtosis": "the kurtosis of the states",
    "anisotropy": "their anisotropy",
    "How many dimensions": "how many dimensions they fill",
}
APART = "`final` is normed and the layers are not, so the two are not compared."


def views(result: Result) -> Iterator[View]:
    """Yield the grid of norms, the norms along the layers, then what blocks add, how
    states spread, how alike layers are.

    What says little over few tokens is left out.
    """
    facts, pooled = cast("ProfileFacts", result.facts), _is_pooled(result)
    names = [name for name in MEASURES if name in result.data]
    grid = grid_of(result, names)
    if grid is not None:
        measures = []
        for name, measure in zip(names, grid.measures, strict=True):
            shown = long_name(result.data[name])
            title = f"The {shown} of every state{of_model(result)}"
            measures.append(replace(measure, title=title))
        yield replace(grid, title=measures[0].title, measures=tuple(measures))
    yield from _norm_lines(result)
    sides = SIDES_POOLED if pooled else SIDES
    yield from _lines(
        result,
        {f"added_{side}": words for side, words in sides.items()},
        "What each block adds, along the layers",
        "norm of the change over the norm before",
    )
    yield from _lines(
        result,
        {f"kurtosis_{side}": words for side, words in sides.items()},
        "The kurtosis along the layers",
        "kurtosis over the width",
        note=" ".join(_sentences(facts["stacks"], _massive)),
    )
    yield from _lines(
        result,
        ANISOTROPY_POOLED if pooled else ANISOTROPY,
        "The anisotropy along the layers",
        "mean cosine",
    )
    if all(stack["few_tokens"] for stack in facts["stacks"]):
        return
    yield from _lines(
        result,
        SPREAD_POOLED if pooled else SPREAD,
        "How many dimensions states fill, along the layers",
        "dimensions",
    )
    if "cka" in result.data and result.data.sizes["site"] > 1:
        yield _cka_grid(result)


def _is_pooled(result: Result) -> bool:
    """Tell whether each row is the vector of a text instead of a token."""
    return result.facts.get("pooled") is not None


def _rows(result: Result) -> Literal["tokens", "vectors"]:
    return "vectors" if _is_pooled(result) else "tokens"


def _norm_lines(result: Result) -> Iterator[Lines]:
    sites = labels(result.data, "site")
    name = "vectors, median" if _is_pooled(result) else "other tokens, median"
    series = []
    for prefix, here in by_stack(sites):
        norms = {}
        for end in ("first", "median", "low", "high"):
            if f"norm_{end}" in result.data:
                values = result.data[f"norm_{end}"].to_numpy()
                norms[end] = np.where(here, values, np.nan)
        if "first" in norms:
            series.append(Series(f"{prefix}first token", norms["first"]))
        band = norms["low"], norms["high"], "middle half"
        series.append(Series(f"{prefix}{name}", norms["median"], *band))
    title = "The norm along the layers"
    yield from _drawn(result, series, title, "norm", unit="L2", scale="log")


def _lines(
    result: Result, names: Mapping[str, str], title: str, y_name: str, note: str = ""
) -> Iterator[Lines]:
    """Draw some variables along the layers, each under its name; nothing where the
    result has none of them.
    """
    series: list[Series] = []
    scale: ColourScale = "linear"
    for name, words in names.items():
        if name not in result.data:
            continue
        variable = result.data[name]
        if not series:
            scale = variable.attrs.get("scale", "linear")
        for prefix, here in by_stack(labels(result.data, "site")):
            values = np.where(here, variable.to_numpy(), np.nan)
            series.append(Series(f"{prefix}{words}", values))
    yield from _drawn(result, series, title, y_name, scale=scale, note=note)


def _drawn(
    result: Result,
    series: Sequence[Series],
    title: str,
    y_name: str,
    *,
    unit: str = "",
    scale: ColourScale = "linear",
    note: str = "",
) -> Iterator[Lines]:
    finite = [line for line in series if np.isfinite(line.y).any()]
    if finite:
        yield Lines(
            f"{title}{of_model(result)}",
            labels(result.data, "site"),
            tuple(finite),
            y_name=y_name,
            unit=unit,
            scale=scale,
            note=note,
        )


def _cka_grid(result: Result) -> Grid:
    """Draw every pair of the layers that were compared."""
    variables = ("cka_others", "cka", "cka_chance")
    names = [name for name in variables if name in result.data]
    # Sites that were not compared are NaN.
    compared = np.isfinite(result.data[names[0]].to_numpy()).any(1)
    rows = np.flatnonzero(compared)
    data = result.data.isel(site=rows, source_site=rows)
    measures = [
        Measure(long_name(data[name]), data[name].to_numpy(), limits=(0, 1))
        for name in names
    ]
    return Grid(
        f"How similar every pair of layers of {model_name(result)} is",
        labels(data, "site"),
        labels(data, "source_site"),
        tuple(measures),
        note="Rows and columns are layers.",
        x_name="site",
    )


def findings(result: Result) -> Iterator[str]:
    """Yield what the profile shows, stack by stack."""
    facts, rows = cast("ProfileFacts", result.facts), _rows(result)
    for stack in facts["stacks"]:
        yield from _norms(stack)
        yield from _final_norm(stack)
        yield from _largest_norm(stack)
        yield from _added(stack)
        yield from _massive(stack)
        yield from _spread(stack)
        yield from _cka(stack)
        yield from _not_finite(stack)
        if stack["few_tokens"]:
            yield (
                f"With so few {rows}, spread, dimension and CKA say little: give more"
                " text."
            )
    count, shown = result.facts[rows], result.facts[f"{rows}_kept"]
    if shown < count:
        yield (
            f"The grid holds the first {shown:,} of {count:,} {rows}; all other numbers"
            f" are of all {rows}."
        )
    yield UNTESTED


def sections(result: Result) -> Iterator[Section]:
    """Yield the norms, then what blocks add, how states spread and how alike layers
    are.
    """
    facts, shown = cast("ProfileFacts", result.facts), tuple(views(result))
    stacks = facts["stacks"]
    grids, lines = of_type(shown, Grid), of_type(shown, Lines)
    norms = _sentences(stacks, _norms, _final_norm, _largest_norm)
    yield Section(
        "How large is every state?",
        as_prose([*norms, UNTESTED]),
        grids[:1],
        f"Every cell is {_cell(result)} run across, layers run up. The colour is at"
        " first the L2 norm of the vector, on a log scale.",
    )
    yield Section(
        "The same along the layers",
        " ".join(_sentences(stacks, _lessons)),
        lines[:1],
        _reading_of_norms(lines[:1]),
        folded=True,
    )
    if lines[1:]:
        yield Section(
            "What blocks add, and how states spread",
            " ".join(_sentences(stacks, _added, _massive, _spread)),
            lines[1:],
            _reading_of_lines(result, lines[1:]),
            folded=True,
        )
    if grids[1:]:
        yield Section(
            "How similar the layers are",
            as_prose(_sentences(stacks, _cka)),
            grids[1:],
            "A cell compares the states of two layers over all"
            f" {_rows(result)} by linear CKA.",
            folded=True,
        )


def _sentences(
    stacks: Sequence["ProfileStackFacts"], *describe: Sentences
) -> Iterator[str]:
    for stack in stacks:
        for sentences in describe:
            yield from sentences(stack)


def _cell(result: Result) -> str:
    facts = cast("ProfileFacts", result.facts)
    if facts.get("pooled") is not None:
        return (
            "the vector of a text, or of one window of it (pooling:"
            f" {facts['pooled']}): texts"
        )
    texts = result.data.attrs.get("texts", [])
    text = quote(texts[0]) if len(texts) == 1 else f"{facts['texts']} texts"
    return f"one hidden state of {text}: tokens"


def _reading_of_norms(lines: Sequence[Lines]) -> str:
    """Say what each line of norms is, of those that are drawn."""
    names = [series.name for series in chain(*(picture.series for picture in lines))]
    drawn = []
    for ending, words in NORM_LINES.items():
        if any(name.endswith(ending) for name in names):
            drawn.append(words)
    subject = "The lines are" if len(names) > 1 else "The line is"
    return f"{subject} {in_series(drawn)}."


def _reading_of_lines(result: Result, lines: Sequence[Lines]) -> str:
    drawn = []
    for words, description in PICTURES.items():
        if any(words in picture.title for picture in lines):
            drawn.append(description)
    reading = f"From the first to the last, the pictures show {in_series(drawn)}."
    has_both_forms = len(set(result.data["form"].to_numpy().tolist())) > 1
    return f"{reading} {APART}" if has_both_forms else reading


def _of(stack: "ProfileStackFacts") -> str:
    return f" of the {stack['stack']}" if stack["stack"] else ""


def _whose(row: "RowFacts") -> str:
    """Name a row by its token, or by its text where states are pooled."""
    if "token" in row:
        return quoted_token(row["token"])
    return f"that of text {row['text']:,}"


def _norms(stack: "ProfileStackFacts") -> Iterator[str]:
    if "norm_ratio" in stack:
        yield (
            f"In the middle layers{_of(stack)} ({stack['middle_layers']}) the median"
            f" norm of the first token is {number(stack['first_token_norm'])}, and"
            f" that of the other tokens {number(stack['other_tokens_norm'])}: the"
            f" first is {stack['norm_ratio']:,.1f} times as large."
        )


def _final_norm(stack: "ProfileStackFacts") -> Iterator[str]:
    if "before_final" not in stack or "at_final" not in stack:
        return
    before, after = stack["before_final"], stack["at_final"]
    changes = []
    for name, whose in WHOSE_NORM.items():
        if name in after:
            change = f"from {number(before[name])} to {number(after[name])}"
            changes.append(f"{whose} {change}")
    if changes:
        yield (
            f"The final norm{_of(stack)} changes the norm of"
            f" {' and that of '.join(changes)}."
        )


def _largest_norm(stack: "ProfileStackFacts") -> Iterator[str]:
    largest = stack.get("largest_norm")
    if largest:
        yield (
            f"The state with the largest norm{_of(stack)}, {number(largest['norm'])},"
            f" is {_whose(largest)} at {largest['site']}."
        )


def _added(stack: "ProfileStackFacts") -> Iterator[str]:
    added = stack.get("added")
    if added:
        low, high = added["lowest"], added["highest"]
        yield (
            f"The block that makes `{high['site']}` changes states most: the change has"
            f" {high['value']:.2f} times the norm of its input (the median). The block"
            f" that makes `{low['site']}` changes them least ({low['value']:.2f}"
            " times)."
        )


def _massive(stack: "ProfileStackFacts") -> Iterator[str]:
    """Yield the massive activations, where there are any."""
    massive = stack.get("massive_activations")
    if not massive:
        return
    largest, values = stack["largest_value"], massive["values"]
    channels = [str(record["channel"]) for record in massive["channels"]]
    numbers = ", ".join(channels)
    if sum(record["values"] for record in massive["channels"]) != values:
        numbers += " and others"
    at_first = ""
    of_first = massive.get("at_first_tokens")
    if of_first is not None:
        count = "all" if of_first == values else f"{of_first:,}"
        at_first = f", {count} of them at a first token"
    position = f", position {largest['position']}" if "position" in largest else ""
    yield (
        f"Massive activations{_of(stack)}: {counted(values, 'value')} in"
        f" {plural(len(channels), 'channel')} {numbers} at"
        f" {massive['sites']}{at_first}; the largest is"
        f" {largest['times_median']:,.0f} times the median"
        f" ({_whose(largest)}{position}, {largest['site']})."
    )


def _spread(stack: "ProfileStackFacts") -> Iterator[str]:
    ranks = stack.get("effective_rank", {})
    # Pooled states have one rank only: there is no first token to leave out.
    if stack["few_tokens"] or len(ranks) != 2:
        return
    if ranks["all_tokens"] < ranks["other_tokens"] / 2:
        yield (
            f"The first tokens hide how states spread: the middle layers{_of(stack)}"
            f" have an effective rank of {ranks['all_tokens']:.1f} with them, and of"
            f" {ranks['other_tokens']:.0f} without."
        )


def _cka(stack: "ProfileStackFacts") -> Iterator[str]:
    cka = stack.get("cka")
    if not cka:
        return
    if "sampled_vectors" in cka:
        rows, count = "vectors", cka["sampled_vectors"]
    else:
        rows, count = "tokens", cka["sampled_tokens"]
    medians = []
    if "median" in cka:
        medians.append(f"{cka['median']:.2f} over all {rows}")
    if "median_other_tokens" in cka:
        medians.append(f"{cka['median_other_tokens']:.2f} without first tokens")
    if "median_by_chance" in cka:
        chance = cka["median_by_chance"]
        medians.append(f"{chance:.2f} with {rows} paired at random")
    if medians:
        yield (
            f"The median linear CKA of all pairs of layers{_of(stack)} ({count:,}"
            f" {rows}) is {', '.join(medians)}."
        )
    pair = cka.get("least_alike")
    if pair:
        yield (
            f"`{pair['site']}` and `{pair['source_site']}` are least alike"
            f" ({pair['cka']:.2f})."
        )


def _not_finite(stack: "ProfileStackFacts") -> Iterator[str]:
    broken = stack.get("not_finite")
    if broken:
        yield (
            f"{counted(broken['states'], 'state')}{_of(stack)} had to be left out as"
            f" not finite; the first is {_whose(broken)} at {broken['site']}."
        )


def _lessons(stack: "ProfileStackFacts") -> Iterator[str]:
    """Yield what follows from the norms."""
    if stack.get("norm_ratio", 0) >= 10:
        yield (
            "A first token of this size hides all others: it dominates a mean over"
            " tokens, and a distance between two texts."
        )
    before, after = stack.get("before_final"), stack.get("at_final")
    if before and after and {"first_token_norm", "other_tokens_norm"} <= set(after):
        larger = before["first_token_norm"] > 2 * before["other_tokens_norm"]
        ratio = after["first_token_norm"] / after["other_tokens_norm"]
        if larger and 1 / 2 < ratio < 2:
            yield (
                "At `final`, after the final norm, the first token and the others have"
                " about the same norm."
            )
