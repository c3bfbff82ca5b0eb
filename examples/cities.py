"""Ask whether hidden states tell Toronto from Montreal, and serve as embeddings.

    python examples/cities.py

Six parts. 1: how sentences about two cities lie in every layer of three models, with
the numbers of the full space beside the pictures, and whether the shipped incomplete
and complete sentences differ. 2: the same for pairs: each incomplete sentence, and the
same with its city and a full stop. 3: does the model predict the city, and do
sentences lie closer to their class where it does? 4: the trap, sentences whose last
token is the city. 5: a probe that must tell the city of landmarks it has not seen. 6:
retrieval: is the nearest text a paraphrase, or the same wording about the other city?
Bags of words and a sentence model are the rivals in 5 and 6. `--quick` takes one model
and a few texts, `--model NAME` another decoder in place of both.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from city_texts import (
    CITIES,
    DATA,
    LANDMARKS,
    RetrievalTexts,
    columns,
    landmarks,
    paired,
    retrieval_texts,
    shipped,
)
from intervals import (
    Mean,
    mean_interval,
    median_interval,
    rank_correlation,
    ranks_within,
    share_interval,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import silhouette_samples
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict

import hiddenscope as hs
from hiddenscope.measures.permutations import permuted
from hiddenscope.texts import Labelled

DECODERS = ("smollm2", "gemma3-270m")
SENTENCE_MODEL = "minilm"
EVERY_LAYER = "layer.*,final"
QUICK_SITES = "layer.0,layer.4"
EARLY = "layer.0,layer.1,layer.2,layer.4"
PICTURED = ("layer.0", "layer.12", "layer.24", "layer.29")
# Where closeness is compared with prediction: chosen before it was looked at.
CHOSEN_DEPTH = 0.75
SHUFFLES = 999


def main() -> None:
    """Run the six parts, print what they say and draw it."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [options.model] if options.model else list(DECODERS)
    sites, few = EVERY_LAYER, None
    if options.quick:
        names, sites, few = names[:1], QUICK_SITES, 5
    models = [hs.load(name, device=options.device) for name in names]
    sentence_model = hs.load(SENTENCE_MODEL, device=options.device)
    report = Report(options.out / "findings.txt")

    report("1. Separation in every layer")
    data = shipped(few)
    projected = [hs.project(models, data, method="pca", pool="last", sites=sites)]
    if not options.quick:
        # A sentence model is read as it was trained: by the mean of all tokens.
        projected.append(hs.project(sentence_model, data, method="pca"))
    report(*(result.summary() for result in projected))
    projected[0].save(options.out / "cities.html")
    save_all(projected, options.out, "shipped")
    draw_separation(projected, options.out / "cities-separation.png")

    report("\n2. Pairs: the same sentence, incomplete and completed")
    pairs = paired(few)
    compared = [hs.project(models, pairs, method="pca", pool="last", sites=sites)]
    if not options.quick:
        compared.append(hs.project(sentence_model, pairs, method="pca"))
    for result in compared:
        report(result.summary(), *compared_lines(result))
    save_all(compared, options.out, "pairs")
    draw_comparison(compared, projected, options.out / "cities-comparison.png")

    report("\n3. Does the model predict the city, and does separation follow from it?")
    predicted = {}
    for model in models:
        predicted[model.name] = premise(model, pairs["incomplete"], report)
    draw_premise(predicted, pairs["incomplete"], options.out / "cities-premise.png")

    report("\n4. The trap: the city is the last token")
    trapped = trap(models[0], report)
    draw_trap(trapped, options.out / "cities-trap.png")

    report("\n5. Landmarks that the probe has not seen")
    sentences = landmarks(few)
    report(f"  bag of words: {bag_of_words(sentences).share()}")
    for model in (*models, sentence_model):
        sites_probed = probe_sites(model, options.quick)
        result = hs.probe(model, sentences, sites=sites_probed)
        report_probe(model.name, result, report)

    report(
        "\n6. The nearest text: a paraphrase, or the same wording of the other city?"
    )
    facts = retrieval_texts(few)
    scores = rivals(sentence_model, facts)
    for model in models:
        layers = scores_by_layer(model, facts, sites)
        for pool, by_site in layers.items():
            name = f"{model.name}, {pool}"
            scores[name], chosen = cross_fitted(by_site, facts)
            *_, scores[f"{name} of final"] = by_site.values()
            report_layers(name, by_site, chosen, report)
    report_retrieval(scores, facts, report)
    draw_retrieval(scores, facts, options.out / "cities-retrieval.png")

    results = {"shipped": projected, "pairs": compared}
    numbers: dict[str, Any] = {"predicted": predicted}
    for name, of_kind in results.items():
        numbers[name] = [result.facts["comparisons"] for result in of_kind]
    as_json = json.dumps(numbers, indent=1, default=float)
    (options.out / "findings.json").write_text(as_json + "\n", encoding="utf-8")
    if not options.quick and not options.model:
        draw_picture(projected[0], "PCA", options.out / "cities-pca.png")
        mapped = pictured(models[0])
        draw_picture(mapped, "UMAP", options.out / "cities-umap.png")
        for suffix in ("html", "nc"):
            mapped.save(options.out / f"cities-umap.{suffix}")


