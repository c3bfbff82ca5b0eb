"""Comparisons: where two texts or two models differ."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from hiddenscope.results import Result, Section
from hiddenscope.results.drawing import (
    grid_of,
    labels,
    long_name,
    of_type,
    tokens_with_gaps,
)
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, View
from hiddenscope.results.sentences import (
    UNTESTED,
    as_prose,
    counted,
    model_name,
    number,
    quote,
    quoted_token,
    side_names,
)

if TYPE_CHECKING:
    from hiddenscope.analyses.compare.facts import (
        CkaFacts,
        CompareFacts,
        CompareStackFacts,
    )

MEASURES = ("l2", "relative", "cosine", "mean", "deviation")
# A title quotes two texts of at most so many characters together.
LONGEST_TITLE_TEXTS = 66


def views(result: Result) -> Iterator[View]:
    """Yield two rows of tokens around the differences; the difference along the layers;
    every pair of sites where there are two models.
    """
    if "l2" in result.data:
        grid = grid_of(result, MEASURES, _title(result))
        if grid is not None:
            yield _with_both_rows(result, grid)
        yield from _along_layers(result)
    if "cka" in result.data:
        yield _cka_grid(result)


def _is_of_two_models(result: Result) -> bool:
    return "other" in result.source


def _row_names(result: Result) -> tuple[str, str]:
    """Name the two rows of tokens: by the models where there are two, else by the order
    of the texts.
    """
    if _is_of_two_models(result):
        return side_names(result.source)
    return "first", "second"


def _with_both_rows(result: Result, grid: Grid) -> Grid:
    data = result.data.isel(token=slice(len(grid.tokens)))
    tokens = tokens_with_gaps(data, "")
    second = tokens_with_gaps(data, "other_")
    notes = [grid.note] if grid.note else []
    equal = int((data["l2"].to_numpy() == 0).all(0).sum())
    if equal:
        notes.append(
            f"At {equal:,} of {counted(len(tokens), 'token')} the states are exactly"
            " equal at every site."
        )
    if None in tokens or None in second:
        notes.append("Hatched: a token that only one side has.")
    return replace(
        grid,
        tokens=tokens,
        second=second,
        token_rows=_row_names(result),
        note=" ".join(notes),
    )


def _along_layers(result: Result) -> Iterator[Lines]:
    data = result.data
    for measure, words, unit in (
        ("l2", "difference", "L2"),
        ("relative", "relative difference", ""),
    ):
        median = data[f"{measure}_median"].to_numpy()
        largest = data[f"{measure}_largest"].to_numpy()
        if not np.isfinite(median).any() and not np.isfinite(largest).any():
            continue
        yield Lines(
            f"The {words} along the layers of {model_name(result)}",
            labels(data, "site"),
            (
                Series("median of the tokens that differ", median),
                Series("largest of the tokens that differ", largest),
            ),
            y_name=words,
            unit=unit,
            scale=data[measure].attrs.get("scale", "linear"),
        )


def _cka_grid(result: Result) -> Grid:
    variables = [result.data[name] for name in ("cka", "cka_chance")]
    first, second = side_names(result.source)
    return Grid(
        f"How similar every pair of sites is: {_title(result)}",
        labels(result.data, "site"),
        labels(result.data, "source_site"),
        tuple(Measure(long_name(v), v.to_numpy(), limits=(0, 1)) for v in variables),
        note=f"Columns are sites of {second}, rows are sites of {first}.",
        x_name="site",
    )


def _title(result: Result) -> str:
    """Name the two sides: two models, two texts, or many."""
    if _is_of_two_models(result):
        return " against ".join(side_names(result.source))
    texts = result.data.attrs.get("texts", [])
    other_texts = result.data.attrs.get("other_texts", [])
    is_one_pair = len(texts) == len(other_texts) == 1 and texts != other_texts
    if is_one_pair and len(texts[0] + other_texts[0]) <= LONGEST_TITLE_TEXTS:
        return f"“{texts[0]}” against “{other_texts[0]}”"
    sides = "two texts" if result.facts.get("texts", 1) == 1 else "pairs of texts"
    return f"The difference between {sides} in {result.source.get('model', 'one')}"


def findings(result: Result) -> Iterator[str]:
    """Yield where the two sides differ, where the difference grows, and what the final
    norm does to it.
    """
    facts = cast("CompareFacts", result.facts)
    for stack in facts["stacks"]:
        yield from _first(stack, _sides(result))
        yield from _growth(stack)
        yield from _end(stack)
        if "sites_of_one_side" in stack:
            yield f"Only one of the two has {stack['sites_of_one_side']}."
    if facts["gaps"]:
        yield (
            f"{counted(facts['tokens_compared'], 'token')} could be compared;"
            f" {facts['gaps']:,} without a counterpart could not."
        )
    if "cka" in facts:
        yield from _cka(facts["cka"])
    floor = facts.get("rounding_floor")
    if floor:
        runs = {"two_copies": "alone and in two copies", "two_runs": "twice"}
        yield (
            f"Rounding alone makes the first text, run {runs[floor['between']]}, differ"
            f" from itself by {floor['relative']:.2g} of its norm."
        )
    yield from facts["notes"]
    yield from _untested(facts)


def sections(result: Result) -> Iterator[Section]:
    """Yield where the sides differ, the difference along the layers, and how similar
    every pair of sites is.
    """
    facts, shown = cast("CompareFacts", result.facts), tuple(views(result))
    stacks = facts["stacks"]
    maps, lines = list(of_type(shown, Grid)), of_type(shown, Lines)
    if stacks:
        sentences: list[str] = []
        for stack in stacks:
            sentences += _first(stack, _sides(result))
            sentences += _growth(stack)
        compared = "models" if _is_of_two_models(result) else "texts"
        yield Section(
            f"Where do two {compared} differ?",
            as_prose([*sentences, *_untested(facts)]),
            (maps.pop(0),),
            f"A cell compares the hidden states of {_compared(result)} at one token and"
            " layer. The colour is at first the L2 norm of the difference, on a log"
            " scale; a dot marks an exact 0.",
        )
    if lines:
        ends: list[str] = []
        for stack in stacks:
            ends += _end(stack)
        yield Section(
            "The difference along the layers",
            " ".join(ends),
            lines,
            "The lines are the median and the largest L2 norm of the difference, over"
            " the tokens that differ. States grow along the layers, so the second"
            " picture divides the difference by the mean norm of the two states.",
            folded=True,
        )
    if maps:
        yield Section(
            "How similar is every pair of sites?",
            as_prose([*_cka(facts["cka"]), *_untested(facts)]),
            tuple(maps),
            "A cell compares the states of two sites over all tokens by linear CKA.",
        )


def _untested(facts: "CompareFacts") -> Iterator[str]:
    """Yield what must be said where sites are compared."""
    if "cka" in facts or any("largest_relative" in s for s in facts["stacks"]):
        yield UNTESTED


def _of(stack: "CompareStackFacts") -> str:
    return f" in the {stack['stack']}" if stack["stack"] else ""


def _token(string: str | None) -> str:
    return "a gap" if string is None else quoted_token(string)


def _sides(result: Result) -> str:
    """Name what is compared, as the subject of a sentence."""
    if _is_of_two_models(result):
        return "The two models"
    if result.facts.get("texts", 1) == 1:
        return "The two texts"
    return "The texts of the two sides"


def _compared(result: Result) -> str:
    """Name the two sides, texts with the names of their rows."""
    if _is_of_two_models(result):
        return " and ".join(side_names(result.source))
    texts = result.data.attrs.get("texts", [])
    other_texts = result.data.attrs.get("other_texts", [])
    if len(texts) != 1 or len(other_texts) != 1:
        return "pairs of texts"
    first, second = _row_names(result)
    return f"{quote(texts[0])} ({first}) and {quote(other_texts[0])} ({second})"


def _first(stack: "CompareStackFacts", sides: str) -> Iterator[str]:
    """Yield where the two sides first differ, and how many tokens do not."""
    first = stack["first_difference"]
    if first is None:
        yield f"{sides} have equal states everywhere{_of(stack)}."
        return
    here, there = map(_token, first["token"])
    tokens = here if here == there else f"{here} against {there}"
    text = f" of text {first['text']}" if first["text"] else ""
    site = f", from {first['site']} on" if first["site"] else ""
    yield (
        f"{sides} first differ{_of(stack)} at token {max(first['position'])}{text},"
        f" counted from 0 ({tokens}){site}."
    )
    equal, compared = stack["tokens_equal"], stack["tokens_compared"]
    if compared:
        yield (
            f"At {equal:,} of {counted(compared, 'token')} the states are exactly equal"
            " at every site."
        )


def _growth(stack: "CompareStackFacts") -> Iterator[str]:
    largest = stack.get("largest_relative")
    if largest:
        here, there = map(_token, largest["token"])
        tokens = f"of {here}" if here == there else f"between {here} and {there}"
        yield (
            f"The largest relative difference is {number(largest['relative'])},"
            f" {tokens} at {largest['site']}."
        )
    jump = stack.get("largest_jump")
    if jump:
        low, high = jump["from"], jump["to"]
        yield (
            "The median difference grows most from"
            f" `{low['site']}` to `{high['site']}`:"
            f" from {number(low['median'])} to {number(high['median'])}."
        )


def _end(stack: "CompareStackFacts") -> Iterator[str]:
    """Yield what the final norm does to a difference, which in `hidden_states` looks
    like the last block's doing.
    """
    end = stack.get("end")
    if not end:
        return
    before, last, final = end["before_last"], end["last"], end["final"]
    yield (
        f"At the end, the median difference is {number(before['median'])} at"
        f" `{before['site']}`, {number(last['median'])} at `{last['site']}` and"
        f" {number(final['median'])} at `{final['site']}`, after the final norm."
    )
    # The last entry of `hidden_states` is after the final norm, so that the raw last
    # layer is missing there.
    if last["median"] > before["median"] > final["median"]:
        yield (
            "Hugging Face's `hidden_states` holds only the first and the third of"
            " these, so that the last block seems to bring the states together. In fact"
            " it moves them farther apart, and the final norm causes the drop."
        )


def _cka(cka: "CkaFacts") -> Iterator[str]:
    tokens = f"{cka['sampled_tokens']:,} tokens"
    best = cka.get("most_alike")
    if best is None:
        yield (
            f"Linear CKA over {tokens} is not defined, because all states of a site are"
            " equal."
        )
        return
    yield (
        f"By linear CKA over {tokens}, `{best['site']}` and `{best['source_site']}` are"
        f" most alike ({best['cka']:.2f})."
    )
    yield (
        f"The median CKA of all pairs of sites is {cka['median']:.2f}; with tokens"
        f" paired at random it would be {cka['median_by_chance']:.2f}."
    )
    if cka["few_tokens"]:
        yield (
            "With so few tokens, states that have nothing to do with each other look"
            " alike: give more text."
        )
