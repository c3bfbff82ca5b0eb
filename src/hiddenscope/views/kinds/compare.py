"""The difference of two texts or two models, as views and sentences."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import (
    UNTESTED,
    as_prose,
    grid_of,
    labels,
    quoted,
    side_names,
)
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

if TYPE_CHECKING:
    import xarray

GAP = "a gap"
FEW_TOKENS = (
    "With so few tokens, states that have nothing to do with each other look alike:"
    " give more text."
)
ALONG = (
    "The lines are the median and the largest L2 norm of the difference, over the"
    " tokens that differ. States grow along the layers, so the second picture divides"
    " the difference by the mean norm of the two states."
)
MATRIX = "A cell compares the states of two sites over all tokens by linear CKA."


def views(result: Result) -> Iterator[View]:
    """Two rows of tokens around the differences; along the layers; every pair of sites
    where there are two models.
    """
    title = _title(result)
    if "l2" in result.data:
        grid = grid_of(result, ["l2", "relative", "cosine", "mean", "deviation"], title)
        if grid is not None:
            yield _with_both_rows(
                grid,
                result.data.isel(token=slice(len(grid.tokens))),
                _row_names(result),
            )
        yield from _along_layers(result)
    if "cka" in result.data:
        measures = tuple(
            Measure(
                str(result.data[name].attrs["long_name"]),
                result.data[name].to_numpy(),
                limits=(0, 1),
            )
            for name in ("cka", "cka_chance")
        )
        note = (
            f"Columns are sites of {side_names(result.source)[-1]}, rows are sites of"
            f" {side_names(result.source)[0]}."
        )
        sites, across = labels(result.data, "site"), labels(result.data, "source_site")
        heading = f"How similar every pair of sites is: {title}"
        yield Grid(heading, sites, across, measures, note=note, x_name="site")


def _row_names(result: Result) -> tuple[str, ...]:
    """Name the two rows of tokens: by the models where there are two, else by the order
    of the texts.
    """
    return (
        side_names(result.source) if "other" in result.source else ("first", "second")
    )


def _with_both_rows(grid: Grid, data: "xarray.Dataset", names: tuple[str, ...]) -> Grid:
    """The grid with the tokens of both sides, and a name for each of these rows."""
    tokens, second = (_with_gaps(data, prefix) for prefix in ("", "other_"))
    equal = int((data["l2"].to_numpy() == 0).all(0).sum())
    same = (
        f"{equal} of {len(tokens)} tokens have exactly equal states at every site."
        if equal
        else ""
    )
    gaps = (
        "Hatched: a token that only one side has." if None in (*tokens, *second) else ""
    )
    note = " ".join(filter(None, [grid.note, same, gaps]))
    return replace(grid, tokens=tokens, second=second, token_rows=names, note=note)


def _with_gaps(data: "xarray.Dataset", prefix: str) -> tuple[str | None, ...]:
    columns = (
        data[f"{prefix}{name}"].to_numpy().tolist() for name in ("string", "position")
    )
    return tuple(
        None if position < 0 else string
        for string, position in zip(*columns, strict=True)
    )


def _along_layers(result: Result) -> Iterator[Lines]:
    sites = labels(result.data, "site")
    for measure, words, unit in (
        ("l2", "difference", "L2"),
        ("relative", "relative difference", ""),
    ):
        columns = {
            name: result.data[f"{measure}_{name}"].to_numpy()
            for name in ("median", "largest")
        }
        series = tuple(
            Series(f"{name} of the tokens that differ", y)
            for name, y in columns.items()
        )
        scale = result.data[measure].attrs.get("scale", "linear")
        if any(np.isfinite(one.y).any() for one in series):
            title = (
                f"The {words} along the layers of"
                f" {result.source.get('model', 'the model')}"
            )
            yield Lines(title, sites, series, y_name=words, unit=unit, scale=scale)


def _title(result: Result) -> str:
    """The two sides: two models, two texts, or many."""
    model, attrs = result.source.get("model", "one"), result.data.attrs
    if "other" in result.source:
        return " against ".join(side_names(result.source))
    texts = [attrs.get(name, []) for name in ("texts", "other_texts")]
    if (
        all(len(side) == 1 for side in texts)
        and len(texts[0][0] + texts[1][0]) <= 66
        and texts[0] != texts[1]
    ):
        return f"“{texts[0][0]}” against “{texts[1][0]}”"
    return (
        "The difference between"
        f" {'two texts' if result.facts.get('texts', 1) == 1 else 'pairs of texts'} in"
        f" {model}"
    )


def findings(result: Result) -> Iterator[str]:
    """Where the two sides differ, where the difference grows, and what the final norm
    does to it.
    """
    for facts in result.facts["stacks"]:
        yield from _first(facts, _sides(result))
        yield from _growth(facts)
        yield from _end(facts)
        if "sites_of_one_side" in facts:
            yield f"Only one of the two has {facts['sites_of_one_side']}."
    if result.facts["gaps"]:
        gaps, compared = result.facts["gaps"], result.facts["tokens_compared"]
        yield f"{compared:,} tokens were compared; {gaps:,} have no counterpart."
    if "cka" in result.facts:
        yield from _cka(result.facts["cka"])
    if floor := result.facts.get("rounding_floor"):
        between = {"two_copies": "alone and in two copies", "two_runs": "twice"}[
            floor["between"]
        ]
        yield (
            f"Rounding alone makes the first text, run {between}, differ from itself by"
            f" {floor['relative']:.2g} of its norm."
        )
    yield from result.facts["notes"]
    yield from _untested(result)


def _untested(result: Result) -> Iterator[str]:
    """What must be said where sites are compared."""
    if "cka" in result.facts or any(
        "largest_relative" in facts for facts in result.facts["stacks"]
    ):
        yield UNTESTED


def _of(facts: Mapping[str, Any]) -> str:
    return f" in the {facts['stack']}" if facts["stack"] else ""


def _token(string: str | None) -> str:
    return GAP if string is None else quoted(string.strip() or string)


def _sides(result: Result) -> str:
    """What is compared, as the subject of a sentence."""
    if "other" in result.source:
        return "The two models"
    return (
        "The two texts"
        if result.facts.get("texts", 1) == 1
        else "The texts of the two sides"
    )


def _first(facts: Mapping[str, Any], sides: str) -> Iterator[str]:
    """Where the two sides first differ, and how many tokens do not."""
    first = facts["first_difference"]
    if first is None:
        yield f"{sides} have equal states everywhere{_of(facts)}."
        return
    here, there = map(_token, first["token"])
    text = f" of text {first['text']}" if first["text"] else ""
    site = f", from {first['site']} on" if first["site"] else ""
    tokens = here if here == there else f"{here} against {there}"
    yield (
        f"{sides} first differ{_of(facts)} at token {max(first['position'])}{text},"
        f" counted from 0 ({tokens}){site}."
    )
    equal, compared = facts["tokens_equal"], facts["tokens_compared"]
    if compared:
        yield (
            f"{equal:,} of {compared:,} tokens have exactly equal states at every site."
        )


def _growth(facts: Mapping[str, Any]) -> Iterator[str]:
    if largest := facts.get("largest_relative"):
        here, there = map(_token, largest["token"])
        where = (
            f"of {here} at {largest['site']}"
            if here == there
            else f"between {here} and {there} at {largest['site']}"
        )
        yield f"The largest relative difference is {largest['relative']:.3g}, {where}."
    if jump := facts.get("largest_jump"):
        low, high = jump["from"], jump["to"]
        yield (
            f"The median difference grows most from `{low['site']}` to"
            f" `{high['site']}`: from {low['median']:.3g} to {high['median']:.3g}."
        )


def _end(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the final norm does to a difference, which in `hidden_states` looks like the
    last block's doing.
    """
    if "end" not in facts:
        return
    before, last, final = (
        facts["end"][name] for name in ("before_last", "last", "final")
    )
    yield (
        f"At the end, the median difference is {before['median']:.3g} at"
        f" `{before['site']}`, {last['median']:.3g} at `{last['site']}` and"
        f" {final['median']:.3g} at `{final['site']}`, after the final norm."
    )
    if last["median"] > before["median"] > final["median"]:
        yield (
            "Hugging Face's `hidden_states` holds only the first and the third of"
            " these, so that the last block seems to bring the states together. In fact"
            " it moves them farther apart, and the final norm causes the drop."
        )


