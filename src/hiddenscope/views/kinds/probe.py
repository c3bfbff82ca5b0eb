"""What a linear probe reads from every layer: views, findings and sections."""

from collections.abc import Iterator, Sequence

import numpy as np

from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site, summarise
from hiddenscope.views.drawing import as_prose, labels, quoted
from hiddenscope.views.values import Lines, Section, Series, View

FEW_LABELS = 6  # so many are named


def views(result: Result) -> Iterator[View]:
    """The score along the layers, beside its control and the mix of all sites; then the weights of that mix."""
    data, score = result.data, result.facts["score"]
    sites = labels(data, "site")
    low, high = (data[f"{score}_{end}"].to_numpy() for end in ("low", "high"))
    series = [
        Series("probe", data[score].to_numpy(), low, high, band=_interval(result.facts)),
        Series("control labels", data["control"].to_numpy()),
    ]
    if "majority" in data:
        series.append(Series("largest class", np.full(len(sites), float(data["majority"])), style="dash"))
    if f"mix_{score}" in data:
        series.append(Series("mix of all sites", np.full(len(sites), float(data[f"mix_{score}"])), style="dash"))
    title = f"What a linear probe reads from {result.source.get('model', 'the states')}: {result.facts['data']}"
    yield Lines(title, sites, tuple(series), y_name="accuracy" if score == "accuracy" else "R²")
    if "mix_weight" in data:
        low, high = (data[f"mix_weight_{end}"].to_numpy() for end in ("low", "high"))
        weight = Series("weight", data["mix_weight"].to_numpy(), low, high, band="least and most of the folds")
        yield Lines("The weight of each site in the mix", sites, (weight,), y_name="weight in the mix")


def findings(result: Result) -> Iterator[str]:
    """Where the label can be read, how sure that is, and what the mix adds."""
    facts, score = result.facts, result.facts["score"]
    best, guess = facts["best"], "the largest class" if score == "accuracy" else "the mean"
    count = result.data.sizes["site"]
    chosen = f", corrected for being the best of {count:,}" if count > 1 else ""
    yield (
        f"The best site is {best['site']}: {_with_interval(best, score, chosen)}, against "
        f"{_number(best['control'], score)} on control labels."
    )
    if facts["above_chance_at"]:
        yield f"Better than guessing {guess} ({_number(facts['chance'], score)}): {_sites(facts['above_chance_at'])}."
    else:
        yield f"No site is shown to be better than guessing {guess} ({_number(facts['chance'], score)})."
    if below := _below_chance(result):
        yield (
            f"At {_sites(below)} the {_interval(facts)} of each site ends below that. Nothing can be read there: "
            "it comes about where an unseen text resembles texts of another label."
        )
    if mix := facts.get("mix"):
        top = mix["largest_weight"]
        yield (
            f"A probe of a mix of all sites comes to {_with_interval(mix, score)}; its largest weight, "
            f"{top['weight']:.2f}, is that of {top['site']}."
        )
    if holds := facts.get("interval_holds"):
        yield f"The intervals are not 95% ones: with several classes they held the truth in {holds:.0%} of simulations."
    if not facts.get("calibrated", True):
        yield f"The intervals are rough: with as few as {facts['texts']:,} texts they were not calibrated."
    if equal := facts.get("all_equal_at"):
        yield f"All states are equal at {_sites(equal)}, so nothing can be read from them."
    if left_out := facts.get("left_out"):
        yield f"{left_out:,} tokens have no such label and were left out."
    if penalty := facts.get("fixed_penalty"):
        yield f"The penalty is {penalty:g} everywhere: two folds leave no inner ones to choose it on."
    if not_converged := facts.get("not_converged_at"):
        yield f"The fit did not converge at {_sites(not_converged)}."


def _below_chance(result: Result) -> list[str]:
    """Sites whose interval ends below what guessing the largest class comes to."""
    if result.facts["score"] != "accuracy":
        return []
    high = result.data["accuracy_high"].to_numpy()
    return [site for site, end in zip(labels(result.data, "site"), high, strict=True) if end < result.facts["chance"]]


def _interval(facts: Facts) -> str:
    """What an interval is called: by its level, or by how often it held where that is less."""
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
    yield Section("What can a probe read from each layer?", as_prose(findings(result)), (scores,), _method(result))
    if weights:
        how = (
            "One more probe reads a weighted sum of all layers, and learns the weights with its coefficients. The "
            "weights add up to 1; the band is their range over the folds."
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
    return f"the label of each {unit}, {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}"


def _method(result: Result) -> str:
    facts = result.facts
    score = (
        "the share of labels that it gets right" if facts["score"] == "accuracy" else "R², 0 for the mean, 1 at best"
    )
    if facts["control"]["kind"] == "shuffled":
        control = "the true ones, shuffled between texts"
    else:
        control = "one drawn for each token id"
    return (
        f"A linear probe was trained on the states of every layer to predict {_predicted(facts)}, and tested "
        f"on texts that it had not seen ({facts['rows']:,} rows of {facts['texts']:,} texts, {facts['folds']} folds). "
        f"The line is {score}, and the band is its {_interval(facts)}. A probe can memorise, so another is trained "
        f"on control labels ({control}): what counts is how much better the probe is on the true labels."
    )
