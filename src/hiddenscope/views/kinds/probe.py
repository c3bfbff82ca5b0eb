"""Probes: what a linear probe reads from every layer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, cast

from hiddenscope.results import Result, Section
from hiddenscope.results.drawing import labels, level
from hiddenscope.results.pictures import Lines, Series, View
from hiddenscope.results.sentences import (
    as_prose,
    in_series,
    independence,
    plural,
    quote,
    site_list,
    standing,
)

if TYPE_CHECKING:
    from hiddenscope.analyses.probe.facts import ProbeFacts, ScoreFacts, WeightFacts

# The largest p-value that shows something.
LEVEL = 0.05
# A finding says so if no p-value can be smaller than this.
NOTED = 0.01
# So many labels are named, and no more.
FEW_LABELS = 6


def views(result: Result) -> Iterator[View]:
    """Yield the score along the layers, beside its control and the mix of all sites;
    then the weights of that mix.
    """
    data, facts = result.data, cast("ProbeFacts", result.facts)
    score, sites = facts["score"], labels(data, "site")
    probe = Series(
        "probe",
        data[score].to_numpy(),
        data[f"{score}_low"].to_numpy(),
        data[f"{score}_high"].to_numpy(),
        band=_interval(facts),
    )
    series = [probe, Series("control labels", data["control"].to_numpy())]
    levels = {"largest class": "majority", "mix of all sites": f"mix_{score}"}
    for name, variable in levels.items():
        if variable in data:
            series.append(level(name, float(data[variable]), len(sites)))
    yield Lines(
        f"What a linear probe reads from {result.source.get('model', 'the states')}:"
        f" {facts['data']}",
        sites,
        tuple(series),
        y_name="accuracy" if score == "accuracy" else "R²",
    )
    if "mix_weight" in data:
        yield Lines(
            "The weight of each site in the mix",
            sites,
            tuple(_mix_weights(result)),
            y_name="weight in the mix",
        )


def _mix_weights(result: Result) -> Iterator[Series]:
    """Yield the weights of all rows, and those of each fold."""
    data = result.data
    yield Series("all rows", data["mix_weight"].to_numpy())
    # Older files have the weights of all rows alone.
    if "mix_weight_fold" in data:
        for fold, weights in enumerate(data["mix_weight_fold"].to_numpy().T):
            yield Series(f"fold {fold}", weights, style="dash")


def findings(result: Result) -> Iterator[str]:
    """Yield where the label can be read, how sure that is, and what the mix adds."""
    facts = cast("ProbeFacts", result.facts)
    best, score = facts["best"], facts["score"]
    count = result.data.sizes["site"]
    corrected = f", corrected for being the best of {count:,}" if count > 1 else ""
    control = ""
    if best["control"] is not None:
        control = f", against {_number(best['control'], score)} on control labels"
    yield (
        f"The best site is {best['site']}:"
        f" {_with_interval(best, score, corrected)}{control}."
    )
    yield from _against_chance(result)
    below = _below_chance(result)
    if below:
        yield (
            f"At {site_list(below)} the probe is right less often than guessing the"
            f" largest class would be: the {_interval(facts)} of each site ends below"
            " that. This is no sign that the label can be read. It happens where the"
            " texts most like a held-out text have another label: a probe that is"
            " trained on them gives it theirs. Texts that belong together, such as the"
            " two of a minimal pair, should be held out together: say so with groups."
        )
    mix = facts.get("mix")
    if mix:
        yield f"A probe of a mix of all sites comes to {_with_interval(mix, score)}."
        yield _largest_weight(mix["largest_weight"], facts["folds"])
    if facts["token"] != "each":
        yield f"What was probed is {standing(facts['token'])}."
    yield independence(facts)
    yield from _limits(facts)


def sections(result: Result) -> Iterator[Section]:
    """Yield the scores with the findings and the method, then the mix."""
    scores, *weights = views(result)
    yield Section(
        "What can a probe read from each layer?",
        as_prose(findings(result)),
        (scores,),
        _method(cast("ProbeFacts", result.facts)),
    )
    if weights:
        yield Section(
            "All layers together",
            "",
            tuple(weights),
            "One more probe reads a weighted sum of all layers, and learns the weights"
            " with its coefficients. The weights add up to 1. Dashed lines are the"
            " weights of each fold. They show how far the weights depend on the texts;"
            " they are no interval, for any two folds share most of their texts.",
            folded=True,
        )


def _largest_weight(largest: "WeightFacts", folds: int) -> str:
    """Name the site of the largest weight, and say how far to trust it."""
    in_folds = ""
    if "folds" in largest:
        in_folds = f", as in {largest['folds']:,} of {folds:,} folds"
    return (
        f"Its largest weight, {largest['weight']:.2f}, is that of"
        f" {largest['site']}{in_folds}; weights have no interval, and noise too can"
        " give nearly all weight to one site."
    )


def _against_chance(result: Result) -> Iterator[str]:
    """Yield which sites are better than guessing, and why where the interval of the
    best one does not show it.
    """
    facts = cast("ProbeFacts", result.facts)
    best, above = facts["best"], facts["above_chance_at"]
    chance = _number(facts["chance"], facts["score"])
    guess = "the largest class" if facts["score"] == "accuracy" else "the mean"
    p = best["p"]
    if p is None:
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
    if best["site"] in above and best["interval"][0] <= facts["chance"]:
        yield _why_above(result, p)
    elif not above and p <= LEVEL:
        yield (
            f"Permuted labels seldom do as well as the best site (p = {p:.2g}), but its"
            f" interval holds {chance}, so that is not counted as better."
        )
    smallest = facts.get("smallest_p")
    if smallest is not None and smallest > NOTED:
        ways = f"{facts['permutations'] + 1:,}" if facts["permutations"] else "1"
        cannot = ", so nothing can be shown" if smallest > LEVEL else ""
        yield (
            f"The labels can be permuted in {ways} ways only: the smallest p-value that"
            f" is possible is {smallest:.2g}{cannot}."
        )


def _why_above(result: Result, p: float) -> str:
    """Say why the best site counts as better than guessing though its interval, which
    allows for the choice of the site, reaches down to guessing.
    """
    facts = cast("ProbeFacts", result.facts)
    score, site = facts["score"], facts["best"]["site"]
    here = result.data.sel(site=site)
    low, high = float(here[f"{score}_low"]), float(here[f"{score}_high"])
    permuted = (
        f"permuted labels reach its score in {p:.1%} of cases (corrected for all sites)"
    )
    if low > facts["chance"]:
        return (
            f"The interval of {site} reaches down to guessing because it allows for the"
            f" choice of the best site. By itself that site comes to"
            f" {_number(low, score)} to {_number(high, score)}, and {permuted}, which"
            " is why it is counted."
        )
    return (
        f"The interval of {site} reaches down to guessing though {permuted}: the test"
        " asks whether anything can be read at all, the interval how well fresh texts"
        " would be predicted, which is less certain."
    )


def _below_chance(result: Result) -> list[str]:
    """Return the sites whose interval ends below guessing the largest class."""
    if result.facts["score"] != "accuracy":
        return []
    ends = result.data["accuracy_high"].to_numpy()
    pairs = zip(labels(result.data, "site"), ends, strict=True)
    return [site for site, end in pairs if end < result.facts["chance"]]


def _limits(facts: "ProbeFacts") -> Iterator[str]:
    """Yield what limits the findings."""
    holds = facts.get("interval_holds")
    if holds:
        yield (
            "The intervals are not 95% ones: with several classes they held the truth"
            f" in {holds:.0%} of simulations."
        )
    if not facts.get("calibrated", True):
        groups = facts.get("groups", facts["texts"])
        together = facts.get("groups_given") or groups < facts["texts"]
        few = f"{groups:,} {'groups of texts' if together else 'texts'}"
        why = f"with as few as {few}"
        if facts.get("smallest_p", 1) is None:
            why = "without permuted labels"
        yield f"The intervals are rough: {why} they were not calibrated."
    copies = facts.get("copies")
    if copies:
        yield (
            f"{copies:,} {plural(copies, 'text')} came again with the same label; each"
            " text was probed once."
        )
    equal = facts.get("all_equal_at")
    if equal:
        yield (
            f"All states are equal at {site_list(equal)}, so nothing can be read from"
            " them."
        )
    left_out = facts.get("left_out")
    if left_out:
        yield f"{left_out:,} tokens have no such label and were left out."
    penalty = facts.get("fixed_penalty")
    if penalty:
        yield (
            f"The penalty is {penalty:g} everywhere: two folds leave no inner ones to"
            " choose it on."
        )
    not_converged = facts.get("not_converged_at")
    if not_converged:
        yield f"The fit did not converge at {site_list(not_converged)}."


def _interval(facts: "ProbeFacts") -> str:
    """Name the interval by its level, or by how often it held where that is less."""
    holds = facts.get("interval_holds")
    if holds:
        return f"interval (held in {holds:.0%} of simulations)"
    return "95% interval"


def _with_interval(
    facts: "ScoreFacts", score: Literal["accuracy", "r2"], remark: str = ""
) -> str:
    value = _number(facts[score], score)
    if "interval" not in facts:
        return f"{value} (its uncertainty is not known)"
    low, high = (_number(end, score) for end in facts["interval"])
    return f"{value} ({low} to {high}{remark})"


def _number(value: float, score: str) -> str:
    return f"{100 * value:.0f}%" if score == "accuracy" else f"R² {value:.2f}"


def _predicted(facts: "ProbeFacts") -> str:
    """Name what the probe predicts: the labels themselves where they are few."""
    unit = "token" if facts["token"] == "each" else "text"
    if "classes" not in facts:
        return f"the number that each {unit} is labelled with"
    names = [quote(str(record["label"])) for record in facts["classes"]]
    if len(names) > FEW_LABELS or facts["class_count"] > len(names):
        return f"which of {facts['class_count']:,} labels each {unit} has"
    return f"the label of each {unit}, {in_series(names, 'or')}"


def _method(facts: "ProbeFacts") -> str:
    score = "R², 0 for the mean, 1 at best"
    if facts["score"] == "accuracy":
        score = "the share of labels that it gets right"
    control = "one drawn for each token id"
    if facts["control"]["kind"] == "shuffled":
        control = "the true ones, permuted as the groups of texts allow"
    return (
        "A linear probe was trained on the states of every layer to predict"
        f" {_predicted(facts)}, and tested on texts that it had not seen"
        f" ({facts['rows']:,} rows of {facts['texts']:,} texts, {facts['folds']}"
        f" folds). The line is {score}, and the band is its {_interval(facts)}. A probe"
        f" can memorise, so another is trained on control labels ({control}): what"
        " counts is how much better the probe is on the true labels."
    )