def _cka(facts: Mapping[str, Any]) -> Iterator[str]:
    tokens = f"{facts['sampled_tokens']:,} tokens"
    if "most_alike" not in facts:
        yield (
            f"Linear CKA over {tokens} is not defined, because all states of a site are"
            " equal."
        )
        return
    best = facts["most_alike"]
    pair = f"`{best['site']}` and `{best['source_site']}`"
    yield f"By linear CKA over {tokens}, {pair} are most alike ({best['cka']:.2f})."
    yield (
        f"The median CKA of all pairs of sites is {facts['median']:.2f}; with tokens"
        f" paired at random it would be {facts['median_by_chance']:.2f}."
    )
    if facts["few_tokens"]:
        yield FEW_TOKENS


def sections(result: Result) -> Iterator[Section]:
    """The comparison as parts of a page."""
    shown, stacks = tuple(views(result)), result.facts["stacks"]
    texts = [result.data.attrs.get(name, []) for name in ("texts", "other_texts")]
    two_models = "other" in result.source
    if two_models:
        sides = " and ".join(side_names(result.source))
    elif [*map(len, texts)] == [1, 1]:
        named = zip((side[0] for side in texts), _row_names(result), strict=True)
        sides = " and ".join(f"{quoted(text)} ({name})" for text, name in named)
    else:
        sides = "pairs of texts"
    heading = (
        "Where do two models differ?" if two_models else "Where do two texts differ?"
    )
    maps = [view for view in shown if isinstance(view, Grid)]
    lines = tuple(view for view in shown if isinstance(view, Lines))
    if stacks:
        reading = (
            f"A cell compares the hidden states of {sides} at one token and layer. The"
            " colour is at first the L2 norm of the difference, on a log scale; a dot"
            " marks an exact 0."
        )
        subject = _sides(result)
        parts = [
            sentence
            for facts in stacks
            for sentence in (*_first(facts, subject), *_growth(facts))
        ]
        yield Section(
            heading, as_prose([*parts, *_untested(result)]), (maps.pop(0),), reading
        )
    if lines:
        end = " ".join(sentence for facts in stacks for sentence in _end(facts))
        yield Section("The difference along the layers", end, lines, ALONG, folded=True)
    if maps:
        alike = as_prose([*_cka(result.facts["cka"]), *_untested(result)])
        yield Section("How similar is every pair of sites?", alike, tuple(maps), MATRIX)
