"""Steering: what a model answers and writes while it is steered."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hiddenscope.results import Listing, Result, Section, Table
from hiddenscope.results.drawing import labels, level, of_type
from hiddenscope.results.pictures import ColourScale, Grid, Lines, Measure, Series, View
from hiddenscope.results.sentences import (
    as_prose,
    counted,
    model_name,
    number,
    quoted_token,
    quoted_tokens,
)

if TYPE_CHECKING:
    import xarray

    from hiddenscope.analyses.steer.facts import (
        DirectionFacts,
        SettingFacts,
        SteeredAnswerFacts,
        SteerFacts,
    )

MOST_ANSWERS = 6
# A perplexity that grows more than so many times is drawn on a log scale.
LARGE = 3
# Changes from here on are shown as whole percents.
WHOLE_PERCENT = 0.0995


def views(result: Result) -> Iterator[View]:
    """Yield sites by strengths where there are several; then probabilities and the
    perplexity along both.
    """
    data = result.data.isel(answer=slice(MOST_ANSWERS))
    model = model_name(result)
    site, strength = _shown_setting(result)
    if data.sizes["strength"] > 1:
        yield _grid(result, data)
        where = f"at {site} of {model}"
        yield from _lines(data.sel(site=site), "strength", _strengths(data), where)
    if data.sizes["site"] > 1 or data.sizes["strength"] == 1:
        where = f"along the sites of {model}, {_change(result, strength)}"
        sites = labels(data, "site")
        yield from _lines(data.sel(strength=strength), "site", sites, where)


def findings(result: Result) -> Iterator[str]:
    """Yield what moved, what was changed for it, and at what cost."""
    facts = cast("SteerFacts", result.facts)
    yield _best(facts)
    yield _direction(facts)
    yield _quality(facts)
    extremes: list[str] = []
    for answer in facts["answers"]:
        extremes += _extremes(answer, facts)
    yield from extremes
    if extremes and facts["best"] is None:
        yield (
            f"These are the extremes of {counted(facts['settings'], 'setting')}; others"
            " were not tested."
        )
    if facts.get("not_written"):
        yield f"Nothing is written: {facts['not_written']}."
    yield from facts["notes"]


def sections(result: Result) -> Iterator[Section]:
    """Yield what moved and at what cost, then the texts before and after."""
    facts, shown = cast("SteerFacts", result.facts), tuple(views(result))
    grids, lines = of_type(shown, Grid), of_type(shown, Lines)
    listings = (*_answers_before_and_after(result), *_texts_before_and_after(result))
    reading = []
    if grids:
        reading.append("A cell is one setting: strengths run across, sites run up.")
    if listings:
        reading.append(
            "Each table compares the model unchanged with the model steered."
        )
    reading.append(
        "The perplexity is that of other texts under the same change: where it rises,"
        " the model predicts them less well."
    )
    yield Section(
        "What the model answers, steered",
        as_prose([_best(facts), _direction(facts), _quality(facts)]),
        grids or lines,
        " ".join(reading),
        tables=listings,
    )
    if grids:
        yield Section(
            "What it answers, and what that costs",
            "",
            lines,
            "The lines are the probability of each answer, and the perplexity of other"
            " texts under the same change.",
            folded=True,
        )


def tables(result: Result) -> Iterator[Table]:
    """Yield the texts after each prompt, with every strength."""
    data = result.data
    if "written" not in data:
        return
    site = data.attrs["written_at"]
    written = data["written"].sel(site=site)
    rows = []
    for place, prompt in enumerate(data["prompt"].to_numpy().tolist()):
        rows.append([prompt, "before", str(data["written_before"].values[place])])
        for strength in written["strength"].values:
            name = f"{strength:+g}" if result.facts["how"] == "add" else "ablated"
            text = written.sel(strength=strength).values[place]
            rows.append([prompt, name, str(text)])
    yield Table(
        ["prompt", "strength", "text"],
        rows,
        (0, 2),
        f"Texts written after each prompt, steered at {site}:",
    )


def _direction(facts: "SteerFacts") -> str:
    """Say where the direction comes from, and how it is applied."""
    direction = facts["direction"]
    origin, unit = _origin(direction)
    spared = ""
    if direction["spare_first"]:
        spared = ", without what lies along the mean state of the first tokens"
    where = "At one site at a time"
    if facts["upwards"]:
        where = "At each site and in every layer above it,"
    change = "projected out"
    if facts["how"] == "add":
        change = f"added to the state of every token; strength 1 is {unit}"
    return f"{origin}{spared}. {where} it is {change}."


def _origin(direction: "DirectionFacts") -> tuple[str, str]:
    """Say where a direction comes from, and what a strength of 1 is."""
    if direction["origin"] == "texts":
        pooled = {"last": "at the last token", "mean": "averaged over the tokens"}
        pool = direction["pool"]
        origin = (
            f"The direction is the mean state of {counted(direction['toward'], 'text')}"
            f" less that of {counted(direction['away'], 'text')},"
            f" {pooled.get(pool, f'pooled by {pool}')}"
        )
        return origin, "that difference"
    if direction["origin"] == "probe":
        origin = "The direction is the weights of a probe"
        if direction.get("used_elsewhere"):
            origin += (
                f" that was fitted at {', '.join(direction['fitted_at'])} and is used"
                f" at {', '.join(direction['used_elsewhere'])} too, where nothing was"
                " fitted"
            )
        return origin, "a step that raises the decision value of the probe by 1"
    return "The direction is a given vector", "that vector"


def _quality(facts: "SteerFacts") -> str:
    quality = facts["quality"]
    masked = ""
    if quality["masked_every"]:
        masked = f", of which every {quality['masked_every']}th token is masked"
    return (
        f"The perplexity on {counted(quality['texts'], 'text')}{masked}, measured with"
        " the same change, shows what it costs; unchanged it is"
        f" {quality['perplexity']:.1f}."
    )


def _best(facts: "SteerFacts") -> str:
    """Say what moves the first answer most, at what cost, and how far that reaches."""
    best, within = facts["best"], f"{facts['quality']['within']:.0%}"
    verdict = f"No setting that changes the perplexity by at most {within} moves"
    strongest = best or facts.get("strongest")
    if strongest is None:
        return f"{verdict} {quoted_token(facts['answers'][0]['answer'])}."
    strength = ""
    if facts["how"] == "add":
        strength = f" with strength {strongest['strength']:g}"
    settings = counted(facts["settings"], "setting")
    reach = f"The interval accounts for the choice among {settings}."
    if not strongest.get("interval"):
        reach = (
            f"It is the {'best' if best else 'strongest'} of {settings} for"
            f" {counted(facts['prompts'], 'prompt')}; whether it holds for other"
            " prompts was not tested."
        )
    moves = (
        f"{strongest['site']}{strength} moves {quoted_token(strongest['answer'])} most:"
        f" {_moved(strongest)}. {reach}"
    )
    if best is None:
        return f"{moves} {verdict} it."
    return f"Of the settings that change the perplexity by at most {within}, {moves}"


def _moved(setting: "SettingFacts") -> str:
    # An answer of probability 0 cannot become so many times as likely.
    ratio = setting["ratio"]
    times = f" ({number(ratio, 2)} times)" if np.isfinite(ratio) else ""
    nats, interval = "", setting.get("interval")
    if "log_odds_change" in setting:
        nats = f", log-odds of the median prompt {setting['log_odds_change']:+.2g}"
    if interval:
        nats += f" (95% interval {interval[0]:+.2g} to {interval[1]:+.2g})"
    return (
        f"from a probability of {setting['probability_before']:.2g} to"
        f" {setting['probability']:.2g}{times}{nats}, perplexity"
        f" {_percent(setting['perplexity_change'])}"
    )


def _percent(change: float) -> str:
    """Return a change in percent, with two digits where it would look like none."""
    if abs(change) >= WHOLE_PERCENT:
        return f"{change:+,.0%}"
    return f"{100 * change:+.2g}%"


def _extremes(answer: "SteeredAnswerFacts", facts: "SteerFacts") -> Iterator[str]:
    """Yield how low and how high an answer can be brought."""
    for name, setting in (("lowest", answer["lowest"]), ("highest", answer["highest"])):
        if not setting:
            continue
        strength = ""
        if facts["how"] == "add":
            strength = f", strength {setting['strength']:g}"
        yield (
            f"{quoted_token(answer['answer'])} is {name} at"
            f" {setting['site']}{strength}: {_moved(setting)}."
        )


def _answers_before_and_after(result: Result) -> Iterator[Listing]:
    """Yield each answer, how low and how high it can be brought without much harm, and
    what that costs.
    """
    facts = cast("SteerFacts", result.facts)
    rows = []
    for answer in facts["answers"]:
        for setting in (answer["lowest"], answer["highest"]):
            if setting:
                where = f"{setting['site']}, {_change(result, setting['strength'])}"
                before = float(setting["probability_before"])
                after = float(setting["probability"])
                cost = _percent(setting["perplexity_change"])
                name = quoted_token(answer["answer"])
                rows.append((name, where, before, after, cost))
    if rows:
        yield Listing(
            "Answers before and after",
            ("answer", "where", "probability before", "after", "change of perplexity"),
            tuple(rows),
            note="The lowest and the highest of the settings that change the perplexity"
            f" by at most {facts['quality']['within']:.0%}.",
        )


def _texts_before_and_after(result: Result) -> Iterator[Listing]:
    """Yield each prompt with what was written after it, before and after."""
    if "written" not in result.data:
        return
    site, strength = _shown_setting(result)
    here = result.data.sel(site=site, strength=strength)
    texts = []
    for column in ("prompt", "written_before", "written"):
        cells = here[column].to_numpy().tolist()
        texts.append([str(cell).strip() for cell in cells])
    yield Listing(
        f"What the model writes, unchanged and steered at {site}"
        f" {_change(result, strength)}",
        ("prompt", "before", "after"),
        tuple(zip(*texts, strict=True)),
    )


def _shown_setting(result: Result) -> tuple[str, float]:
    """Return the best setting, or the strongest; without one the site at which texts
    were written, if any were, and the last strength.
    """
    facts = cast("SteerFacts", result.facts)
    best = facts["best"] or facts.get("strongest")
    if best is not None:
        return str(best["site"]), float(best["strength"])
    last_site = labels(result.data, "site")[-1]
    last_strength = result.data["strength"].to_numpy()[-1]
    return str(result.data.attrs.get("written_at", last_site)), float(last_strength)


def _change(result: Result, strength: float) -> str:
    return f"with strength {strength:g}" if result.facts["how"] == "add" else "ablated"


def _strengths(data: "xarray.Dataset") -> tuple[str, ...]:
    strengths = data["strength"].to_numpy().tolist()
    names = []
    for strength in strengths:
        names.append(f"{strength:+g}" if strength else "0")
    return tuple(names)


def _grid(result: Result, data: "xarray.Dataset") -> Grid:
    """Draw how far each answer moves, its probability, and the perplexity as a multiple
    of what it was.
    """
    names = quoted_tokens(labels(data, "answer"))
    moves = data["log_odds"].mean("text") - data["log_odds_before"].mean("text")
    probabilities = data["probability"].mean("text")
    measures = []
    for place, name in enumerate(names):
        change = moves.to_numpy().astype(np.float32)[..., place]
        title = f"change of the log-odds of {name}"
        measures.append(Measure(title, change, "nats", "diverging"))
    for place, name in enumerate(names):
        probability = probabilities.to_numpy().astype(np.float32)[..., place]
        measures.append(Measure(f"probability of {name}", probability))
    ratio = (data["perplexity"] / data["perplexity_before"]).to_numpy()
    perplexity = ratio.astype(np.float32)
    measures.append(Measure("perplexity, times what it was", perplexity, scale="log"))
    average = ", averaged over the prompts" if data.sizes["text"] > 1 else ""
    return Grid(
        f"Steering {model_name(result)}",
        labels(data, "site"),
        _strengths(data),
        tuple(measures),
        note=f"Strengths run across{average}.",
        x_name="strength",
    )


def _lines(
    data: "xarray.Dataset", along: str, places: Sequence[str], where: str
) -> Iterator[View]:
    """Yield each answer's probability, with what it was before, and the perplexity."""
    count = len(places)
    answers = []
    for place, name in enumerate(quoted_tokens(labels(data, "answer"))):
        here = data.isel(answer=place)
        answers.append(Series(name, here["probability"].mean("text").to_numpy()))
        before = float(here["probability_before"].mean())
        answers.append(level(f"{name} before", before, count))
    title = f"Probability {where}"
    yield Lines(title, tuple(places), tuple(answers), along, "probability", scale="log")
    before = float(data["perplexity_before"])
    perplexities = (
        Series("perplexity on other texts", data["perplexity"].to_numpy()),
        level("before", before, count),
        level("5% more than before", 1.05 * before, count),
    )
    scale: ColourScale = "linear"
    if float(data["perplexity"].max()) > LARGE * before:
        scale = "log"
    title = f"Perplexity {where}"
    yield Lines(title, tuple(places), perplexities, along, "perplexity", scale=scale)
