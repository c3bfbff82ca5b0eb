"""What a linear probe reads from every layer: views, findings and sections."""

from collections.abc import Iterator, Sequence

import numpy as np

from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site, summarise
from hiddenscope.views.drawing import as_prose, labels, quoted
from hiddenscope.views.independence import independence
from hiddenscope.views.standing import standing
from hiddenscope.views.values import Lines, Section, Series, View

LEVEL = 0.05  # the largest p-value that shows something
NOTED = 0.01  # a smallest possible p-value above this is told
FEW_LABELS = 6  # so many are named


def views(result: Result) -> Iterator[View]:
    """The score along the layers, beside its control and the mix of all sites; then the
    weights of that mix.
    """
    data, score = result.data, result.facts["score"]
    sites = labels(data, "site")
    low, high = (data[f"{score}_{end}"].to_numpy() for end in ("low", "high"))
    series = [
        Series(
            "probe", data[score].to_numpy(), low, high, band=_interval(result.facts)
        ),
        Series("control labels", data["control"].to_numpy()),
    ]
    if "majority" in data:
        series.append(
            Series(
                "largest class",
                np.full(len(sites), float(data["majority"])),
                style="dash",
            )
        )
    if f"mix_{score}" in data:
        series.append(
            Series(
                "mix of all sites",
                np.full(len(sites), float(data[f"mix_{score}"])),
                style="dash",
            )
        )
    title = (
        f"What a linear probe reads from {result.source.get('model', 'the states')}:"
        f" {result.facts['data']}"
    )
    yield Lines(
        title, sites, tuple(series), y_name="accuracy" if score == "accuracy" else "R²"
    )
    if "mix_weight" in data:
        low, high = (data[f"mix_weight_{end}"].to_numpy() for end in ("low", "high"))
        weight = Series(
            "weight",
            data["mix_weight"].to_numpy(),
            low,
            high,
            band="least and most of the folds",
        )
        yield Lines(
            "The weight of each site in the mix",
            sites,
            (weight,),
            y_name="weight in the mix",
        )


def findings(result: Result) -> Iterator[str]:
    """Where the label can be read, how sure that is, and what the mix adds."""
    facts, score = result.facts, result.facts["score"]
    best = facts["best"]
    count = result.data.sizes["site"]
    chosen = f", corrected for being the best of {count:,}" if count > 1 else ""
    control = ""
    if best["control"] is not None:
        control = f", against {_number(best['control'], score)} on control labels"
    yield (
        f"The best site is {best['site']}:"
        f" {_with_interval(best, score, chosen)}{control}."
    )
    yield from _against_chance(result)
    if below := _below_chance(result):
        yield (
            f"At {_sites(below)} the probe is right less often than guessing the"
            f" largest class would be: the {_interval(facts)} of each site ends below"
            " that. This is no sign that the label can be read. It happens where the"
            " texts most like a held-out text have another label: a probe that is"
            " trained on them gives it theirs. Texts that belong together, such as the"
            " two of a minimal pair, should be held out together: say so with groups."
        )
    if mix := facts.get("mix"):
        top = mix["largest_weight"]
        yield (
            f"A probe of a mix of all sites comes to {_with_interval(mix, score)}; its"
            f" largest weight, {top['weight']:.2f}, is that of {top['site']}."
        )
    if facts["token"] != "each":
        yield f"What was probed is {standing(facts['token'])}."
    yield independence(facts)
    yield from _limits(facts)


def _against_chance(result: Result) -> Iterator[str]:
    """Which sites are better than guessing, and why where the interval of the best one
    does not show it.
    """
    facts, score, best = result.facts, result.facts["score"], result.facts["best"]
    guess = (
        f"{'the largest class' if score == 'accuracy' else 'the mean'}"
        f" ({_number(facts['chance'], score)})"
    )
    smallest, p = facts.get("smallest_p", 0.0), best["p"]
    if p is None:
        yield (
            f"There is no test against guessing {guess}: the labels can be permuted in"
            " no other way, so there is no p-value."
        )
        return
    above = facts["above_chance_at"]
    if above:
        yield f"Better than guessing {guess}: {_sites(above)}."
    else:
        yield f"No site is shown to be better than guessing {guess}."
    reaches = best["interval"][0] <= facts["chance"]
    if best["site"] in above and reaches:
        yield _why_above(result)
    elif not above and p <= LEVEL:
        yield (
            f"Permuted labels seldom do as well as the best site (p = {p:.2g}), but its"
            f" interval holds {_number(facts['chance'], score)}, so that is not counted"
            " as better."
        )
    if smallest > NOTED:
        few = f"{facts['permutations'] + 1:,}" if facts["permutations"] else "1"
        cannot = ", so nothing can be shown" if smallest > LEVEL else ""
        yield (
            f"The labels can be permuted in {few} ways only: the smallest p-value that"
            f" is possible is {smallest:.2g}{cannot}."
        )


