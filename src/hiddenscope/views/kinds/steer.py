"""What a model says while it is steered, shown and told."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Result, in_words
from hiddenscope.views.drawing import labels, quoted
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

if TYPE_CHECKING:
    import xarray

MOST_ANSWERS = 6
WIDE = 3  # a perplexity that grows more than so many times is drawn on a log scale


def views(result: Result) -> Iterator[View]:
    """Sites by strengths where there are several; then probabilities and the perplexity along both."""
    data = result.data.isel(answer=slice(MOST_ANSWERS))
    if data.sizes["strength"] > 1:
        yield _grid(result, data)
    site, strength = _setting(result)
    if data.sizes["strength"] > 1:
        where = f"at {site} of {_model(result)}"
        yield from _lines(data.sel(site=site), "strength", _strengths(data), where)
    if data.sizes["site"] > 1 or data.sizes["strength"] == 1:
        where = f"along the sites of {_model(result)}" + (f", strength {strength:g}" if _adds(result) else ", ablated")
        yield from _lines(data.sel(strength=strength), "site", labels(data, "site"), where)


def sections(result: Result) -> Iterator[Section]:
    """What moved, at what cost, and the texts before and after."""
    shown = tuple(views(result))
    facts, grids = result.facts, tuple(view for view in shown if isinstance(view, Grid))
    how = f"The direction is {facts['direction']}. It is {facts['how']}."
    unit = f" Strength 1 is {facts['strength 1']}." if _adds(result) else ""
    cost = (
        "A direction that breaks everything is no edit, so beside what the model says stands its perplexity on "
        f"{facts['perplexity']['texts']} other texts, with the states changed there in the same way; before it was "
        f"{facts['perplexity']['before']:.1f}."
    )
    opening = f"{how}{unit}\n\n{cost}\n\n{_best(facts)}"
    texts = "\n".join(_texts(result))
    lines = tuple(view for view in shown if isinstance(view, Lines))
    if grids:
        yield Section("What the model says, steered", opening, grids)
        yield Section(
            "What it says and what it costs", texts or "Probabilities, and the perplexity beside them.", lines
        )
    else:
        yield Section("What the model says, steered", f"{opening}\n\n{texts}".strip(), lines)


def _best(facts: Any) -> str:
    best = facts["best"]
    if isinstance(best, str):
        return f"The best setting: {in_words(best)}."
    before, after = best["probability"]
    strength = f" with strength {best['strength']:g}" if "strength 1" in facts else ""
    answer = quoted(best["answer"].strip() or best["answer"])
    return (
        f"{answer} moves most at `{best['site']}`{strength}, among the settings that change the "
        f"perplexity by at most 5%: from {before:.2g} to {after:.2g}, {best['times']:.2g} times what it was, while the "
        f"perplexity changes by {best['perplexity change']:+.1%}."
    )


def _texts(result: Result) -> Iterator[str]:
    """Each prompt with what was written after it, before and after."""
    if "written" not in result.data:
        return
    site, strength = _setting(result)
    named = f"with strength {strength:g}" if _adds(result) else "ablated"
    yield f"What the model writes after each prompt, as it is and {named} at `{site}`:\n"
    here = result.data.sel(site=site, strength=strength)
    columns = (here["prompt"], here["written_before"], here["written"])
    for prompt, before, after in zip(*(column.to_numpy().tolist() for column in columns), strict=True):
        yield f"- {quoted(prompt)} goes on {quoted(before)}; then {quoted(after)}"


def _setting(result: Result) -> tuple[str, float]:
    """The setting that is looked at: the best one; without one the site at which texts were written, if any were."""
    best = result.facts["best"]
    if not isinstance(best, str):
        return str(best["site"]), float(best["strength"])
    sites, strengths = labels(result.data, "site"), result.data["strength"].to_numpy().tolist()
    return str(result.data.attrs.get("written_at", sites[-1])), float(strengths[-1])


def _adds(result: Result) -> bool:
    return "strength 1" in result.facts


def _model(result: Result) -> str:
    return str(result.source.get("model", "the model"))


def _names(data: "xarray.Dataset") -> list[str]:
    """The answers, each without the space that its token begins with unless that is what tells two apart."""
    answers = labels(data, "answer")
    bare = [answer.strip() or answer for answer in answers]
    return [quoted(name) for name in (bare if len(set(bare)) == len(bare) else answers)]


def _strengths(data: "xarray.Dataset") -> tuple[str, ...]:
    return tuple(f"{one:+g}" if one else "0" for one in data["strength"].to_numpy().tolist())


def _grid(result: Result, data: "xarray.Dataset") -> Grid:
    """How far each answer moves, its probability, and the perplexity as a multiple of what it was."""
    names = _names(data)
    after, before = (data[name].mean("text") for name in ("log_odds", "log_odds_before"))
    moves, shares = (one.to_numpy().astype(np.float32) for one in (after - before, data["probability"].mean("text")))
    measures = [
        Measure(f"change of the log-odds of {name}", moves[..., place], "nats", "diverging")
        for place, name in enumerate(names)
    ]
    measures += [Measure(f"probability of {name}", shares[..., place]) for place, name in enumerate(names)]
    worse = (data["perplexity"] / data["perplexity_before"]).to_numpy().astype(np.float32)
    measures.append(Measure("perplexity, times what it was", worse, scale="log"))
    many = "on average over the prompts; " if data.sizes["text"] > 1 else ""
    note = f"Strengths run across, {many}strength 1 is {result.facts['strength 1']}."
    return Grid(f"Steering {_model(result)}", labels(data, "site"), _strengths(data), tuple(measures), note=note)


def _lines(data: "xarray.Dataset", along: str, places: Sequence[str], where: str) -> Iterator[View]:
    """Each answer's probability, with what it was before, and the perplexity."""
    series = []
    for place, name in enumerate(_names(data)):
        row = data["probability"].isel(answer=place)
        before = float(data["probability_before"].isel(answer=place).mean())
        series += [Series(name, row.mean("text").to_numpy())]
        series += [Series(f"{name} before", _level(before, places), style="dash")]
    title = f"Probability {where}"
    yield Lines(title, tuple(places), tuple(series), along, "probability", scale="log")
    before = float(data["perplexity_before"])
    both = (
        Series("perplexity on other texts", data["perplexity"].to_numpy()),
        Series("before", _level(before, places), style="dash"),
        Series("5% more than before", _level(1.05 * before, places), style="dash"),
    )
    heights = data["perplexity"].to_numpy()
    far = float(heights.max()) > WIDE * before
    yield Lines(f"Perplexity {where}", tuple(places), both, along, "perplexity", scale="log" if far else "linear")


def _level(height: float, places: Sequence[str]) -> NDArray[np.float32]:
    return np.full(len(places), height, dtype=np.float32)