def save_all(results: list[hs.Result], folder: Path, name: str) -> None:
    """Keep results, to be opened again with `hs.Result.load`."""
    for number, result in enumerate(results):
        result.save(folder / f"{name}-{number}.nc")


class Report:
    """Print what was found, and keep it in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def __call__(self, *lines: str) -> None:
        """Print lines, and add them to the file."""
        for line in lines:
            print(line, flush=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def compared_lines(result: hs.Result) -> list[str]:
    """Return the comparison of two kinds at every site of every model."""
    lines = []
    for model, data in by_model(result):
        lines.append(f"  {model}: site, dispersions, ratio, p; difference of shares, p")
        for site in data["site"].values:
            here = data.sel(site=site)
            first, second = here["dispersion"].values
            ratio, share = here["dispersion_ratio"], here["neighbour_difference"]
            if np.isfinite(first - second):
                lines.append(
                    f"    {site}: {first:.2f}, {second:.2f}, {float(ratio):.2f},"
                    f" {float(here['dispersion_ratio_p']):.3f}; {float(share):+.2f},"
                    f" {float(here['neighbour_difference_p']):.3f}"
                )
    return lines


def by_model(result: hs.Result) -> list[tuple[str, Any]]:
    """Return the numbers of each model, without the sites that it lacks."""
    parts = []
    for model in dict.fromkeys(part["model"] for part in result.facts["parts"]):
        data = result.data
        if "model" in data.dims:
            data = data.sel(model=model)
        present = np.isfinite(data["distinct"].values).any(0)
        parts.append((model, data.isel(site=present)))
    return parts


def premise(model: hs.Model, data: Labelled, report: Report) -> dict[str, list[float]]:
    """Say how often the model predicts the city, and whether closeness follows."""
    texts, labels = columns(data)
    probability, rank = predictions(model, texts)
    right = np.array([CITIES.index(label) for label in labels])
    each = np.arange(len(texts))
    of_right, of_wrong = probability[each, right], probability[each, 1 - right]
    ranks = rank[each, right]
    odds = np.log(of_right) - np.log(of_wrong)
    groups = data.groups
    median_rank = median_interval(ranks, groups)
    median = median_interval(of_right, groups)
    first = share_interval(ranks == 1, groups)
    report(
        f"  {model.name}: {len(texts)} sentences, {len(set(groups))} groups",
        f"    right city above the wrong one: {share_interval(odds > 0, groups).share()}",
        f"    right city first of all tokens: {first.share()}",
        f"    rank of the right city, median over groups: {median_rank.value:.0f}"
        f" ({median_rank.low:.0f} to {median_rank.high:.0f})",
        f"    its probability, median over groups: {median.value:.1%}"
        f" ({median.low:.1%} to {median.high:.1%})",
        f"    log-odds of right against wrong, mean: {odds_words(odds, groups)}",
    )
    for city in CITIES:
        inside = np.array(labels) == city
        named = [group for group, here in zip(groups, inside, strict=True) if here]
        above = share_interval(odds[inside] > 0, named)
        report(
            f"    {city}: above the other {above.share()}, median rank"
            f" {np.median(ranks[inside]):.0f}, log-odds {odds_words(odds[inside], named)}"
        )
    follow(model, data, odds, report)
    return {"odds": odds.tolist(), "rank": ranks.tolist(), "p": of_right.tolist()}


def odds_words(odds: np.ndarray, groups: Sequence[str]) -> str:
    """Say the mean of log-odds with its interval."""
    mean = mean_interval(odds, groups)
    return f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"


def predictions(model: hs.Model, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability and the rank of each city as the next token.

    A city of several tokens stands for its first one.
    """
    probability, rank = np.zeros((2, len(texts), len(CITIES)))
    for column, city in enumerate(CITIES):
        ids = model.tokenizer(f" {city}", add_special_tokens=False)["input_ids"]
        result = hs.lens(model, texts, target=ids[0], sites="layer.-1")
        last = result.data.isel(site=-1)
        text = last["text"].values
        # The last token of each text.
        places = [np.flatnonzero(text == number)[-1] for number in range(len(texts))]
        probability[:, column] = last["target_probability"].values[places]
        rank[:, column] = last["target_rank"].values[places]
    return probability, rank


