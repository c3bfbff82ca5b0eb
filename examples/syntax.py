"""Do hidden states go from syntax to semantics as depth grows? Probes of 14 labels.

    python examples/syntax.py

Six labels are syntactic, six semantic, two on the surface. Sentences come from a grammar
whose words are split between training and test (`grammar.py`), and from sets of the
package sae-probes, fetched the first time (`labelled_sets.py`). Each label is read from
every layer at the last token of its text, and gets a centre of gravity over layers; then
the centres of the two kinds are compared. `--quick` takes one small model and the
grammar alone; `--model NAME` takes any other, and may be repeated. `--labels` takes
some labels, and `--earlier` tells the findings of such runs together.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from grammar import RULES, sentences
from sklearn.feature_extraction.text import CountVectorizer

import hiddenscope as hs
from hiddenscope.sites import Site
from hiddenscope.texts import Labelled

MODELS = ("smollm2", "gemma3-270m", "minilm")
SYNTACTIC = (
    "word class",
    "subject number",
    "tense",
    "voice",
    "depth of embedding",
    "acceptability",
)
SEMANTIC = (
    "entity type",
    "plain fact",
    "topic",
    "sentiment",
    "emotion",
    "right answer",
)
SURFACE = ("position", "previous token")
LABELS = (*SYNTACTIC, *SEMANTIC, *SURFACE)
QUICK = ("word class", "voice", "entity type", "plain fact")
COLORS = {"syntactic": "#2f6db3", "semantic": "#c8553d", "surface": "#7a7a7a"}
LEVEL = 0.95
# Shifts of the second kind that the interval of the difference tests.
SHIFTS = np.linspace(-1, 1, 2_001)


@dataclass(frozen=True)
class Reading:
    """What a model's probes read of a label; shares of right texts by layer."""

    model: str
    label: str
    kind: str
    rows: int
    classes: int
    chance: float
    words_alone: float | None
    words_alone_interval: list[float] | None
    best: str
    accuracy: float
    interval: list[float]
    p: float | None
    control: float | None
    selectivity: float | None
    above_chance_at: list[str]
    centre: dict[str, float | list[float]] | None
    layers: list[int]
    by_layer: list[float]
    low: list[float]
    high: list[float]


