"""The story of steering: what a model answers and writes, and what that costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from hiddenscope.results import Aside, Listing, Report, Result, Section, Table, frozen
from hiddenscope.results.drawing import labels, level
from hiddenscope.results.pictures import ColourScale, Grid, Lines, Measure, Series
from hiddenscope.results.report import ABSENT, FEWEST_GROUPS, Absent, Grouped
from hiddenscope.results.sentences import (
    counted,
    independence,
    model_name,
    number,
    quoted_token,
    quoted_tokens,
)

if TYPE_CHECKING:
    import xarray

MOST_ANSWERS = 6
# A perplexity that grows more than this many times is drawn on a log scale.
LARGE = 3
# Changes of at least this size are shown as whole percents.
WHOLE_PERCENT = 0.0995
POOLED = {
    "last": "at the last token",
    "mean": "averaged over the tokens",
    "mean:sinkless": "averaged over the tokens but sinks",
}


@frozen
class Origin:
    """Where a direction comes from."""

    origin: Literal["texts", "probe", "vector", "feature", "neuron"]
    feature: int | None = None
    toward: int = 0
    away: int = 0
    pool: str | int | None = None
    fitted_at: list[str] | None = None
    used_elsewhere: list[str] | None = None
    spare_first: bool


@frozen
class Sizes:
    """How long the vectors are that are added."""

    smallest: float
    largest: float


@frozen
class Quality:
    """The texts whose perplexity shows what steering costs."""

    texts: int
    tokens: int
    masked_every: int | None
    perplexity: float
    within: float


@frozen
class Setting:
    """What one site and strength do to an answer and to the perplexity.

    `interval` is the 95% interval of the median change of the log-odds over groups of
    prompts. Results that older versions saved have neither, nor an interval of the
    perplexity's change, which holds for all settings together.
    """

    answer: str
    site: str
    strength: float
    probability_before: float
    probability: float
    ratio: float
    log_odds_change: float | None = None
    interval: list[float] | Absent | None = ABSENT
    perplexity: float
    perplexity_change: float
    perplexity_interval: list[float] | None = None

    @property
    def cost(self) -> str:
        """Write the change of the perplexity, with its interval."""
        cost = _percents(self.perplexity_change)
        if self.perplexity_interval is None:
            return cost
        low, high = map(_percents, self.perplexity_interval)
        return f"{cost} ({low} to {high})"

    @property
    def moved(self) -> str:
        """Say how far the answer moved, and at what cost."""
        before = f"from a probability of {self.probability_before:.2g}"
        parts = [f"{before} to {self.probability:.2g}"]
        # An answer of probability 0 cannot become this many times as likely.
        if np.isfinite(self.ratio):
            parts[0] += f" ({number(self.ratio, 2)} times)"
        if self.log_odds_change is not None:
            parts.append(f"median change of the log-odds {self.log_odds_change:+.2g}")
        if isinstance(self.interval, list):
            low, high = self.interval
            parts[-1] += f" (95% interval {low:+.2g} to {high:+.2g})"
        return ", ".join([*parts, f"perplexity {self.cost}"])


def _percents(change: float) -> str:
    """Write a change, with two digits where it would look like none."""
    if abs(change) >= WHOLE_PERCENT:
        return f"{change:+,.0%}"
    return f"{100 * change:+.2g}%"


@frozen
class SteeredAnswer:
    """How low and how high an answer can be brought without much harm."""

    answer: str
    probability: float
    lowest: Setting | None
    highest: Setting | None


@dataclass(frozen=True)
class WrittenText:
    """What is written after a prompt."""

    prompt: str
    before: str
    after: str


@frozen
class Written:
    """What is written at one setting."""

    site: str
    strength: float
    texts: list[WrittenText]


@frozen
class SteerReport(Grouped, Report):
    """What a model answers and writes while it is steered.

    `best` and `strongest` move the first answer: with `towards`, up by positive
    strengths and down by negative ones.
    """

    direction: Origin
    how: Literal["add", "ablate"]
    upwards: bool
    sites: list[str]
    size: Sizes
    settings: int
    prompts: int
    towards: bool = False
    quality: Quality
    best: Setting | None
    strongest: Setting | Absent | None = ABSENT
    answers: list[SteeredAnswer]
    written: Written | None
    not_written: str | Absent | None = ABSENT
    notes: list[str]

    @property
    def shown(self) -> Setting | None:
        """Return the best setting; without one the best that moves the answer the other
        way, or the strongest where all cost too much.
        """
        first = self.answers[0]
        cheap = [setting for setting in (first.lowest, first.highest) if setting]
        cheap.sort(key=lambda setting: abs(setting.log_odds_change or 0))
        strongest = self.strongest if isinstance(self.strongest, Setting) else None
        return self.best or (cheap[-1] if cheap else strongest)

    def change(self, strength: float) -> str:
        """Say how states are changed."""
        return f"with strength {strength:g}" if self.how == "add" else "ablated"

    def where(self, setting: Setting, joint: str) -> str:
        """Name the site of a setting, and its strength if it has one."""
        if self.how == "ablate":
            return setting.site
        return f"{setting.site}{joint} strength {setting.strength:g}"


def story(report: SteerReport, result: Result) -> Iterator[Section]:
    """Yield what moved and at what cost, with the texts before and after; then both
    along the strengths and the sites.
    """
    data, model = result.data.isel(answer=slice(MOST_ANSWERS)), model_name(result)
    sites, strengths = labels(data, "site"), data["strength"].values.tolist()
    # Where no setting moves an answer, texts may have been written all the same.
    site, strength = str(data.attrs.get("written_at", sites[-1])), strengths[-1]
    if report.shown is not None:
        site, strength = report.shown.site, report.shown.strength
    grids: tuple[Grid, ...] = ()
    lines: list[Lines] = []
    if len(strengths) > 1:
        names = []
        for value in strengths:
            names.append(f"{value:+g}" if value else "0")
        grids = (_grid(data, names, model),)
        lines += _lines(data.sel(site=site), "strength", names, f"at {site} of {model}")
    if len(sites) > 1 or not grids:
        where = f"along the sites of {model}, {report.change(strength)}"
        lines += _lines(data.sel(strength=strength), "site", sites, where)
    tables = (*_answers(report), *_written(report, data, site, strength))
    reading = (
        "The perplexity is that of other texts under the same change: where it rises,"
        " the model predicts them less well."
    )
    if tables:
        reading = (
            "Each table compares the model unchanged with the model steered. " + reading
        )
    if grids:
        reading = (
            f"A cell is one setting: strengths run across, sites run up. {reading}"
        )
    masked, quality = "", report.quality
    if quality.masked_every:
        masked = f", of which every {quality.masked_every}th token is masked"
    certain = f"Its change has no interval, which takes {FEWEST_GROUPS} texts."
    if np.isfinite(data.get("perplexity_change_high", np.nan)).any():
        certain = "The intervals of its change hold for all settings together."
    cost = (
        f"The perplexity on {counted(quality.texts, 'text')}{masked}, measured with"
        " the same change, shows what it costs; unchanged it is"
        f" {quality.perplexity:.1f}. {certain}"
    )
    yield Section(
        "What the model answers, steered",
        (_best(report), _direction(report), cost, *_asides(report)),
        grids or tuple(lines),
        reading,
        tables=tables,
    )
    if grids:
        yield Section(
            "What it answers, and what that costs",
            views=tuple(lines),
            reading="The lines are the probability of each answer, and the perplexity"
            " of other texts under the same change.",
            folded=True,
        )


def _best(report: SteerReport) -> str:
    """Say what moves the first answer most, at what cost, and how far that reaches."""
    within = f"{report.quality.within:.0%}"
    answer, shown = quoted_token(report.answers[0].answer), report.shown
    asked = ""
    if report.towards:
        asked = " as asked (up with positive strengths, down with negative ones)"
    verdict = (
        f"No setting that changes the perplexity by at most {within} moves"
        f" {answer}{asked}."
    )
    if shown is None:
        return verdict
    settings = counted(report.settings, "setting")
    reach = f"The interval accounts for the choice among {settings}."
    if not isinstance(shown.interval, list):
        reach = (
            f"It is the {'best' if report.best else 'strongest'} of {settings} for"
            f" {counted(report.prompts, 'prompt')}; whether it holds for other prompts"
            " was not tested."
        )
    else:
        reach += f" {independence(report, ' of the prompts')}"
    opening = f"Of the settings that change the perplexity by at most {within},"
    if shown is report.strongest:
        opening = f"{verdict} At a higher cost,"
    elif report.best is None:
        opening, asked = f"{verdict} The other way,", ""
    where = report.where(shown, " with")
    return f"{opening} {where} moves {answer} most{asked}: {shown.moved}. {reach}"


def _direction(report: SteerReport) -> str:
    """Say where the direction comes from, and how it is applied."""
    direction = report.direction
    origin, unit = "a given vector", "that vector"
    if direction.origin == "texts":
        pool = POOLED.get(str(direction.pool), f"pooled by {direction.pool}")
        origin = (
            f"the mean state of {counted(direction.toward, 'text')} less that of"
            f" {counted(direction.away, 'text')}, {pool}"
        )
        unit = "that difference"
    elif direction.origin == "probe":
        origin = "the weights of a probe"
        unit = "a step that raises the decision value of the probe by 1"
        if direction.used_elsewhere:
            origin += (
                f" that was fitted at {', '.join(direction.fitted_at or ())} and is"
                f" used at {', '.join(direction.used_elsewhere)} too, where nothing was"
                " fitted"
            )
    elif direction.feature is not None:
        origin = f"what {direction.origin} {direction.feature} writes"
    if direction.spare_first:
        origin += ", without what lies along the mean state of the first tokens"
    where = "At one site at a time"
    if report.upwards:
        where = "At each site and in every layer above it,"
    change = "projected out"
    if report.how == "add":
        change = f"added to the state of every token; strength 1 is {unit}"
    return f"The direction is {origin}. {where} it is {change}."


def _extremes(report: SteerReport) -> Iterator[tuple[str, str, Setting]]:
    """Yield each answer with the settings at which it is lowest and highest."""
    for answer in report.answers:
        name = quoted_token(answer.answer)
        for extreme in ("lowest", "highest"):
            setting = getattr(answer, extreme)
            if setting is not None:
                yield name, extreme, setting


def _asides(report: SteerReport) -> Iterator[Aside]:
    """Yield how low and how high answers can be brought, and what else to know."""
    extremes = list(_extremes(report))
    for name, extreme, setting in extremes:
        where = report.where(setting, ",")
        yield Aside(f"{name} is {extreme} at {where}: {setting.moved}.")
    if extremes and report.best is None:
        yield Aside(
            f"These are the extremes of {counted(report.settings, 'setting')}; others"
            " were not tested."
        )
    if isinstance(report.not_written, str):
        yield Aside(f"Nothing is written: {report.not_written}.")
    yield from map(Aside, report.notes)


def _answers(report: SteerReport) -> Iterator[Listing]:
    """Yield how low and how high the answers can be brought without much harm, and what
    that costs.
    """
    rows = []
    for name, _, setting in _extremes(report):
        where = f"{setting.site}, {report.change(setting.strength)}"
        probabilities = setting.probability_before, setting.probability
        rows.append((name, where, *probabilities, setting.cost))
    if rows:
        yield Listing(
            "Answers before and after",
            ("answer", "where", "probability before", "after", "change of perplexity"),
            tuple(rows),
            note="The lowest and the highest of the settings that change the perplexity"
            f" by at most {report.quality.within:.0%}.",
        )


def _written(
    report: SteerReport, data: "xarray.Dataset", site: str, strength: float
) -> Iterator[Listing | Table]:
    """Yield what was written after each prompt: at one setting for a page, and with
    every strength for a terminal.
    """
    if "written" not in data:
        return
    here = data.sel(site=site, strength=strength)
    columns = [
        [str(text).strip() for text in here[name].values]
        for name in ("prompt", "written_before", "written")
    ]
    yield Listing(
        f"What the model writes, unchanged and steered at {site}"
        f" {report.change(strength)}",
        ("prompt", "before", "after"),
        tuple(zip(*columns, strict=True)),
    )
    site, strengths = data.attrs["written_at"], data["strength"].values.tolist()
    rows = []
    for place, prompt in enumerate(labels(data, "prompt")):
        here = data.isel(text=place).sel(site=site)
        rows.append([prompt, "before", str(here["written_before"].item())])
        for strength in strengths:
            name = f"{strength:+g}" if report.how == "add" else "ablated"
            text = here["written"].sel(strength=strength).item()
            rows.append([prompt, name, str(text)])
    yield Table(
        ["prompt", "strength", "text"],
        rows,
        (0, 2),
        f"Texts written after each prompt, steered at {site}:",
    )


def _grid(data: "xarray.Dataset", strengths: Sequence[str], model: str) -> Grid:
    """Draw how far each answer moves, its probability, and the perplexity as a multiple
    of what it was.
    """
    moves = data["log_odds"].mean("text") - data["log_odds_before"].mean("text")
    probabilities = data["probability"].mean("text").values
    names = quoted_tokens(labels(data, "answer"))
    measures = []
    for place, name in enumerate(names):
        title = f"change of the log-odds of {name}"
        measures.append(Measure(title, moves.values[..., place], "nats", "diverging"))
    for place, name in enumerate(names):
        measures.append(Measure(f"probability of {name}", probabilities[..., place]))
    ratio = (data["perplexity"] / data["perplexity_before"]).values
    measures.append(Measure("perplexity, times what it was", ratio, scale="log"))
    average = ", averaged over the prompts" if data.sizes["text"] > 1 else ""
    return Grid(
        f"Steering {model}",
        labels(data, "site"),
        tuple(strengths),
        tuple(measures),
        note=f"Strengths run across{average}.",
        x_name="strength",
    )


def _lines(
    data: "xarray.Dataset", along: str, places: Sequence[str], where: str
) -> Iterator[Lines]:
    """Yield each answer's probability, with what it was before, and the perplexity."""
    count = len(places)
    answers = []
    for place, name in enumerate(quoted_tokens(labels(data, "answer"))):
        here = data.isel(answer=place)
        answers.append(Series(name, here["probability"].mean("text").values))
        before = float(here["probability_before"].mean())
        answers.append(level(f"{name} before", before, count))
    title = f"Probability {where}"
    yield Lines(title, tuple(places), tuple(answers), along, "probability", scale="log")
    before = float(data["perplexity_before"])
    perplexities = (
        Series("perplexity on other texts", data["perplexity"].values),
        level("before", before, count),
        level("5% more than before", 1.05 * before, count),
    )
    scale: ColourScale = "linear"
    if float(data["perplexity"].max()) > LARGE * before:
        scale = "log"
    title = f"Perplexity {where}"
    yield Lines(title, tuple(places), perplexities, along, "perplexity", scale=scale)
