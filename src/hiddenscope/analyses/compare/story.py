"""The story of a comparison: where two texts or two models differ."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from hiddenscope.results import Aside, Report, Result, Section, frozen
from hiddenscope.results.drawing import grid_of, labels, pair_grid, tokens_with_gaps
from hiddenscope.results.pictures import Grid, Lines, Series
from hiddenscope.results.sentences import (
    UNTESTED,
    counted,
    model_name,
    number,
    quote,
    quoted_token,
    side_names,
)

MEASURES = ("l2", "relative", "cosine", "mean", "deviation", "along")
# A title quotes two texts of at most this many characters together.
LONGEST_TITLE_TEXTS = 66
RUNS = {"two_copies": "alone and in two copies", "two_runs": "twice"}


@frozen
class FirstDifference:
    """The first token that differs, as each side has it; None is a gap."""

    token: list[str | None]
    text: int
    position: list[int]
    site: str | None


@frozen
class LargestDifference:
    """The largest relative difference, and the token of both sides that has it."""

    relative: float
    site: str
    token: list[str | None]


@frozen
class Median:
    """The median difference at a site."""

    site: str
    median: float


@frozen
class End:
    """The median difference around the final norm."""

    before_last: Median
    last: Median
    final: Median
    share_of_drop_by_final_norm: float | None = None


@frozen
class CompareStack:
    """Where the two sides of one stack differ."""

    stack: str | None
    first_difference: FirstDifference | None
    tokens_compared: int
    tokens_equal: int
    sites_of_one_side: str | None = None
    largest_relative: LargestDifference | None = None
    # Its keys are "from", which no field can be called, and "to".
    largest_jump: dict[str, Median] | None = None
    end: End | None = None


@frozen
class AlikeSites:
    """The CKA of two sites."""

    site: str
    source_site: str
    cka: float


@frozen
class Similarity:
    """The CKA of every pair of sites; only counts where it is not defined."""

    tokens: int
    sampled_tokens: int
    median: float | None = None
    median_by_chance: float | None = None
    most_alike: AlikeSites | None = None
    few_tokens: bool | None = None


@frozen
class RoundingFloor:
    """How far rounding alone moves the first text."""

    relative: float
    between: Literal["two_copies", "two_runs"]


@frozen
class CompareReport(Report):
    """Where two texts or two models differ."""

    texts: int
    tokens_compared: int
    gaps: int
    run: Literal["together", "apart", "two_models", "states"]
    computed_in: str
    rounding_floor: RoundingFloor | None = None
    stacks: list[CompareStack]
    notes: list[str]
    cka: Similarity | None = None


def story(report: CompareReport, result: Result) -> Iterator[Section]:
    """Yield where the sides differ, the difference along the layers, and how similar
    every pair of sites is.
    """
    two_models = "other" in result.source
    untested = []
    if report.cka or any(stack.largest_relative for stack in report.stacks):
        untested.append(UNTESTED)
    remarks = [*report.notes, *untested]
    floor = report.rounding_floor
    if floor:
        remarks.insert(
            0,
            f"Rounding alone makes the first text, run {RUNS[floor.between]}, differ"
            f" from itself by {floor.relative:.2g} of its norm.",
        )
    closing = list(map(Aside, remarks))
    subject = "The two models" if two_models else "The texts of the two sides"
    if report.texts == 1 and not two_models:
        subject = "The two texts"
    first = []
    along: list[str] = []
    for stack in report.stacks:
        first += [*_first(stack, subject), *_growth(stack)]
        along += _end(stack, result)
    for stack in report.stacks:
        if stack.sites_of_one_side:
            along.append(Aside(f"Only one of the two has {stack.sites_of_one_side}."))
    if report.gaps:
        along.append(
            Aside(
                f"{counted(report.tokens_compared, 'token')} could be compared;"
                f" {report.gaps:,} without a counterpart could not."
            )
        )
    if report.cka is None:
        along += closing
    if report.stacks:
        lines = tuple(_along_layers(result))
        yield Section(
            f"Where do two {'models' if two_models else 'texts'} differ?",
            (*first, *untested) if lines else (*first, *untested, *along),
            (_grid(report, result),),
            f"A cell compares the hidden states of {_compared(result)} at one token and"
            " layer. The colour is at first the L2 norm of the difference, on a log"
            " scale; a dot marks an exact 0.",
        )
        if lines:
            yield Section(
                "The difference along the layers",
                tuple(along),
                lines,
                "The lines are the median and the largest L2 norm of the difference,"
                " over the tokens that differ. States grow along the layers, so the"
                " second picture divides the difference by the mean norm of the two"
                " states.",
                folded=True,
            )
    if report.cka:
        rows, columns = side_names(result.source)
        grid = pair_grid(
            result.data,
            ("cka", "cka_chance"),
            f"How similar every pair of sites is: {_title(report, result)}",
            f"Columns are sites of {columns}, rows are sites of {rows}.",
        )
        yield Section(
            "How similar is every pair of sites?",
            (*_cka(report.cka), *untested, *closing),
            (grid,),
            "A cell compares the states of two sites over all tokens by linear CKA.",
        )


def _grid(report: CompareReport, result: Result) -> Grid:
    """Return two rows of tokens around the differences."""
    measures = [name for name in MEASURES if name in result.data]
    grid = grid_of(result, measures, _title(report, result))
    assert grid is not None, "every comparison of states has measures"
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


def _row_names(result: Result) -> tuple[str, str]:
    """Name the two rows of tokens: by the models where there are two, else by the order
    of the texts.
    """
    return (
        side_names(result.source) if "other" in result.source else ("first", "second")
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


def _title(report: CompareReport, result: Result) -> str:
    """Name the two sides: two models, two texts, or many."""
    if "other" in result.source:
        return " against ".join(side_names(result.source))
    texts = result.data.attrs.get("texts", [])
    other_texts = result.data.attrs.get("other_texts", [])
    is_one_pair = len(texts) == len(other_texts) == 1 and texts != other_texts
    if is_one_pair and len(texts[0] + other_texts[0]) <= LONGEST_TITLE_TEXTS:
        return f"“{texts[0]}” against “{other_texts[0]}”"
    sides = "two texts" if report.texts == 1 else "pairs of texts"
    return f"The difference between {sides} in {result.source.get('model', 'one')}"


def _compared(result: Result) -> str:
    """Name the two sides, texts with the names of their rows."""
    first, second = _row_names(result)
    if "other" in result.source:
        return f"{first} and {second}"
    texts = result.data.attrs.get("texts", [])
    other_texts = result.data.attrs.get("other_texts", [])
    if len(texts) != 1 or len(other_texts) != 1:
        return "pairs of texts"
    return f"{quote(texts[0])} ({first}) and {quote(other_texts[0])} ({second})"


def _token(string: str | None) -> str:
    return "a gap" if string is None else quoted_token(string)


def _first(stack: CompareStack, subject: str) -> Iterator[str]:
    """Yield where the two sides first differ, and how many tokens do not."""
    first, of = stack.first_difference, ""
    if stack.stack:
        of = f" in the {stack.stack}"
    if first is None:
        yield f"{subject} have equal states everywhere{of}."
        return
    here, there = map(_token, first.token)
    tokens = here if here == there else f"{here} against {there}"
    text = f" of text {first.text}" if first.text else ""
    site = f", from {first.site} on" if first.site else ""
    yield (
        f"{subject} first differ{of} at token {max(first.position)}{text}, counted"
        f" from 0 ({tokens}){site}."
    )
    if stack.tokens_compared:
        yield (
            f"At {stack.tokens_equal:,} of {counted(stack.tokens_compared, 'token')}"
            " the states are exactly equal at every site."
        )


def _growth(stack: CompareStack) -> Iterator[str]:
    largest = stack.largest_relative
    if largest:
        here, there = map(_token, largest.token)
        tokens = f"of {here}" if here == there else f"between {here} and {there}"
        yield (
            f"The largest relative difference is {number(largest.relative)}, {tokens}"
            f" at {largest.site}."
        )
    if stack.largest_jump:
        low, high = stack.largest_jump["from"], stack.largest_jump["to"]
        yield (
            f"The median difference grows most from `{low.site}` to `{high.site}`: from"
            f" {number(low.median)} to {number(high.median)}."
        )


def _end(stack: CompareStack, result: Result) -> Iterator[str]:
    """Yield what the final norm does to a difference, which in `hidden_states` looks
    like the last block's doing where the raw last layer is missing there.
    """
    if stack.end is None:
        return
    before, last, final = stack.end.before_last, stack.end.last, stack.end.final
    yield (
        f"At the end, the median difference is {number(before.median)} at"
        f" `{before.site}`, {number(last.median)} at `{last.site}` and"
        f" {number(final.median)} at `{final.site}`, after the final norm."
    )
    # By default the last entry of `hidden_states` is after the final norm.
    raw = f"layer.{result.source.get('depth')}"
    has_raw = any(name.endswith(raw) for name in result.source.get("reported", ()))
    if last.median > before.median > final.median and not has_raw:
        yield (
            "Hugging Face's `hidden_states` holds only the first and the third of"
            " these, so that the last block seems to bring the states together. In fact"
            " it moves them farther apart, and the final norm causes the drop."
        )


def _cka(cka: Similarity) -> Iterator[str]:
    tokens = f"{cka.sampled_tokens:,} tokens"
    best = cka.most_alike
    if best is None:
        yield (
            f"Linear CKA over {tokens} is not defined, because all states of a site are"
            " equal."
        )
        return
    yield (
        f"By linear CKA over {tokens}, `{best.site}` and `{best.source_site}` are"
        f" most alike ({best.cka:.2f})."
    )
    yield (
        f"The median CKA of all pairs of sites is {cka.median:.2f}; with tokens"
        f" paired at random it would be {cka.median_by_chance:.2f}."
    )
    if cka.few_tokens:
        yield (
            "With so few tokens, states that have nothing to do with each other look"
            " alike: give more text."
        )