def main() -> None:
    """Probe every label in every model, then compare the two kinds."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    readings = earlier_readings(options.earlier) or new_readings(options)
    content = json.dumps([asdict(reading) for reading in readings], indent=1)
    (options.out / "findings.json").write_text(content + "\n", "utf-8")
    report = "\n".join(findings(readings))
    print(report)
    (options.out / "findings.txt").write_text(report + "\n", "utf-8")
    draw_curves(readings, options.out / "syntax-curves.png")
    draw_centres(readings, options.out / "syntax-centres.png")


def earlier_readings(files: list[Path]) -> list[Reading]:
    """Read what earlier runs found, of some labels or models each, in order."""
    readings = {}
    for file in files:
        for row in json.loads(file.read_text("utf-8")):
            # A later run replaces an earlier one.
            readings[row["model"], row["label"]] = Reading(**row)
    models = list(dict.fromkeys(model for model, _ in readings))

    def order(reading: Reading) -> tuple[int, int]:
        return models.index(reading.model), LABELS.index(reading.label)

    return sorted(readings.values(), key=order)


def new_readings(options: argparse.Namespace) -> list[Reading]:
    """Probe the labels in each model, and print them one by one."""
    data = {}
    baselines = {}
    for label in options.labels:
        if label not in SURFACE:
            data[label] = read_label(label, options.texts)
            baselines[label] = words_alone(data[label])
    readings = []
    for name in options.model:
        model = hs.load(name, device=options.device)
        for label in options.labels:
            start = time.perf_counter()
            reading = read_from(model, label, data.get(label), baselines.get(label))
            seconds = time.perf_counter() - start
            print(f"{name}, {seconds:.0f} s: {told(reading)}", flush=True)
            readings.append(reading)
    return readings


def findings(readings: list[Reading]) -> list[str]:
    """Say what was read in each model, and how the two kinds compare."""
    lines = []
    for model in dict.fromkeys(reading.model for reading in readings):
        of_model = [reading for reading in readings if reading.model == model]
        lines.append(f"\n{model}, {of_model[0].layers[-1]} layers")
        lines += [f"  {told(reading)}" for reading in of_model]
        lines += [f"  {line}" for line in compared(of_model)]
    return lines


# --- The texts


def read_label(label: str, count: int) -> Labelled:
    """Return texts with this label, of the grammar or of a set."""
    if label in RULES:
        return sentences(label, count)
    # Sets are fetched the first time; the grammar needs no network.
    from labelled_sets import labelled_set

    return labelled_set(label, count)


def surface_texts() -> Labelled:
    """Return sentences of all rules and lexicons, to probe each token of."""
    texts: list[str] = []
    groups: list[int] = []
    for number, rule in enumerate(RULES):
        part = sentences(rule, 24)
        assert part.groups is not None
        # Every fourth lexicon, in turn.
        texts += part.texts[number % 4 :: 4]
        groups += part.groups[number % 4 :: 4]
    return Labelled(tuple(texts), None, "the grammar", tuple(groups))


def words_alone(data: Labelled) -> hs.Result:
    """Probe which words a text has: what a label owes to words that texts share."""
    counts = CountVectorizer(binary=True, token_pattern=r"\S+").fit_transform(
        data.texts
    )
    rows = np.arange(len(data))
    tokens = hs.Tokens(data.texts, rows, 0 * rows, rows, ("words",) * len(rows))
    values = torch.from_numpy(counts.toarray()).float()[None]
    states = hs.States((Site(0),), values, tokens, hs.Source("words alone"))
    return hs.probe(states, data, pool="last")


# --- The probes


def kind_of(label: str) -> str:
    """Return whether a label is syntactic, semantic or on the surface."""
    if label in SURFACE:
        return "surface"
    return "syntactic" if label in SYNTACTIC else "semantic"


def last_word(model: hs.Model) -> int:
    """Return the place of the last token of a text that is no special one."""
    ids = list(model.encode("dog").ids[0])
    special = set(getattr(model.tokenizer, "all_special_ids", ()))
    place = -1
    while ids[place] in special:
        place -= 1
    return place


def read_from(
    model: hs.Model, label: str, data: Labelled | None, words: hs.Result | None
) -> Reading:
    """Probe a label at every layer: at the last token, or at each for the surface."""
    if data is None:
        ready = label.replace(" ", "-")
        source = hs.each_token(model)
        result = hs.probe(source, (surface_texts(), ready), sites="layer.*")
    else:
        result = hs.probe(model, data, pool=last_word(model), sites="layer.*")
    facts, scores = result.facts, result.data
    best = facts["best"]
    baseline = None if words is None else words.facts["best"]
    return Reading(
        model=model.name,
        label=label,
        kind=kind_of(label),
        rows=facts["rows"],
        classes=facts["class_count"],
        chance=facts["chance"],
        words_alone=baseline and baseline["accuracy"],
        words_alone_interval=baseline and list(baseline["interval"]),
        best=best["site"],
        accuracy=best["accuracy"],
        interval=list(best["interval"]),
        p=best.get("p"),
        control=best.get("control"),
        selectivity=best.get("selectivity"),
        above_chance_at=list(facts["above_chance_at"]),
        centre=facts.get("centre"),
        layers=[Site.parse(str(site)).layer or 0 for site in scores["site"].values],
        by_layer=scores["accuracy"].values.tolist(),
        low=scores["accuracy_low"].values.tolist(),
        high=scores["accuracy_high"].values.tolist(),
    )


def told(reading: Reading) -> str:
    """Say what was read of a label, in one line."""
    low, high = reading.interval
    words = ""
    if reading.words_alone is not None:
        words = f", words alone {reading.words_alone:.0%}"
    line = (
        f"{reading.label} ({reading.kind}, {reading.rows} rows):"
        f" {reading.accuracy:.0%} ({low:.0%} to {high:.0%}) at {reading.best};"
        f" chance {reading.chance:.0%}{words}, control {reading.control or 0:.0%};"
        f" {len(reading.above_chance_at)} of {len(reading.layers)} layers above chance;"
    )
    centre = reading.centre
    if centre is None:
        return f"{line} no centre"
    first, last = centre["interval"]
    shallow, deep = centre["depth_interval"]
    return (
        f"{line} centre {centre['layer']:.1f} ({first:.1f} to {last:.1f}), at"
        f" {centre['depth']:.0%} ({shallow:.0%} to {deep:.0%}) of the depth, spread"
        f" {centre['spread']:.1f}, gained at {centre['gained']:.1f}"
        f" ({centre['gained'] / reading.layers[-1]:.0%}); first layer"
        f" {reading.by_layer[0]:.0%} ({reading.low[0]:.0%} to {reading.high[0]:.0%}),"
        f" last {reading.by_layer[-1]:.0%} ({reading.low[-1]:.0%} to"
        f" {reading.high[-1]:.0%})"
    )


# --- The claim


@dataclass(frozen=True)
class Difference:
    """How much larger the mean of the second sample is, with its interval and p."""

    value: float
    low: float
    high: float
    p: float


def difference(first: list[float], second: list[float]) -> Difference:
    """Compare two small samples by all ways to deal them out again.

    The p-value is the share of ways in which the means differ as much. The interval
    holds every shift that, taken from the second sample, leaves a p above 0.05.
    """
    count = len(first) + len(second)
    ways = [list(places) for places in combinations(range(count), len(first))]
    deals = np.full((len(ways), count), 1 / len(second))
    for deal, places in zip(deals, ways, strict=True):
        deal[places] = -1 / len(first)
    is_second = np.arange(count) >= len(first)
    # A deal is [way], and its difference after each shift [way, shift].
    shifts = np.append(SHIFTS, 0.0)
    plain = deals @ np.array([*first, *second])
    differences = np.abs(plain[:, None] - np.outer(deals @ is_second, shifts))
    # The first deal is the true one. Rounding must not make it larger than itself.
    p_values = (differences >= differences[0] - 1e-12).mean(0)
    accepted = shifts[p_values > 1 - LEVEL]
    ends = float(accepted.min()), float(accepted.max())
    return Difference(float(plain[0]), *ends, p=float(p_values[-1]))


def compared(readings: list[Reading]) -> list[str]:
    """Say whether semantic labels lie deeper than syntactic ones."""
    lines = []
    last = readings[0].layers[-1]
    for name in ("depth", "gained"):
        samples: dict[str, list[float]] = {"syntactic": [], "semantic": []}
        for reading in readings:
            if reading.centre is not None and reading.kind in samples:
                value = float(reading.centre[name])
                samples[reading.kind].append(value if name == "depth" else value / last)
        first, second = samples.values()
        what = {"depth": "centres", "gained": "layers of the gains"}[name]
        if min(len(first), len(second)) < 2:
            lines.append(f"{what}: too few labels have one to compare the kinds")
            continue
        found = difference(first, second)
        lines.append(
            f"{what}, as a share of the depth: syntactic {np.mean(first):.0%}"
            f" ({len(first)} labels), semantic {np.mean(second):.0%} ({len(second)});"
            f" semantic less syntactic {100 * found.value:+.0f} points"
            f" ({100 * found.low:+.0f} to {100 * found.high:+.0f}), p = {found.p:.3f}"
        )
    return lines


# --- The pictures


def draw_curves(readings: list[Reading], path: Path) -> None:
    """Draw, for each model and kind, how far each label is above chance by layer."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    models = list(dict.fromkeys(reading.model for reading in readings))
    kinds = [kind for kind in COLORS if any(one.kind == kind for one in readings)]
    figure, axes = plt.subplots(
        len(kinds),
        len(models),
        figsize=(3.1 * len(models) + 1.7, 2.3 * len(kinds) + 0.5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row, kind in zip(axes, kinds, strict=True):
        labels = dict.fromkeys(one.label for one in readings if one.kind == kind)
        shades = plt.get_cmap("Dark2")(np.arange(len(labels)))
        colors = dict(zip(labels, shades, strict=True))
        for axis, model in zip(row, models, strict=True):
            for reading in readings:
                if (reading.model, reading.kind) == (model, kind):
                    gain = np.array(reading.by_layer) - reading.chance
                    share = gain / (1 - reading.chance)
                    axis.plot(
                        reading.layers,
                        share,
                        color=colors[reading.label],
                        label=reading.label,
                    )
            axis.axhline(0, color="#999999", linewidth=0.8)
            axis.set_ylim(-0.2, 1.03)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_title(f"{model}: {kind}", fontsize=9)
            axis.tick_params(labelsize=8)
        row[0].set_ylabel("above chance\n(1: always right)", fontsize=8)
        handles, names = row[0].get_legend_handles_labels()
        row[-1].legend(
            handles, names, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
    for axis in axes[-1]:
        axis.set_xlabel("layer", fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_centres(readings: list[Reading], path: Path) -> None:
    """Draw the centre of each label with its interval, one panel a model."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(reading.model for reading in readings))
    labels = list(dict.fromkeys(reading.label for reading in readings))
    figure, axes = plt.subplots(
        1,
        len(models),
        figsize=(2.7 * len(models) + 1.5, 0.26 * len(labels) + 1.1),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, model in zip(axes[0], models, strict=True):
        for reading in readings:
            if reading.model != model:
                continue
            place = len(labels) - labels.index(reading.label)
            color = COLORS[reading.kind]
            if reading.centre is None:
                axis.text(
                    0.53, place, "no centre", color=color, fontsize=7, va="center"
                )
                continue
            axis.plot(reading.centre["depth_interval"], [place] * 2, color=color)
            axis.plot(reading.centre["depth"], place, "o", color=color, markersize=4)
        axis.axvline(0.5, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_xlim(0, 1)
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("centre, share of the depth", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0, 0].set_yticks(range(len(labels), 0, -1), labels)
    for tick, label in zip(axes[0, 0].get_yticklabels(), labels, strict=True):
        tick.set_color(COLORS[kind_of(label)])
    figure.savefig(path, dpi=100)
    plt.close(figure)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="may be repeated")
    parser.add_argument("--device", help="such as cuda; by default the CPU")
    parser.add_argument("--texts", type=int, default=288, help="of each label")
    parser.add_argument("--labels", nargs="+", help="some of the labels")
    parser.add_argument(
        "--earlier",
        nargs="+",
        type=Path,
        default=[],
        help="files findings.json of other runs: tell them together, probe nothing",
    )
    parser.add_argument("--quick", action="store_true", help="a minute or so")
    parser.add_argument("--out", type=Path, default=Path("out/syntax"))
    options = parser.parse_args()
    if options.quick:
        options.model = options.model or ["minilm"]
        options.labels = options.labels or list(QUICK)
        options.texts = min(options.texts, 96)
    options.model = options.model or list(MODELS)
    options.labels = options.labels or list(LABELS)
    unknown = [label for label in options.labels if label not in LABELS]
    if unknown:
        parser.error(f"No label {unknown[0]!r}. Choose from: {', '.join(LABELS)}.")
    return options


if __name__ == "__main__":
    main()
