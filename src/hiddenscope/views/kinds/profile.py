"""The laminar profile, shown and told."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import grid_of, labels, quoted, title_of
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

ANISOTROPY = {"anisotropy": "all tokens", "anisotropy_others": "without first tokens"}
SPREAD = {
    "effective_rank": "effective rank",
    "effective_rank_others": "effective rank, without first tokens",
    "intrinsic_dimension_others": "intrinsic dimension, without first tokens",
}


def views(result: Result) -> Iterator[View]:
    """The grid of norms, their course along the layers, then what blocks add, how states spread, how alike layers are.

    What says little over few tokens is left out there: the facts say that they are few.
    """
    each = [name for name in ("norm", "kurtosis", "mean", "deviation") if name in result.data]
    grid = grid_of(result, each, title_of(result, ["norm"]).replace("Norm", "The norm of every state", 1))
    if grid is not None:
        yield grid
    yield from _norm_lines(result)
    few = "few tokens" in result.facts or all("few tokens" in result.facts.get(name, {}) for name in _stacks(result))
    both = {"first": "first token", "median": "other tokens, median"}
    added, kurtosis = ({f"{name}_{side}": said for side, said in both.items()} for name in ("added", "kurtosis"))
    yield from _lines(result, added, "What each block adds along the layers", "change over what it was given")
    yield from _lines(result, kurtosis, "The kurtosis along the layers", "kurtosis over the width", _massive(result))
    yield from _lines(result, ANISOTROPY, "Anisotropy along the layers", "mean cosine")
    if not few:
        yield from _lines(result, SPREAD, "In how many directions states spread, along the layers", "directions")
    if "cka" in result.data and result.data.sizes["site"] > 1 and not few:
        yield _cka(result)


def _norm_lines(result: Result) -> Iterator[Lines]:
    series = []
    for prefix, here in _by_stack(result):
        first, median, low, high = (
            np.where(here, result.data[f"norm_{name}"].to_numpy(), np.nan)
            for name in ("first", "median", "low", "high")
        )
        series += [
            Series(f"{prefix}first token", first),
            Series(f"{prefix}other tokens, median", median, low, high, "middle half"),
        ]
    shown = [one for one in series if np.isfinite(one.y).any()]
    if shown:
        title = title_of(result, ["norm"]).replace("Norm", "The norm along the layers", 1)
        yield Lines(title, labels(result.data, "site"), tuple(shown), y_name="norm", unit="L2", scale="log")


def _lines(result: Result, named: dict[str, str], title: str, y_name: str, note: str = "") -> Iterator[Lines]:
    """Some variables along the layers, by what each is called; where there is none of them, no picture."""
    known = {name: said for name, said in named.items() if name in result.data}
    series = [
        Series(f"{prefix}{said}", np.where(here, result.data[name].to_numpy(), np.nan))
        for name, said in known.items()
        for prefix, here in _by_stack(result)
    ]
    shown = tuple(one for one in series if np.isfinite(one.y).any())
    if shown:
        model, scale = result.source.get("model"), result.data[next(iter(known))].attrs.get("scale", "linear")
        title = f"{title} of {model}" if isinstance(model, str) else title
        yield Lines(title, labels(result.data, "site"), shown, y_name=y_name, scale=scale, note=note)


def _by_stack(result: Result) -> Iterator[tuple[str, Any]]:
    """Which sites belong to each stack."""
    stacks = [site.rpartition("layer.")[0] or site.rpartition("final")[0] for site in labels(result.data, "site")]
    for stack in dict.fromkeys(stacks):
        yield stack.replace(".", " "), np.array([one == stack for one in stacks])


def _massive(result: Result) -> str:
    return " ".join(sentence for facts in _facts(result) for sentence in _largest(facts))


def _cka(result: Result) -> Grid:
    """Every pair of layers, that stand on one footing."""
    names = [name for name in ("cka_others", "cka", "cka_chance") if name in result.data]
    kept = np.flatnonzero(np.isfinite(result.data[names[0]].to_numpy()).any(1))
    data = result.data.isel(site=kept, source_site=kept)
    measures = tuple(
        Measure(str(data[name].attrs["long_name"]), data[name].to_numpy(), limits=(0, 1)) for name in names
    )
    model = result.source.get("model", "the model")
    note = "Layers run up and across; 1 where two hold the same up to a rotation and a scale."
    sites = labels(data, "site")
    return Grid(
        f"How alike every pair of layers of {model} is", sites, labels(data, "source_site"), measures, note=note
    )


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    shown = tuple(views(result))
    grids, lines = ([view for view in shown if isinstance(view, kind)] for kind in (Grid, Lines))
    texts = result.data.attrs.get("texts", [])
    text = quoted(texts[0]) if len(texts) == 1 else f"{result.facts['texts']} texts"
    yield Section(
        "The size of every state",
        f"These are all the states of {text}: tokens run across, layers run up, and the colour is the norm of the "
        "vector, on a log scale. Point at a cell, or use the arrow keys, to read it out.\n\n" + _norms_seen(result),
        tuple(grids[:1]),
    )
    yield Section(
        "The same along the layers",
        "One line for the first token, one for the others, with a band around the middle half of them. "
        + " ".join(sentence for name in _stacks(result) for sentence in _lessons(result.facts[name])),
        tuple(lines[:1]),
    )
    if lines[1:]:
        beside = len(set(result.data["footing"].to_numpy().tolist())) > 1
        told = [HOW, *([BESIDE] if beside else []), *(one for facts in _facts(result) for one in _spread(facts))]
        yield Section("What blocks add, and how states spread", " ".join(told), tuple(lines[1:]))
    if grids[1:]:
        alike = " ".join(sentence for facts in _facts(result) for sentence in _alike(facts))
        yield Section("How alike the layers are", alike, tuple(grids[1:]))


HOW = (
    "Each block changes what it is given, here as a share of its norm. The kurtosis says how much a few channels stand "
    "out of a state: it is 3 where values are normally distributed. Anisotropy is the mean cosine between different "
    "tokens."
)
BESIDE = "`final` is normed and the layers are not, so it is no part of what is said of states together."


def _facts(result: Result) -> list[dict[str, Any]]:
    """The findings of each stack."""
    stacks = [result.facts[name] for name in ("encoder", "decoder") if name in result.facts]
    return stacks or [dict(result.facts)]


def _spread(facts: dict[str, Any]) -> Iterator[str]:
    if added := facts.get("what a block adds, over what it was given"):
        low, high = added["lowest"], added["highest"]
        yield (
            f"The block that makes `{high['site']}` changes most, {high['share']:.2f} times what it was given in the "
            f"median, and the one that makes `{low['site']}` least: {low['share']:.2f}."
        )
    yield from _largest(facts)
    ranks = facts.get("effective rank of the middle layers", {})
    if len(ranks) == 2 and ranks["all tokens"] < ranks["without first tokens"] / 2 and "few tokens" not in facts:
        yield (
            f"First tokens decide how states spread: with them the middle layers have an effective rank of "
            f"{ranks['all tokens']:.1f}, without them of {ranks['without first tokens']:.0f}."
        )


def _largest(facts: dict[str, Any]) -> Iterator[str]:
    """Massive activations, where there are any."""
    channels = facts.get("largest channels", {})
    if "massive" in channels:
        top = channels["largest"]
        numbers = " and ".join(map(str, channels["channels"][:6]))
        yield (
            f"Massive activations: {'channel' if len(channels['channels']) == 1 else 'channels'} {numbers} at "
            f"{channels['sites']}, up to {top['times the median']:,.0f} times the median of all values "
            f"({quoted(top['token'].strip())}, position {top['position']}, {top['site']})."
        )


def _alike(facts: dict[str, Any]) -> Iterator[str]:
    if not (alike := facts.get("cka")):
        return
    yield f"Linear CKA over {alike['sampled tokens']:,} tokens: 1 where two layers hold the same up to a rotation."
    said = {"median of pairs": "for all tokens", "without first tokens": "without first ones", "by chance": "by chance"}
    medians = [f"{alike[name]:.2f} {words}" for name, words in said.items() if name in alike]
    yield f"The median of all pairs is {', '.join(medians)}."
    if least := alike.get("least alike"):
        yield f"Least alike are `{least['site']}` and `{least['source_site']}`, with {least['cka']:.2f}."


def _lessons(facts: dict[str, Any]) -> Iterator[str]:
    """What follows from the norms, where it does."""
    if facts.get("times as large", 0) >= 10:
        yield (
            "A first token that is so much larger hides the rest: whoever averages states over tokens, or compares "
            "texts by the distance of their states, sees hardly anything else."
        )
    ends = list(_drops(facts).values())
    if len(ends) == 2 and ends[0][0] > 2 * ends[1][0] and ends[1][1] / 2 < ends[0][1] < 2 * ends[1][1]:
        yield "At `final` all are of one size again: the norm sees to that."


def _stacks(result: Result) -> list[str]:
    return [name for name in ("norm", "encoder", "decoder") if name in result.facts]


def _norms_seen(result: Result) -> str:
    """What a profile's norms show, in plain sentences."""
    return " ".join(sentence for stack in _stacks(result) for sentence in _sentences(stack, result.facts[stack]))


def _sentences(stack: str, facts: dict[str, Any]) -> Iterator[str]:
    whose = "" if stack == "norm" else f" of the {stack}"
    if "times as large" in facts:
        first, others, times = (facts[name] for name in ("first token", "other tokens", "times as large"))
        yield (
            f"Over the middle{whose} ({facts['middle layers']}) the first token has a median norm of about "
            f"{first:,.0f} and the others of about {others:,.0f}: {times:,.1f} times as much."
        )
    if drops := _drops(facts):
        told = " and ".join(f"the {who} from {before:,.0f} to {after:,.0f}" for who, (before, after) in drops.items())
        yield f"The final norm{whose} then takes {told}."


def _drops(facts: dict[str, Any]) -> dict[str, list[float]]:
    """For first and other tokens, the norm before and after the final norm."""
    return {key.partition(" from ")[0]: ends for key, ends in facts.items() if " from " in key}