def follow(model: hs.Model, data: Labelled, odds: np.ndarray, report: Report) -> None:
    """Say whether sentences with higher odds of their city lie closer to their class."""
    texts, labels = columns(data)
    states = model.capture(texts, EVERY_LAYER)
    closeness = {}
    for site in states.sites:
        vectors = np.asarray(states.pool("last", site), float)
        # Where all sentences with one last word are equal, none is nearer than another.
        if len(np.unique(vectors, axis=0)) == len(texts):
            closeness[str(site)] = silhouette_samples(vectors, labels)
    layers = len(states.sites) - 2
    chosen = f"layer.{round(CHOSEN_DEPTH * layers)}"
    correlation = rank_correlation(closeness[chosen], odds, labels, data.groups)
    report(
        f"    log-odds and silhouette of a sentence at {chosen} (chosen beforehand):"
        f" rank correlation {correlation.signed()}"
    )
    # Odds are exchanged among groups of a city, in the same way for every layer.
    orders = permuted(
        torch.tensor(odds), SHUFFLES, 0, list(data.groups), strata=labels
    ).labellings.numpy()
    odds_ranks = np.array([ranks_within(order, labels) for order in orders])
    near_ranks = [ranks_within(near, labels) for near in closeness.values()]
    under = np.array(near_ranks) @ odds_ranks.T
    largest = np.abs(under).max(0)
    for site, (true, *_) in zip(closeness, under, strict=True):
        p = np.mean(largest >= abs(true) - 1e-9)
        report(f"      {site}: {true:+.2f}, p corrected for all layers {p:.3f}")


def trap(model: hs.Model, report: Report) -> hs.Result:
    """Compare sentences that stop before the city with the same that end in it."""
    data = hs.read("cities-incomplete")
    pairs = zip(*columns(data), strict=True)
    named = [f"{text} {city}" for text, city in pairs]
    sets = {"stops before": data, "ends in the city": (named, data.labels)}
    result = hs.project(model, sets, method="pca", sites=EARLY, pool="last")
    scores = result.data[["neighbour", "silhouette", "silhouette_p"]]
    first = scores.isel(site=0).to_dataframe()
    report(first.to_string())
    return result


def bag_of_words(data: Labelled) -> Mean:
    """Score a logistic regression on words, with whole landmarks held out.

    One landmark of each city is held out at a time, so that the classes that are left
    stay equal. Otherwise a model that knows nothing would name the larger one, and be
    wrong.
    """
    texts, labels = columns(data)
    words = TfidfVectorizer().fit_transform(texts)
    number = {}
    for places in LANDMARKS.values():
        for index, place in enumerate(places):
            number[place] = index
    folds = [number[place] for place in data.groups]
    predicted = cross_val_predict(
        LogisticRegression(), words, labels, groups=folds, cv=LeaveOneGroupOut()
    )
    is_right = predicted == np.array(labels)
    return share_interval(is_right, data.groups)


def probe_sites(model: hs.Model, quick: bool) -> str:
    """Return every fourth layer of a deep model, and `final`; else every layer."""
    if model.name == SENTENCE_MODEL:
        return EVERY_LAYER
    if quick:
        return QUICK_SITES
    *layers, final = model.anatomy.select(EVERY_LAYER)
    return ",".join(map(str, [*layers[::4], final]))


