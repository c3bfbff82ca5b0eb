"""The profile of a model's states, as views and sentences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import (
    UNTESTED,
    as_prose,
    grid_of,
    in_series,
    labels,
    quoted,
    title_of,
)
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

ANISOTROPY = {"anisotropy": "all tokens", "anisotropy_others": "without first tokens"}
SPREAD = {
    "effective_rank": "effective rank",
    "effective_rank_others": "effective rank, without first tokens",
    "intrinsic_dimension_others": "intrinsic dimension, without first tokens",
}
ANISOTROPY_POOLED = {"anisotropy": "all vectors"}
SPREAD_POOLED = {
    "effective_rank": "effective rank",
    "intrinsic_dimension": "intrinsic dimension",
}
FEW = "With so few {rows}, spread, dimension and CKA say little: give more text."


def views(result: Result) -> Iterator[View]:
    """The grid of norms, the norms along the layers, then what blocks add, how states
    spread, how alike layers are.

    What says little over few tokens is left out there.
    """
    names = [
        name
        for name in ("norm", "kurtosis", "mean", "deviation")
        if name in result.data
    ]
    grid = grid_of(result, names)
    if grid is not None:
        titles = [
            f"The {result.data[name].attrs.get('long_name', name)} of every state"
            for name in names
        ]
        of_model = (
            f" of {model}"
            if isinstance(model := result.source.get("model"), str)
            else ""
        )
        named = [
            replace(one, title=f"{title}{of_model}")
            for one, title in zip(grid.measures, titles, strict=True)
        ]
        yield replace(grid, title=named[0].title, measures=tuple(named))
    yield from _norm_lines(result)
    pooled = _pooled(result)
    both = (
        {"median": "vectors, median"}
        if pooled
        else {"first": "first token", "median": "other tokens, median"}
    )
    added, kurtosis = (
        {f"{name}_{side}": words for side, words in both.items()}
        for name in ("added", "kurtosis")
    )
    massive = " ".join(
        sentence for facts in result.facts["stacks"] for sentence in _massive(facts)
    )
    yield from _lines(
        result,
        added,
        "What each block adds, along the layers",
        "norm of the change over the norm before",
    )
    yield from _lines(
        result,
        kurtosis,
        "The kurtosis along the layers",
        "kurtosis over the width",
        massive,
    )
    yield from _lines(
        result,
        ANISOTROPY_POOLED if pooled else ANISOTROPY,
        "The anisotropy along the layers",
        "mean cosine",
    )
    if not all(facts["few_tokens"] for facts in result.facts["stacks"]):
        spread = SPREAD_POOLED if pooled else SPREAD
        yield from _lines(
            result,
            spread,
            "How many dimensions states fill, along the layers",
            "dimensions",
        )
        if "cka" in result.data and result.data.sizes["site"] > 1:
            yield _cka_grid(result)


def _pooled(result: Result) -> bool:
    """Whether each row is the vector of a text, and no token."""
    return result.facts.get("pooled") is not None


def _norm_lines(result: Result) -> Iterator[Lines]:
    series, words = [], "vectors" if _pooled(result) else "other tokens"
    for prefix, here in _by_stack(result):
        norms = {
            name: np.where(here, result.data[f"norm_{name}"].to_numpy(), np.nan)
            for name in ("first", "median", "low", "high")
            if f"norm_{name}" in result.data
        }
        if "first" in norms:
            series.append(Series(f"{prefix}first token", norms["first"]))
        band = norms["low"], norms["high"], "middle half"
        series.append(Series(f"{prefix}{words}, median", norms["median"], *band))
    shown = [one for one in series if np.isfinite(one.y).any()]
    if shown:
        title = title_of(result, ["norm"]).replace(
            "Norm", "The norm along the layers", 1
        )
        yield Lines(
            title,
            labels(result.data, "site"),
            tuple(shown),
            y_name="norm",
            unit="L2",
            scale="log",
        )


def _lines(
    result: Result, names: Mapping[str, str], title: str, y_name: str, note: str = ""
) -> Iterator[Lines]:
    """Some variables along the layers, each under its name; no picture where there is
    none of them.
    """
    known = {name: words for name, words in names.items() if name in result.data}
    series = [
        Series(f"{prefix}{words}", np.where(here, result.data[name].to_numpy(), np.nan))
        for name, words in known.items()
        for prefix, here in _by_stack(result)
    ]
    shown = tuple(one for one in series if np.isfinite(one.y).any())
    if shown:
        model, scale = (
            result.source.get("model"),
            result.data[next(iter(known))].attrs.get("scale", "linear"),
        )
        title = f"{title} of {model}" if isinstance(model, str) else title
        yield Lines(
            title,
            labels(result.data, "site"),
            shown,
            y_name=y_name,
            scale=scale,
            note=note,
        )


def _by_stack(result: Result) -> Iterator[tuple[str, Any]]:
    """Which sites belong to each stack."""
    stacks = [
        site.rpartition("layer.")[0] or site.rpartition("final")[0]
        for site in labels(result.data, "site")
    ]
    for stack in dict.fromkeys(stacks):
        yield stack.replace(".", " "), np.array([one == stack for one in stacks])


def _cka_grid(result: Result) -> Grid:
    """Every pair of the layers that were compared."""
    names = [
        name for name in ("cka_others", "cka", "cka_chance") if name in result.data
    ]
    kept = np.flatnonzero(np.isfinite(result.data[names[0]].to_numpy()).any(1))
    data = result.data.isel(site=kept, source_site=kept)
    measures = tuple(
        Measure(
            str(data[name].attrs["long_name"]), data[name].to_numpy(), limits=(0, 1)
        )
        for name in names
    )
    title = (
        "How similar every pair of layers of"
        f" {result.source.get('model', 'the model')} is"
    )
    note = "Rows and columns are layers."
    return Grid(
        title,
        labels(data, "site"),
        labels(data, "source_site"),
        measures,
        note=note,
        x_name="site",
    )


def findings(result: Result) -> Iterator[str]:
    """What the profile shows, stack by stack."""
    for facts in result.facts["stacks"]:
        for part in (
            _norms,
            _final_norm,
            _largest_norm,
            _added,
            _massive,
            _spread,
            _cka,
            _not_finite,
        ):
            yield from part(facts)
        if facts["few_tokens"]:
            yield FEW.format(rows=_rows(result))
    rows = _rows(result)
    kept, count = result.facts[f"{rows}_kept"], result.facts[rows]
    if kept < count:
        yield (
            f"The grid holds the first {kept:,} of {count:,} {rows}; all other numbers"
            f" are of all {rows}."
        )
    yield UNTESTED


def _rows(result: Result) -> str:
    """What the rows are."""
    return "vectors" if _pooled(result) else "tokens"


def _whose(row: Mapping[str, Any]) -> str:
    """The token of a row, or its text where states are pooled."""
    return (
        quoted(row["token"].strip() or row["token"])
        if "token" in row
        else f"that of text {row['text']:,}"
    )


def _of(facts: Mapping[str, Any]) -> str:
    return f" of the {facts['stack']}" if facts["stack"] else ""


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _norms(facts: Mapping[str, Any]) -> Iterator[str]:
    if "norm_ratio" in facts:
        first, others, ratio = (
            facts[name]
            for name in ("first_token_norm", "other_tokens_norm", "norm_ratio")
        )
        yield (
            f"In the middle layers{_of(facts)} ({facts['middle_layers']}) the median"
            f" norm of the first token is {_number(first)}, and that of the other"
            f" tokens {_number(others)}: the first is {ratio:,.1f} times as large."
        )


def _final_norm(facts: Mapping[str, Any]) -> Iterator[str]:
    changes = [
        f"{who} from {_number(facts['before_final'][name])} to"
        f" {_number(facts['at_final'][name])}"
        for name, who in WHOSE_NORM.items()
        if name in facts.get("at_final", {})
    ]
    if changes:
        yield (
            f"The final norm{_of(facts)} changes the norm of"
            f" {' and that of '.join(changes)}."
        )


def _largest_norm(facts: Mapping[str, Any]) -> Iterator[str]:
    if largest := facts.get("largest_norm"):
        yield (
            f"The state with the largest norm{_of(facts)}, {_number(largest['norm'])},"
            f" is {_whose(largest)} at {largest['site']}."
        )


def _added(facts: Mapping[str, Any]) -> Iterator[str]:
    if added := facts.get("added"):
        low, high = added["lowest"], added["highest"]
        yield (
            f"The block that makes `{high['site']}` changes states most: the change has"
            f" {high['value']:.2f} times the norm of its input (the median). The block"
            f" that makes `{low['site']}` changes them least ({low['value']:.2f}"
            " times)."
        )


def _massive(facts: Mapping[str, Any]) -> Iterator[str]:
    """Massive activations, where there are any."""
    if massive := facts.get("massive_activations"):
        largest, channels = (
            facts["largest_value"],
            [str(one["channel"]) for one in massive["channels"]],
        )
        listed = sum(one["values"] for one in massive["channels"]) == massive["values"]
        numbers = ", ".join(channels) + ("" if listed else " and others")
        of_first = massive.get("at_first_tokens")
        first = "all" if of_first == massive["values"] else f"{of_first or 0:,}"
        at_first = "" if of_first is None else f", {first} of them at a first token"
        position = f", position {largest['position']}" if "position" in largest else ""
        yield (
            f"Massive activations{_of(facts)}: {_count(massive['values'], 'value')} in"
            f" {'channel' if len(channels) == 1 else 'channels'} {numbers} at"
            f" {massive['sites']}{at_first}; the largest is"
            f" {largest['times_median']:,.0f} times the median"
            f" ({_whose(largest)}{position}, {largest['site']})."
        )


def _spread(facts: Mapping[str, Any]) -> Iterator[str]:
    ranks = facts.get("effective_rank", {})
    if (
        len(ranks) == 2
        and ranks["all_tokens"] < ranks["other_tokens"] / 2
        and not facts["few_tokens"]
    ):
        yield (
            f"The first tokens hide how states spread: the middle layers{_of(facts)}"
            f" have an effective rank of {ranks['all_tokens']:.1f} with them, and of"
            f" {ranks['other_tokens']:.0f} without."
        )


def _cka(facts: Mapping[str, Any]) -> Iterator[str]:
    if not (cka := facts.get("cka")):
        return
    rows = "vectors" if "sampled_vectors" in cka else "tokens"
    names = {
        "median": f"over all {rows}",
        "median_other_tokens": "without first tokens",
        "median_by_chance": f"with {rows} paired at random",
    }
    medians = [
        f"{cka[name]:.2f} {words}" for name, words in names.items() if name in cka
    ]
    if medians:
        count = f"{cka[f'sampled_{rows}']:,} {rows}"
        yield (
            f"The median linear CKA of all pairs of layers{_of(facts)} ({count}) is"
            f" {', '.join(medians)}."
        )
    if least := cka.get("least_alike"):
        yield (
            f"`{least['site']}` and `{least['source_site']}` are least alike"
            f" ({least['cka']:.2f})."
        )


def _not_finite(facts: Mapping[str, Any]) -> Iterator[str]:
    if broken := facts.get("not_finite"):
        where = f"{_whose(broken)} at {broken['site']}"
        yield (
            f"{broken['states']:,} states{_of(facts)} are not finite and were left out;"
            f" the first is {where}."
        )


def sections(result: Result) -> Iterator[Section]:
    """The profile as parts of a page."""
    shown, stacks = tuple(views(result)), result.facts["stacks"]
    grids = [view for view in shown if isinstance(view, Grid)]
    lines = [view for view in shown if isinstance(view, Lines)]
    texts = result.data.attrs.get("texts", [])
    text = quoted(texts[0]) if len(texts) == 1 else f"{result.facts['texts']} texts"
    norms = [
        sentence
        for facts in stacks
        for part in (_norms, _final_norm, _largest_norm)
        for sentence in part(facts)
    ]
    cell = f"one hidden state of {text}: tokens"
    if _pooled(result):
        cell = (
            "the vector of a text, or of one window of it (pooling:"
            f" {result.facts['pooled']}): texts"
        )
    reading = (
        f"Every cell is {cell} run across, layers run up. The colour is at first the L2"
        " norm of the vector, on a log scale."
    )
    yield Section(
        "How large is every state?",
        as_prose([*norms, UNTESTED]),
        tuple(grids[:1]),
        reading,
    )
    lessons = " ".join(sentence for facts in stacks for sentence in _lessons(facts))
    yield Section(
        "The same along the layers",
        lessons,
        tuple(lines[:1]),
        _along(lines[:1]),
        folded=True,
    )
    if lines[1:]:
        apart = len(set(result.data["form"].to_numpy().tolist())) > 1
        parts = [
            sentence
            for facts in stacks
            for part in (_added, _massive, _spread)
            for sentence in part(facts)
        ]
        shown_here = [
            words
            for name, words in PICTURED.items()
            if any(name in line.title for line in lines[1:])
        ]
        how = (
            f"From the first to the last, the pictures show {in_series(shown_here)}."
            f" {APART if apart else ''}".strip()
        )
        yield Section(
            "What blocks add, and how states spread",
            " ".join(parts),
            tuple(lines[1:]),
            how,
            folded=True,
        )
    if grids[1:]:
        alike = as_prose(sentence for facts in stacks for sentence in _cka(facts))
        yield Section(
            "How similar the layers are",
            alike,
            tuple(grids[1:]),
            CKA.format(rows=_rows(result)),
            folded=True,
        )


WHOSE_NORM = {
    "first_token_norm": "the first token",
    "other_tokens_norm": "the other tokens",
    "vector_norm": "the vectors",
}
ALONG = {
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
PICTURED = {
    "What each block adds": (
        "the norm of what each block adds over the norm of its input"
    ),
    "kurtosis": "the kurtosis of the states",
    "anisotropy": "their anisotropy",
    "How many dimensions": "how many dimensions they fill",
}
APART = "`final` is normed and the layers are not, so the two are not compared."
CKA = "A cell compares the states of two layers over all {rows} by linear CKA."


def _along(lines: Sequence[Lines]) -> str:
    """Say what each line of norms is, of those that are drawn."""
    names = [series.name for line in lines for series in line.series]
    drawn = [
        words
        for name, words in ALONG.items()
        if any(shown.endswith(name) for shown in names)
    ]
    return (
        f"The lines are {in_series(drawn)}."
        if len(names) > 1
        else f"The line is {in_series(drawn)}."
    )


def _lessons(facts: Mapping[str, Any]) -> Iterator[str]:
    """What follows from the norms, where it does."""
    if facts.get("norm_ratio", 0) >= 10:
        yield (
            "A first token of this size hides all others: it dominates a mean over"
            " tokens, and a distance between two texts."
        )
    before, after = facts.get("before_final", {}), facts.get("at_final", {})
    if "first_token_norm" in after and "other_tokens_norm" in after:
        larger = before["first_token_norm"] > 2 * before["other_tokens_norm"]
        if (
            larger
            and 1 / 2 < after["first_token_norm"] / after["other_tokens_norm"] < 2
        ):
            yield (
                "At `final`, after the final norm, the first token and the others have"
                " about the same norm."
            )