def _why_above(result: Result) -> str:
    """Why a site counts as better than guessing though the interval that is told of it
    reaches down to guessing.
    """
    facts, score, best = result.facts, result.facts["score"], result.facts["best"]
    here = result.data.sel(site=best["site"])
    low, high = (
        _number(float(here[f"{score}_{end}"]), score) for end in ("low", "high")
    )
    permuted = (
        f"permuted labels reach its score in {best['p']:.1%} of cases (corrected for"
        " all sites)"
    )
    if float(here[f"{score}_low"]) > facts["chance"]:
        return (
            f"The interval of {best['site']} reaches down to guessing because it allows"
            f" for the choice of the best site. By itself that site comes to {low} to"
            f" {high}, and {permuted}, which is why it is counted."
        )
    return (
        f"The interval of {best['site']} reaches down to guessing though {permuted}:"
        " the test asks whether anything can be read at all, the interval how well"
        " fresh texts would be predicted, which is less certain."
    )


def _limits(facts: Facts) -> Iterator[str]:
    """What limits the findings."""
    if holds := facts.get("interval_holds"):
        yield (
            "The intervals are not 95% ones: with several classes they held the truth"
            f" in {holds:.0%} of simulations."
        )
    if not facts.get("calibrated", True):
        groups = facts.get("groups", facts["texts"])
        together = facts.get("groups_given") or groups < facts["texts"]
        few = f"{groups:,} {'groups of texts' if together else 'texts'}"
        yield f"The intervals are rough: with as few as {few} they were not calibrated."
    if copies := facts.get("copies"):
        yield (
            f"{copies:,} {_texts(copies)} again with the same label; each text was"
            " probed once."
        )
    if equal := facts.get("all_equal_at"):
        yield (
            f"All states are equal at {_sites(equal)}, so nothing can be read from"
            " them."
        )
    if left_out := facts.get("left_out"):
        yield f"{left_out:,} tokens have no such label and were left out."
    if penalty := facts.get("fixed_penalty"):
        yield (
            f"The penalty is {penalty:g} everywhere: two folds leave no inner ones to"
            " choose it on."
        )
    if not_converged := facts.get("not_converged_at"):
        yield f"The fit did not converge at {_sites(not_converged)}."


def _texts(count: int) -> str:
    return "text came" if count == 1 else "texts came"


def _below_chance(result: Result) -> list[str]:
    """Sites whose interval ends below what guessing the largest class comes to."""
    if result.facts["score"] != "accuracy":
        return []
    high = result.data["accuracy_high"].to_numpy()
    return [
        site
        for site, end in zip(labels(result.data, "site"), high, strict=True)
        if end < result.facts["chance"]
    ]


def _interval(facts: Facts) -> str:
    """What an interval is called: by its level, or by how often it held where that is
    less.
    """
    holds = facts.get("interval_holds")
    return f"interval (held in {holds:.0%} of simulations)" if holds else "95% interval"


def _with_interval(facts: Facts, score: str, remark: str = "") -> str:
    if "interval" not in facts:
        return f"{_number(facts[score], score)} (its uncertainty is not known)"
    low, high = (_number(end, score) for end in facts["interval"])
    return f"{_number(facts[score], score)} ({low} to {high}{remark})"


def _number(value: float, score: str) -> str:
    return f"{100 * value:.0f}%" if score == "accuracy" else f"R² {value:.2f}"


def _sites(names: Sequence[str]) -> str:
    return summarise(map(Site.parse, names))


def sections(result: Result) -> Iterator[Section]:
    """How the probes were trained and tested, the findings, and the mix."""
    scores, *weights = views(result)
    yield Section(
        "What can a probe read from each layer?",
        as_prose(findings(result)),
        (scores,),
        _method(result),
    )
    if weights:
        how = (
            "One more probe reads a weighted sum of all layers, and learns the weights"
            " with its coefficients. The weights add up to 1; the band is their range"
            " over the folds."
        )
        yield Section("All layers together", "", tuple(weights), how, folded=True)


def _predicted(facts: Facts) -> str:
    """Name what the probe predicts: the labels themselves where they are few."""
    unit = "token" if facts["token"] == "each" else "text"
    if "classes" not in facts:
        return f"the number that each {unit} is labelled with"
    names = [quoted(str(one["label"])) for one in facts["classes"]]
    if len(names) > FEW_LABELS or facts["class_count"] > len(names):
        return f"which of {facts['class_count']:,} labels each {unit} has"
    return (
        f"the label of each {unit},"
        f" {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}"
    )


def _method(result: Result) -> str:
    facts = result.facts
    score = (
        "the share of labels that it gets right"
        if facts["score"] == "accuracy"
        else "R², 0 for the mean, 1 at best"
    )
    if facts["control"]["kind"] == "shuffled":
        control = "the true ones, permuted as the groups of texts allow"
    else:
        control = "one drawn for each token id"
    return (
        "A linear probe was trained on the states of every layer to predict"
        f" {_predicted(facts)}, and tested on texts that it had not seen"
        f" ({facts['rows']:,} rows of {facts['texts']:,} texts, {facts['folds']}"
        f" folds). The line is {score}, and the band is its {_interval(facts)}. A probe"
        f" can memorise, so another is trained on control labels ({control}): what"
        " counts is how much better the probe is on the true labels."
    )