def report_probe(name: str, result: hs.Result, report: Report) -> None:
    """Report the best site with its interval, and the sites above chance."""
    best = result.facts["best"]
    low, high = best["interval"]
    report(
        f"  {name}: best at {best['site']},"
        f" {best['accuracy']:.0%} ({low:.0%} to {high:.0%}), p = {best['p']:.3f};"
        f" above chance at {result.facts['above_chance_at']}"
    )
    p_values = result.data["p"].to_pandas().round(3).to_dict()
    report(f"    p at each site: {p_values}")


@dataclass(frozen=True)
class Nearest:
    """For each text, whether its nearest text is a paraphrase, or the decoy."""

    paraphrase: np.ndarray
    decoy: np.ndarray


def nearest(vectors: np.ndarray, facts: RetrievalTexts) -> Nearest:
    """Find the nearest other text by the cosine of centred vectors."""
    centred = vectors - vectors.mean(0)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    # States that are all equal have no direction: every cosine is then zero.
    units = centred / np.maximum(norms, 1e-6)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    chosen = cosines.argmax(1)
    same_topic = facts.topic[chosen] == facts.topic
    same_city = facts.city[chosen] == facts.city
    same_wording = facts.wording[chosen] == facts.wording
    return Nearest(same_topic & same_city, same_topic & same_wording)


def rivals(sentence_model: hs.Model, facts: RetrievalTexts) -> dict[str, Nearest]:
    """Score a bag of words, and the sentence model as it is meant to be used."""
    words = TfidfVectorizer().fit_transform(facts.texts).toarray()
    vectors = hs.embed(sentence_model, facts.texts)
    return {
        "bag of words": nearest(words, facts),
        f"{SENTENCE_MODEL}, sentence model": nearest(vectors, facts),
    }


def scores_by_layer(
    model: hs.Model, facts: RetrievalTexts, sites: str
) -> dict[str, dict[str, Nearest]]:
    """Score the states of every layer: the last token's, and the mean but sinks."""
    states = model.capture(facts.texts, sites)
    scores: dict[str, dict[str, Nearest]] = {}
    # The first token of a text would rule its mean in most layers.
    for pool in ("last", "mean:sinkless"):
        scores[pool] = {}
        for site in states.sites:
            vectors = np.asarray(states.pool(pool, site), float)
            scores[pool][str(site)] = nearest(vectors, facts)
    return scores


def cross_fitted(
    by_site: dict[str, Nearest], facts: RetrievalTexts
) -> tuple[Nearest, list[str]]:
    """Choose the layer on half of the topics and score it on the other half.

    Return the score, and the layers that the two halves chose.
    """
    chosen = []
    is_even = facts.topic % 2 == 0
    paraphrase = np.zeros(len(facts.texts), bool)
    decoy = np.zeros(len(facts.texts), bool)
    for chosen_on in (is_even, ~is_even):
        shares = {}
        for site, score in by_site.items():
            shares[site] = score.paraphrase[chosen_on].mean()
        site = max(shares, key=shares.__getitem__)
        chosen.append(site)
        best = by_site[site]
        scored_on = ~chosen_on
        paraphrase[scored_on] = best.paraphrase[scored_on]
        decoy[scored_on] = best.decoy[scored_on]
    return Nearest(paraphrase, decoy), chosen


def report_layers(
    name: str, by_site: dict[str, Nearest], chosen: list[str], report: Report
) -> None:
    """Report what the nearest text is at every layer, and which layers were chosen."""
    report(f"  {name}: the halves of the topics chose {' and '.join(chosen)}")
    for site, score in by_site.items():
        paraphrase, decoy = score.paraphrase.mean(), score.decoy.mean()
        report(f"    {site}: paraphrase {paraphrase:.0%}, decoy {decoy:.0%}")


