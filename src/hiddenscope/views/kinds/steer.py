"""What a model answers and writes while it is steered."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Facts, Result, Table
from hiddenscope.views.drawing import as_prose, labels, quoted
from hiddenscope.views.values import (
    Grid,
    Lines,
    Listing,
    Measure,
    Scale,
    Section,
    Series,
    View,
)

if TYPE_CHECKING:
    import xarray

MOST_ANSWERS = 6
LARGE = 3  # a perplexity that grows more than so many times is drawn on a log scale


def views(result: Result) -> Iterator[View]:
    """Sites by strengths where there are several; then probabilities and the perplexity
    along both.
    """
    data = result.data.isel(answer=slice(MOST_ANSWERS))
    if data.sizes["strength"] > 1:
        yield _grid(result, data)
    site, strength = _setting(result)
    if data.sizes["strength"] > 1:
        where = f"at {site} of {_model(result)}"
        yield from _lines(data.sel(site=site), "strength", _strengths(data), where)
    if data.sizes["site"] > 1 or data.sizes["strength"] == 1:
        where = f"along the sites of {_model(result)}, {_change(result, strength)}"
        yield from _lines(
            data.sel(strength=strength), "site", labels(data, "site"), where
        )


def findings(result: Result) -> Iterator[str]:
    """What moved, what was changed for it, and at what cost."""
    facts = result.facts
    yield _best(facts)
    yield _direction(facts)
    yield _quality(facts)
    extremes = [
        sentence for answer in facts["answers"] for sentence in _extremes(answer, facts)
    ]
    yield from extremes
    if extremes and facts["best"] is None:
        yield (
            f"These are the extremes of {_count(facts['settings'], 'setting')}; others"
            " were not tested."
        )
    if facts.get("not_written"):
        yield f"Nothing is written: {facts['not_written']}."
    yield from facts["notes"]


def sections(result: Result) -> Iterator[Section]:
    """What moved and at what cost, then the texts before and after."""
    shown, facts = tuple(views(result)), result.facts
    grids, lines = (
        tuple(view for view in shown if isinstance(view, kind))
        for kind in (Grid, Lines)
    )
    told = as_prose([_best(facts), _direction(facts), _quality(facts)])
    tables = (*_before_and_after(result), *_texts(result))
    cells = (
        "A cell is one setting: strengths run across, sites run up. " if grids else ""
    )
    compared = (
        "Each table compares the model unchanged with the model steered. "
        if tables
        else ""
    )
    reading = (
        f"{cells}{compared}The perplexity is that of other texts under the same change:"
        " where it rises, the model predicts them less well."
    )
    yield Section(
        "What the model answers, steered", told, grids or lines, reading, tables=tables
    )
    if grids:
        how = (
            "The lines are the probability of each answer, and the perplexity of other"
            " texts under the same change."
        )
        yield Section(
            "What it answers, and what that costs", "", lines, how, folded=True
        )


def tables(result: Result) -> Iterator[Table]:
    """The texts after each prompt, with every strength."""
    if "written" not in result.data:
        return
    site = result.data.attrs["written_at"]
    here = result.data["written"].sel(site=site)
    rows = []
    for place, prompt in enumerate(result.data["prompt"].to_numpy().tolist()):
        rows.append(
            [prompt, "before", str(result.data["written_before"].values[place])]
        )
        for strength in here["strength"].values:
            name = f"{strength:+g}" if result.facts["how"] == "add" else "ablated"
            rows.append([prompt, name, str(here.sel(strength=strength).values[place])])
    yield Table(
        ["prompt", "strength", "text"],
        rows,
        (0, 2),
        f"Texts written after each prompt, steered at {site}:",
    )


def _direction(facts: Facts) -> str:
    """Where the direction comes from, and how it is applied."""
    direction = facts["direction"]
    if direction["origin"] == "texts":
        pooled = {"last": "at the last token", "mean": "averaged over the tokens"}.get(
            direction["pool"], f"pooled by {direction['pool']}"
        )
        origin = (
            f"The direction is the mean state of {_count(direction['toward'], 'text')}"
            f" less that of {_count(direction['away'], 'text')}, {pooled}"
        )
        unit = "that difference"
    elif direction["origin"] == "probe":
        origin = "The direction is the weights of a probe"
        if direction.get("used_elsewhere"):
            fitted, used = (
                ", ".join(direction[key]) for key in ("fitted_at", "used_elsewhere")
            )
            origin += (
                f" that was fitted at {fitted} and is used at {used} too, where nothing"
                " was fitted"
            )
        unit = "a step that raises the decision value of the probe by 1"
    else:
        origin, unit = "The direction is a given vector", "that vector"
    spared = (
        ", without what lies along the mean state of the first tokens"
        if direction["spare_first"]
        else ""
    )
    where = (
        "at each site and in every layer above it"
        if facts["upwards"]
        else "at one site at a time"
    )
    change = f"added to the state of every token; strength 1 is {unit}"
    return (
        f"{origin}{spared}. {where.capitalize()} it is"
        f" {change if facts['how'] == 'add' else 'projected out'}."
    )


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _quality(facts: Facts) -> str:
    quality = facts["quality"]
    masked = (
        f", of which every {quality['masked_every']}th token is masked"
        if quality["masked_every"]
        else ""
    )
    return (
        f"The perplexity on {_count(quality['texts'], 'text')}{masked}, measured with"
        " the same change, shows what it costs; unchanged it is"
        f" {quality['perplexity']:.1f}."
    )


def _best(facts: Facts) -> str:
    within = f"{facts['quality']['within']:.0%}"
    if facts["best"] is None:
        answer = _name(facts["answers"][0]["answer"])
        return (
            f"No setting moves {answer} and changes the perplexity by at most {within}."
        )
    best = facts["best"]
    strength = f" with strength {best['strength']:g}" if facts["how"] == "add" else ""
    return (
        f"Of the settings that change the perplexity by at most {within},"
        f" {best['site']}{strength} moves {_name(best['answer'])} most: {_moved(best)}."
        f" It is the best of {_count(facts['settings'], 'setting')} for"
        f" {_count(facts['prompts'], 'prompt')}; whether it holds for other prompts was"
        " not tested."
    )


def _moved(setting: Facts) -> str:
    times = f" ({setting['ratio']:.2g} times)" if np.isfinite(setting["ratio"]) else ""
    return (
        f"from a probability of {setting['probability_before']:.2g} to"
        f" {setting['probability']:.2g}{times}, perplexity"
        f" {_percent(setting['perplexity_change'])}"
    )


def _percent(change: float) -> str:
    """A change in percent, with two digits where it is small: a small change is not
    none.
    """
    return f"{change:+.0%}" if abs(change) >= 0.0995 else f"{100 * change:+.2g}%"


def _extremes(answer: Facts, facts: Facts) -> Iterator[str]:
    """How low and how high an answer can be brought."""
    for name in ("lowest", "highest"):
        setting = answer[name]
        if setting:
            strength = (
                f", strength {setting['strength']:g}" if facts["how"] == "add" else ""
            )
            yield (
                f"{_name(answer['answer'])} is {name} at {setting['site']}{strength}:"
                f" {_moved(setting)}."
            )


def _before_and_after(result: Result) -> Iterator[Listing]:
    """Each answer, how low and how high it can be brought without much harm, and what
    that costs.
    """
    facts = result.facts
    rows = []
    for answer in facts["answers"]:
        for setting in (answer["lowest"], answer["highest"]):
            if setting:
                where = f"{setting['site']}, {_change(result, setting['strength'])}"
                before, after = (
                    float(setting[key]) for key in ("probability_before", "probability")
                )
                cost = _percent(setting["perplexity_change"])
                rows.append((_name(answer["answer"]), where, before, after, cost))
    if rows:
        within = f"{facts['quality']['within']:.0%}"
        columns = (
            "answer",
            "where",
            "probability before",
            "after",
            "change of perplexity",
        )
        note = (
            "The lowest and the highest of the settings that change the perplexity by"
            f" at most {within}."
        )
        yield Listing("Answers before and after", columns, tuple(rows), note=note)


def _texts(result: Result) -> Iterator[Listing]:
    """Each prompt with what was written after it, before and after."""
    if "written" not in result.data:
        return
    site, strength = _setting(result)
    here = result.data.sel(site=site, strength=strength)
    columns = (here["prompt"], here["written_before"], here["written"])
    rows = tuple(
        tuple(str(cell).strip() for cell in row)
        for row in zip(*(column.to_numpy().tolist() for column in columns), strict=True)
    )
    title = (
        f"What the model writes, unchanged and steered at {site}"
        f" {_change(result, strength)}"
    )
    yield Listing(title, ("prompt", "before", "after"), rows)


def _setting(result: Result) -> tuple[str, float]:
    """The setting that is shown: the best one; without one the site at which texts were
    written, if any were.
    """
    best = result.facts["best"]
    if best is not None:
        return str(best["site"]), float(best["strength"])
    sites, strengths = (
        labels(result.data, "site"),
        result.data["strength"].to_numpy().tolist(),
    )
    return str(result.data.attrs.get("written_at", sites[-1])), float(strengths[-1])


def _change(result: Result, strength: float) -> str:
    return f"with strength {strength:g}" if result.facts["how"] == "add" else "ablated"


def _model(result: Result) -> str:
    return str(result.source.get("model", "the model"))


def _name(answer: str) -> str:
    return quoted(answer.strip() or answer)


def _names(data: "xarray.Dataset") -> list[str]:
    """The answers, each without the space that its token begins with unless that is
    what tells two apart.
    """
    answers = labels(data, "answer")
    bare = [answer.strip() or answer for answer in answers]
    return [quoted(name) for name in (bare if len(set(bare)) == len(bare) else answers)]


def _strengths(data: "xarray.Dataset") -> tuple[str, ...]:
    return tuple(
        f"{one:+g}" if one else "0" for one in data["strength"].to_numpy().tolist()
    )


def _grid(result: Result, data: "xarray.Dataset") -> Grid:
    """How far each answer moves, its probability, and the perplexity as a multiple of
    what it was.
    """
    names = _names(data)
    after, before = (
        data[name].mean("text") for name in ("log_odds", "log_odds_before")
    )
    moves, shares = (
        one.to_numpy().astype(np.float32)
        for one in (after - before, data["probability"].mean("text"))
    )
    measures = [
        Measure(
            f"change of the log-odds of {name}", moves[..., place], "nats", "diverging"
        )
        for place, name in enumerate(names)
    ]
    measures += [
        Measure(f"probability of {name}", shares[..., place])
        for place, name in enumerate(names)
    ]
    ratio = (
        (data["perplexity"] / data["perplexity_before"]).to_numpy().astype(np.float32)
    )
    measures.append(Measure("perplexity, times what it was", ratio, scale="log"))
    average = ", averaged over the prompts" if data.sizes["text"] > 1 else ""
    note = f"Strengths run across{average}."
    title = f"Steering {_model(result)}"
    return Grid(
        title,
        labels(data, "site"),
        _strengths(data),
        tuple(measures),
        note=note,
        x_name="strength",
    )


def _lines(
    data: "xarray.Dataset", along: str, places: Sequence[str], where: str
) -> Iterator[View]:
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
    perplexities = (
        Series("perplexity on other texts", data["perplexity"].to_numpy()),
        Series("before", _level(before, places), style="dash"),
        Series("5% more than before", _level(1.05 * before, places), style="dash"),
    )
    scale: Scale = (
        "log" if float(data["perplexity"].max()) > LARGE * before else "linear"
    )
    yield Lines(
        f"Perplexity {where}",
        tuple(places),
        perplexities,
        along,
        "perplexity",
        scale=scale,
    )


def _level(height: float, places: Sequence[str]) -> NDArray[np.float32]:
    return np.full(len(places), height, dtype=np.float32)
