"""The story of a probe: what can be read from every layer, and how sure that is."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from hiddenscope.results import Report, Result, Section, frozen
from hiddenscope.results.drawing import labels, level
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.report import Grouped, Pooled
from hiddenscope.results.sentences import (
    counted,
    in_series,
    independence,
    plural,
    quote,
    ruled,
    site_list,
    standing,
)
from hiddenscope.states.pooling import score_pooling

# The largest p-value that shows something.
LEVEL = 0.05
# A finding says so if no p-value can be smaller than this.
NOTED = 0.01
# This many labels are named, and no more.
FEW_LABELS = 6


@frozen
class ClassCount:
    """How many rows have a label."""

    label: str
    rows: int


@frozen
class BestSite:
    """The best site: its accuracy or R², and None where a number is not defined.

    `tied` are the sites with that score, itself the first, where there are several.
    """

    site: str
    tied: list[str] | None = None
    accuracy: float | None = None
    r2: float | None = None
    interval: list[float] | None
    p: float | None
    control: float | None
    selectivity: float | None


@frozen
class Centre:
    """The centre of gravity over layers, as a layer and as a share of their range.

    `middle` is where it lies if all layers read the label equally well. `gained` is the
    mean layer at which the best score so far rises; it has no interval.
    """

    layer: float
    interval: list[float]
    depth: float
    depth_interval: list[float]
    spread: float
    middle: float
    gained: float


@frozen
class LargestWeight:
    """The largest weight in the mix, and in how many folds that site has it too."""

    site: str
    weight: float
    folds: int


@frozen
class MixScore:
    """The probe of a mix of all sites."""

    accuracy: float | None = None
    r2: float | None = None
    interval: list[float] | None = None
    largest_weight: LargestWeight


@frozen
class Alarm:
    """Where the probe rings if at most a `rate` of the first class may, which takes
    `needed` texts of it. The rest is None where the test has fewer.

    `alarms` of them ring at the threshold `value`, of fresh ones at most the share
    `at_most` with 95% confidence, and of the second class the share `caught`.
    """

    rate: float
    needed: int
    value: float | None = None
    alarms: int | None = None
    at_most: float | None = None
    caught: float | None = None
    interval: list[float] | None = None


@frozen
class TestScore(Grouped):
    """The probe of all rows on other texts, at the site that is best on its own.

    `shared` rows were left out: their texts or groups are in the training data. With
    pooled scores of tokens there are `alarms`, set on `negatives`: the texts of the
    first class, of each group the one with the highest score.
    """

    data: str
    shared: int
    chance: float | None = None
    accuracy: float | None = None
    r2: float | None = None
    interval: list[float] | None = None
    negatives: int | None = None
    alarms: list[Alarm] | None = None


@frozen
class Control:
    """The labels that a probe can only memorise."""

    kind: Literal["shuffled", "by_token_id"]
    draws: int


@frozen
class Probed(Report):
    """What was probed."""

    data: str
    token: str | int
    rows: int


@frozen
class ProbeReport(Grouped, Probed):
    """What a linear probe reads from every site."""

    folds: int
    score: Literal["accuracy", "r2"]
    left_out: int = 0
    classes: list[ClassCount] | None = None
    class_count: int = 0
    best: BestSite
    chance: float
    above_chance_at: list[str]
    centre: Centre | None = None
    permutations: int
    smallest_p: float | None
    mix: MixScore | None = None
    test: TestScore | None = None
    control: Control
    calibrated: bool = True
    interval_holds: float | None = None
    all_equal_at: list[str] | None = None
    fixed_penalty: float | None = None
    not_converged_at: list[str] | None = None
    pooled: Pooled | None = None

    @property
    def interval_name(self) -> str:
        """Name the interval by its level, or by how often it held if that is less."""
        if self.interval_holds:
            return f"interval (held in {self.interval_holds:.0%} of simulations)"
        return "95% interval"

    @property
    def token_scores(self) -> bool:
        """Tell whether the scores of tokens were pooled."""
        return score_pooling(self.token) is not None

    def number(self, value: float) -> str:
        """Return a score in words."""
        return f"{value:.0%}" if self.score == "accuracy" else f"R² {value:.2f}"

    def with_interval(
        self, of: BestSite | MixScore | TestScore, remark: str = ""
    ) -> str:
        """Return a score in words with its interval."""
        value = self.number(getattr(of, self.score))
        if of.interval is None:
            return f"{value} (its uncertainty is not known)"
        low, high = map(self.number, of.interval)
        return f"{value} ({low} to {high}{remark})"


def story(report: ProbeReport, result: Result) -> Iterator[Section]:
    """Yield the scores with the findings and the method, then the mix."""
    data, score, sites = result.data, report.score, labels(result.data, "site")
    series = [
        Series(
            "probe",
            data[score].to_numpy(),
            data[f"{score}_low"].to_numpy(),
            data[f"{score}_high"].to_numpy(),
            band=report.interval_name,
        ),
        Series("control labels", data["control"].to_numpy()),
    ]
    if report.test is not None:
        name = f"test_{score}"
        tested = Series(f"on {report.test.data}", data[name].to_numpy())
        if f"{name}_low" in data:
            low, high = (data[f"{name}_{end}"].to_numpy() for end in ("low", "high"))
            tested = replace(tested, low=low, high=high, band="95% interval")
        series.insert(1, tested)
    levels = {"largest class": "majority", "mix of all sites": f"mix_{score}"}
    for name, variable in levels.items():
        if variable in data:
            series.append(level(name, float(data[variable]), len(sites)))
    scores = Lines(
        f"What a linear probe reads from {result.source.get('model', 'the states')}:"
        f" {report.data}",
        sites,
        tuple(series),
        y_name="accuracy" if score == "accuracy" else "R²",
    )
    yield Section(
        "What can a probe read from each layer?",
        (*_findings(report, result), *_limits(report)),
        (scores,),
        _method(report),
    )
    if report.mix is None:
        return
    weights = [Series("all rows", data["mix_weight"].to_numpy())]
    for fold, of_fold in enumerate(data["mix_weight_fold"].to_numpy().T):
        weights.append(Series(f"fold {fold}", of_fold, style="dash"))
    title = "The weight of each site in the mix"
    yield Section(
        "All layers together",
        views=(Lines(title, sites, tuple(weights), y_name="weight in the mix"),),
        reading="One more probe reads a weighted sum of all layers, and learns the"
        " weights with its coefficients. The weights add up to 1. Dashed lines are the"
        " weights of each fold. They show how far the weights depend on the texts;"
        " they are no interval, for any two folds share most of their texts.",
        folded=True,
    )


def _findings(report: ProbeReport, result: Result) -> Iterator[str]:
    """Yield where the label can be read, how sure that is, and what the mix adds."""
    best, count = report.best, result.data.sizes["site"]
    corrected = f", corrected for being the best of {count:,}" if count > 1 else ""
    control = ""
    if best.control is not None:
        control = f", against {report.number(best.control)} on control labels"
    name = f"The best site is {best.site}"
    if best.tied:
        name = (
            f"{len(best.tied):,} sites share the best score ({site_list(best.tied)});"
            f" {best.site} is the first"
        )
    yield f"{name}: {report.with_interval(best, corrected)}{control}."
    yield from _against_chance(report, result)
    if report.test is not None:
        yield from _on_the_test(report, report.test)
    if report.score == "accuracy":
        ends = zip(
            labels(result.data, "site"),
            result.data["accuracy_high"].to_numpy(),
            strict=True,
        )
        below = [site for site, end in ends if end < report.chance]
        if below:
            yield (
                f"At {site_list(below)} the probe is right less often than guessing the"
                f" largest class would be: the {report.interval_name} of each site ends"
                " below that. This is no sign that the label can be read. It happens"
                " where the texts most like a held-out text have another label: a probe"
                " that is trained on them gives it theirs. Texts that belong together,"
                " such as the two of a minimal pair, should be held out together: say"
                " so with groups."
            )
    if report.centre is not None:
        yield from _centre(report.centre)
    mix = report.mix
    if mix:
        largest = mix.largest_weight
        yield f"A probe of a mix of all sites comes to {report.with_interval(mix)}."
        yield (
            f"Its largest weight, {largest.weight:.2f}, is that of {largest.site}, as"
            f" in {largest.folds:,} of {report.folds:,} folds; weights have no"
            " interval, and noise too can give nearly all weight to one site."
        )
    if report.token != "each":
        yield f"What was probed is {standing(report.token)}."
    yield independence(report)


def _on_the_test(report: ProbeReport, test: TestScore) -> Iterator[str]:
    """Yield the score on other texts, and which of them were left out."""
    against = ""
    if test.chance is not None:
        against = f", and guessing its largest class to {report.number(test.chance)}"
    yield (
        f"On {test.data}, {counted(test.texts, 'other text')}, the probe of all rows at"
        f" {report.best.site} comes to {report.with_interval(test)}{against}."
    )
    if test.shared:
        yield (
            f"{counted(test.shared, 'row')} left out of the test: the text, or another"
            " of its group, is in the training data."
        )
    yield independence(test, f" of {test.data}")
    for alarm in test.alarms or ():
        yield _on_alarms(report, test, alarm)
        if alarm.value is None:
            # So are there for every lower rate.
            return


def _on_alarms(report: ProbeReport, test: TestScore, alarm: Alarm) -> str:
    """Say where the probe rings, or that the test has too few texts to say."""
    negative, positive = (quote(record.label) for record in report.classes or ())
    rate = f"{100 * alarm.rate:g}%"
    if alarm.value is None:
        return (
            f"There are too few texts of {negative} to say where {rate} of them"
            f" would ring: that takes {alarm.needed:,} that are independent, and"
            f" there are {test.negatives:,}."
        )
    caught = ""
    if alarm.caught is not None and alarm.interval is not None:
        low, high = alarm.interval
        caught = f", and {alarm.caught:.0%} ({low:.0%} to {high:.0%}) of {positive}"
    return (
        f"For at most {rate} of {negative} to ring, at any token of a text,"
        f" the threshold is {alarm.value:.4g}: {alarm.alarms:,} of {test.negatives:,}"
        f" independent ones ring (with 95% confidence at most {alarm.at_most:.2%} of"
        f" fresh ones){caught}."
    )


def _centre(centre: Centre) -> Iterator[str]:
    """Yield where the label is read on average, and whether that says anything."""
    low, high = centre.interval
    shallow, deep = centre.depth_interval
    yield (
        f"The centre of gravity over layers is {centre.layer:.1f} ({low:.1f} to"
        f" {high:.1f}), at {centre.depth:.0%} of the depth ({shallow:.0%} to"
        f" {deep:.0%}): the mean layer, weighted by how far each is above guessing."
    )
    if low <= centre.middle <= high:
        yield (
            f"Its interval holds the middle, {centre.middle:.1f}, which is also the"
            " centre of a label that all layers read equally well: the label is not"
            " shown to be read early or late."
        )


def _against_chance(report: ProbeReport, result: Result) -> Iterator[str]:
    """Yield which sites are better than guessing, and why where the interval of the
    best one does not show it.
    """
    best, above, smallest = report.best, report.above_chance_at, report.smallest_p
    chance = report.number(report.chance)
    guess = "the largest class" if report.score == "accuracy" else "the mean"
    if best.p is None:
        yield (
            f"There is no test against guessing {guess} ({chance}): the labels can be"
            " permuted in no other way that keeps the sizes of the classes and the"
            " order of the texts, so there is no p-value."
        )
        return
    if above:
        yield f"Better than guessing {guess} ({chance}): {site_list(above)}."
    else:
        yield f"No site is shown to be better than guessing {guess} ({chance})."
    if best.site in above and best.interval and best.interval[0] <= report.chance:
        yield _why_above(report, result, best.p)
    elif not above and best.p <= LEVEL:
        yield (
            f"Permuted labels seldom do as well as the best site (p = {best.p:.2g}),"
            f" but its interval holds {chance}, so that is not counted as better."
        )
    if smallest is not None and smallest > NOTED and report.token_scores:
        yield (
            f"The pooling was learnt again for {report.permutations:,} permutations of"
            f" the labels: the smallest p-value that is possible is {smallest:.2g}."
        )
    elif smallest is not None and smallest > NOTED:
        cannot = ", so nothing can be shown" if smallest > LEVEL else ""
        yield (
            f"The labels can be permuted in {counted(report.permutations + 1, 'way')}"
            " only: the"
            f" smallest p-value that is possible is {smallest:.2g}{cannot}."
        )


def _why_above(report: ProbeReport, result: Result, p: float) -> str:
    """Say why the best site counts as better than guessing though its interval, which
    allows for the choice of the site, reaches down to guessing.
    """
    site = report.best.site
    here = result.data.sel(site=site)
    low, high = (float(here[f"{report.score}_{end}"]) for end in ("low", "high"))
    permuted = (
        f"permuted labels reach its score in {p:.1%} of cases (corrected for all sites)"
    )
    if low > report.chance:
        return (
            f"The interval of {site} reaches down to guessing because it allows for the"
            f" choice of the best site. By itself that site comes to"
            f" {report.number(low)} to {report.number(high)}, and {permuted}, which is"
            " why it is counted."
        )
    return (
        f"The interval of {site} reaches down to guessing though {permuted}: the test"
        " asks whether anything can be read at all, the interval how well fresh texts"
        " would be predicted, which is less certain."
    )


def _limits(report: ProbeReport) -> Iterator[str]:
    """Yield what limits the findings."""
    yield from ruled(report.pooled)
    if report.interval_holds:
        yield (
            "The intervals are not 95% ones: with several classes they held the truth"
            f" in {report.interval_holds:.0%} of simulations."
        )
    if report.serial_inflation is not None:
        yield "There are no intervals: rows that drift along an order are no draws."
    elif not report.calibrated:
        together = report.groups_given or report.groups < report.texts
        unit = "groups of texts" if together else "texts"
        why = f"with as few as {report.groups:,} {unit}"
        if report.token_scores:
            why = "where scores of tokens are pooled"
        if report.smallest_p is None:
            why = "without permuted labels"
        yield f"The intervals are rough: {why} they were not calibrated."
    if report.copies:
        yield (
            f"{report.copies:,} {plural(report.copies, 'text')} came again with the"
            " same label; each text was probed once."
        )
    if report.all_equal_at:
        yield (
            f"All states are equal at {site_list(report.all_equal_at)}, so nothing can"
            " be read from them."
        )
    if report.left_out:
        yield f"{report.left_out:,} tokens have no such label and were left out."
    if report.fixed_penalty:
        yield (
            f"The penalty is {report.fixed_penalty:g} everywhere: two folds leave no"
            " inner ones to choose it on."
        )
    if report.not_converged_at:
        yield f"The fit did not converge at {site_list(report.not_converged_at)}."


def _method(report: ProbeReport) -> str:
    unit = "token" if report.token == "each" else "text"
    predicted = f"the number that each {unit} is labelled with"
    if report.classes is not None:
        names = [quote(record.label) for record in report.classes]
        # The labels themselves where they are few.
        predicted = f"the label of each {unit}, {in_series(names, 'or')}"
        if len(names) > FEW_LABELS or report.class_count > len(names):
            predicted = f"which of {report.class_count:,} labels each {unit} has"
    score = "R², 0 for the mean, 1 at best"
    if report.score == "accuracy":
        score = "the share of labels that it gets right"
    control = "one drawn for each token id"
    if report.control.kind == "shuffled":
        control = "the true ones, permuted as the groups of texts allow"
    return (
        "A linear probe was trained on the states of every layer to predict"
        f" {predicted}, and tested on texts that it had not seen ({report.rows:,} rows"
        f" of {report.texts:,} texts, {report.folds} folds). The line is {score}, and"
        f" the band is its {report.interval_name}. A probe can memorise, so another is"
        f" trained on control labels ({control}): what counts is how much better the"
        " probe is on the true labels."
    )