def report_retrieval(
    scores: dict[str, Nearest], facts: RetrievalTexts, report: Report
) -> None:
    """Report the shares with intervals over topics, and each rival's difference."""
    reference = scores[f"{SENTENCE_MODEL}, sentence model"].paraphrase.astype(float)
    for name, score in scores.items():
        share = share_interval(score.paraphrase, facts.topic)
        decoy = share_interval(score.decoy, facts.topic)
        difference = mean_interval(score.paraphrase - reference, facts.topic)
        report(
            f"  {name}: paraphrase {share.share()}, decoy {decoy.share()};"
            f" against the sentence model {100 * difference.value:+.0f}"
            f" ({100 * difference.low:+.0f} to {100 * difference.high:+.0f}) points"
        )


def draw_separation(results: list[hs.Result], path: Path) -> None:
    """Draw the share of nearest neighbours of one class, by depth, beside chance."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 1, figsize=(5.2, 6), sharex=True, sharey=True)
    axis_of = dict(zip(DATA, axes, strict=True))
    for result in results:
        for part in result.facts["parts"]:
            axis = axis_of[part["dataset"]]
            scores = part_scores(result, part)
            share = scores["neighbour"]
            depth = np.linspace(0, 1, len(share))
            (line,) = axis.plot(depth, share, label=part["model"])
            colour = line.get_color()
            axis.plot(depth, scores["neighbour_high"], ":", color=colour)
    for name, axis in axis_of.items():
        axis.set_title(f"{name} sentences", fontsize=11)
        axis.set_ylabel("neighbour of its class")
        axis.axhline(0.5, color="lightgrey", zorder=0)
    axes[0].legend(frameon=False, fontsize=9)
    axes[1].set_xlabel(
        "depth (0: embeddings, 1: last)\ndotted: 1 shuffle in 20 is above"
    )
    save(figure, path)


def draw_comparison(
    pairs: list[hs.Result], shipped_sets: list[hs.Result], path: Path
) -> None:
    """Draw the ratio of dispersions and the difference of shares, by depth."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(6.8, 5.2), sharex=True, sharey="row")
    titles = ("pairs: the same sentences", "shipped: other sentences")
    for column, results in enumerate((pairs, shipped_sets)):
        axes[0, column].set_title(titles[column], fontsize=10)
        for model, data in [part for result in results for part in by_model(result)]:
            depth = np.linspace(0, 1, data.sizes["site"])
            measures = ("dispersion_ratio", "neighbour_difference")
            for axis, name in zip(axes[:, column], measures, strict=True):
                (line,) = axis.plot(depth, data[name], label=model)
                if f"{name}_low" in data:
                    ends = data[f"{name}_low"], data[f"{name}_high"]
                    shade = {"color": line.get_color(), "alpha": 0.12, "lw": 0}
                    axis.fill_between(depth, *ends, **shade)
                differ = data[f"{name}_p"].values <= 0.05
                axis.plot(
                    depth[differ],
                    data[name].values[differ],
                    "o",
                    ms=4,
                    color=line.get_color(),
                )
    for axis, level in ((axes[0], 1.0), (axes[1], 0.0)):
        for panel in axis:
            panel.axhline(level, color="grey", lw=0.8, zorder=0)
    axes[0, 0].set(yscale="log", ylim=(0.4, 12))
    axes[0, 0].set_yticks([0.5, 1, 2, 4, 8])
    axes[0, 0].yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
    axes[0, 0].yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes[0, 0].set_ylabel("dispersion, incomplete\nover complete", fontsize=9)
    axes[1, 0].set_ylabel(
        "neighbours of the class,\nincomplete less complete", fontsize=9
    )
    axes[1, 0].legend(frameon=False, fontsize=8)
    figure.supxlabel(
        "depth (0: embeddings, 1: last); dots: p ≤ 0.05, corrected for all layers",
        fontsize=9,
    )
    save(figure, path)


def draw_premise(
    predicted: dict[str, dict[str, list[float]]], data: Labelled, path: Path
) -> None:
    """Draw the log-odds of the right city for each sentence, by city and model."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.2, 0.6 * 2 * len(predicted) + 1.4))
    labels = np.array(data.labels)
    names = []
    jitter = np.random.default_rng(0).uniform(-0.18, 0.18, len(labels))
    for model, numbers in predicted.items():
        for city, colour in zip(CITIES, ("C0", "C3"), strict=True):
            inside = labels == city
            odds = np.array(numbers["odds"])[inside]
            height = np.full(len(odds), float(len(names))) + jitter[inside]
            axis.plot(odds, height, ".", color=colour, ms=6)
            names.append(f"{model}, {city}")
    axis.axvline(0, color="grey", lw=0.8, zorder=0)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("log-odds of the right city against the other (nats)")
    save(figure, path)


def part_scores(result: hs.Result, part: dict[str, str]) -> dict[str, np.ndarray]:
    """Return the scores of one model on one dataset, over its sites."""
    data = result.data
    if "model" in data.dims:
        data = data.sel(model=part["model"])
    data = data.sel(dataset=part["dataset"])
    # A model beside a deeper one has no numbers at the sites that it lacks.
    present = np.isfinite(data["distinct"].values)
    scores = {}
    for name in ("neighbour", "neighbour_high"):
        scores[name] = data[name].values[present]
    return scores


def draw_trap(result: hs.Result, path: Path) -> None:
    """Draw how often the nearest text is of the same city, in the first layers."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.2, 3.2))
    sites = list(result.data["site"].values)
    for part in result.facts["parts"]:
        scores = result.data.sel(dataset=part["dataset"])
        axis.plot(sites, scores["neighbour"], "o-", label=part["dataset"])
    axis.axhline(0.5, color="lightgrey", zorder=0)
    axis.set_ylim(-0.05, 1.1)
    axis.set_ylabel("neighbour of its class")
    axis.legend(frameon=False, fontsize=9)
    save(figure, path)


def draw_retrieval(
    scores: dict[str, Nearest], facts: RetrievalTexts, path: Path
) -> None:
    """Draw the shares of paraphrases and decoys with their intervals over topics."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.2, 0.36 * len(scores) + 1.6))
    for shift, key, colour in ((-0.12, "paraphrase", "C0"), (0.12, "decoy", "C3")):
        label: str | None = key
        for row, score in enumerate(scores.values()):
            mean = share_interval(getattr(score, key), facts.topic)
            height = row + shift
            axis.plot([mean.low, mean.high], [height, height], color=colour)
            axis.plot(mean.value, height, "o", color=colour, ms=5, label=label)
            # The legend names each colour once.
            label = None
    axis.set_yticks(range(len(scores)), list(scores), fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(-0.03, 1.03)
    axis.set_xlabel("share of texts whose nearest text is a ...")
    figure.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    axis.set_title(" ", fontsize=9)
    save(figure, path)


def pictured(model: hs.Model) -> hs.Result:
    """Return the map by UMAP that the page shows live."""
    sites = ",".join(PICTURED)
    return hs.project(model, DATA, sites=sites, pool="last")


def draw_picture(result: hs.Result, method: str, path: Path) -> None:
    """Draw a few layers of the first model, a row of panels for each dataset."""
    plt = pyplot()
    figure, axes = plt.subplots(2, len(PICTURED), figsize=(6.4, 3.9))
    data = result.data
    if "model" in data.dims:
        data = data.sel(model=DECODERS[0])
    start = 0
    for row, name in zip(axes, DATA, strict=True):
        labels = np.array(hs.read(DATA[name]).labels)
        # The texts of the datasets stand one after the other.
        stop = start + len(labels)
        texts = data.isel(text=slice(start, stop))
        start = stop
        for axis, site in zip(row, PICTURED, strict=True):
            points = texts.sel(site=site)
            if not np.isfinite(points["x"].values).any():
                middle = {"transform": axis.transAxes, "ha": "center"}
                axis.text(0.5, 0.5, "all equal", fontsize=8, **middle)
            for city, colour in zip(CITIES, ("C0", "C3"), strict=True):
                of_city = labels == city
                x = points["x"].values[of_city]
                y = points["y"].values[of_city]
                axis.plot(x, y, ".", color=colour, label=city, ms=5)
            axis.set(xticks=[], yticks=[])
            axis.set_title(site, fontsize=9)
        row[0].set_ylabel(name)
    axes[0, 0].legend(frameon=False, fontsize=7, handletextpad=0)
    figure.suptitle(f"{DECODERS[0]}, last token, {method}", fontsize=10)
    save(figure, path)


def pyplot() -> ModuleType:
    """Return matplotlib's pyplot, drawing to files alone."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: "mpl.figure.Figure", path: Path) -> None:
    """Write a figure and close it."""
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", help="a decoder, in place of both")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("out/cities"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
