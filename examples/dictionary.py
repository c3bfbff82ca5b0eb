"""What does a small sparse dictionary find in a model, and do simpler directions do as well?

    python examples/dictionary.py
    python examples/dictionary.py --model gpt2 --site layer.6
    python examples/dictionary.py --device cuda --features 16384 --texts 20000 --states 100_000_000

It trains a dictionary on the states of film reviews (BatchTopK), measures on other
reviews how much of the states it says beside neurons, principal components and random
directions, asks whether one feature tells labelled texts apart as well as a difference
of means does, trains a second one from another seed to see which features come again,
and shows where some features act. `--quick` does all of it on few texts.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from labelled_sets import labelled_set
from reviews import labelled_reviews

import hiddenscope as hs

# About 130 tokens.
CHARACTERS = 600
HELD_OUT = 30
SETS = ("sentiment", "emotion", "acceptability")
# Features whose contexts are shown.
SHOWN = 12
COLOURS = {"the dictionary": "#0b6e99"}
MEASURES = {
    "unexplained": "share of the variance left",
    "divergence": "KL divergence of predictions, nats",
    "recovered": "share of the loss recovered",
}


def main() -> None:
    """Train, measure, and write what was found."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load(options.model, device=options.device)
    site = options.site or f"layer.{2 * model.anatomy.stacks[-1].depth // 5}"
    texts = beginnings(options.texts + options.held_out)
    learned, held_out = texts[: options.texts], texts[options.texts :]
    # States go to disk: another run, or another seed, need not compute them again.
    place = options.out / f"store-{options.model.replace('/', '-')}-{options.texts}"
    start = time.perf_counter()
    store = hs.extract(model, learned, place, sites=site)
    seconds = time.perf_counter() - start
    lines = [f"{len(store):,} states of {len(learned):,} reviews: {seconds:,.0f} s."]
    print(lines[-1], flush=True)
    facts: dict[str, Any] = {"model": options.model, "site": site}
    fits = []
    for seed in (0, 1):
        start = time.perf_counter()
        training = hs.Training(
            options.states, options.batch, seed=seed, device=options.device
        )
        fitted = hs.Dictionary.fit(
            store,
            site,
            features=options.features,
            k=options.k,
            training=training,
            checkpoint=options.out / f"run-{seed}.safetensors",
        )
        seconds = time.perf_counter() - start
        fits.append(fitted)
        facts[f"fit, seed {seed}"] = {**fitted.facts, "seconds": seconds}
        lines.append(
            f"{options.model}, {site}: {len(fitted):,} features, k {options.k}, trained on"
            f" {options.states:,} states ({fitted.facts['rows']:,} different ones) in"
            f" {seconds:,.0f} s with seed {seed}; {fitted.facts['unexplained']:.1%} of the"
            f" variance is left there, and {fitted.facts['dead']:,} features are dead."
        )
        print(lines[-1], flush=True)
    fits[0].save(options.out / "dictionary")
    lines += found_again(*fits, facts)
    lines += unmoved(fits[0], store, options.k, options.batch, facts)
    print("\n".join(lines[-2:]), flush=True)
    for part in (
        told(model, held_out, fits[0], facts),
        labels(model, options.labelled, fits[0], facts),
        contexts(model, held_out, fits[0], facts),
    ):
        start = time.perf_counter()
        for line in part:
            lines.append(line)
            print(line, flush=True)
        print(f"{time.perf_counter() - start:,.0f} s.", flush=True)
    (options.out / "findings.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = json.dumps(facts, indent=1, default=float)
    (options.out / "findings.json").write_text(found + "\n", encoding="utf-8")
    draw(facts, options.out / "dictionary.png")


def beginnings(count: int) -> list[str]:
    """Return the beginnings of reviews, in a random order: negative ones come first."""
    reviews = labelled_reviews()
    order = np.random.default_rng(0).permutation(len(reviews))
    return [reviews[place].text[:CHARACTERS] for place in order[:count]]


def found_again(
    one: hs.Dictionary, other: hs.Dictionary, facts: dict[str, Any]
) -> list[str]:
    """Say how many features of one seed come again with another, beside chance."""
    units = [torch.nn.functional.normalize(each.directions) for each in (one, other)]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(units[1].shape[1], generator=generator)
    shuffled = units[1][:, order.to(units[1].device)]
    again = {}
    for name, those in (("another seed", units[1]), ("shuffled", shuffled)):
        nearest = (units[0] @ those.T).max(1).values
        again[name] = {
            "median": float(nearest.median()),
            "above 0.7": float((nearest > 0.7).float().mean()),
            "above 0.9": float((nearest > 0.9).float().mean()),
        }
    facts["found again"] = again
    seed, chance = again["another seed"], again["shuffled"]
    return [
        f"With another seed {seed['above 0.9']:.0%} of the features come again with a"
        f" cosine above 0.9 and {seed['above 0.7']:.0%} above 0.7; the median of the"
        f" nearest is {seed['median']:.2f}, and {chance['median']:.2f} where the"
        " coordinates of the other are shuffled."
    ]


def unmoved(
    fitted: hs.Dictionary, store: hs.Store, k: int, batch: int, facts: dict[str, Any]
) -> list[str]:
    """Say how many features still point where they began, which is at random."""
    # One step with the same seed hardly moves them.
    training = hs.Training(1, batch, device=str(fitted.directions.device))
    begun = hs.Dictionary.fit(
        store, fitted.reads, features=len(fitted), k=k, training=training
    )
    still = (fitted.directions * begun.directions).sum(1) > 0.99
    is_used = np.ones(len(store), bool)
    is_used[store.firsts] = False
    rows = np.random.default_rng(0).permutation(np.flatnonzero(is_used))[:5000]
    states = store.rows(fitted.reads, np.sort(rows)).float().to(still.device)
    # Massive states, which training leaves out, would be most of all activation.
    lengths = states.norm(dim=1)
    acts = fitted.activations(states[lengths <= 4 * lengths.median()])
    of_all = float(acts[:, still].sum() / acts.sum())
    facts["unmoved"] = {"share": float(still.float().mean()), "of activation": of_all}
    return [
        f"{facts['unmoved']['share']:.0%} of the features still point where they began,"
        f" with a cosine above 0.99; they are {of_all:.1%} of all activation."
    ]


def told(
    model: hs.Model, texts: list[str], fitted: hs.Dictionary, facts: dict[str, Any]
) -> Iterator[str]:
    """Yield how much of other reviews' states is said, beside the baselines."""
    result = hs.features(model, texts, fitted)
    facts["features"] = dict(result.facts)
    yield result.summary()


def labels(
    model: hs.Model, count: int, fitted: hs.Dictionary, facts: dict[str, Any]
) -> Iterator[str]:
    """Yield how well one feature tells labelled texts apart, beside the baselines."""
    facts["labels"] = {}
    ways = {"the dictionary": fitted}
    try:
        inside = f"{fitted.reads}.mlp.neurons"
        ways["neurons"] = hs.Dictionary.neurons(model, inside)
    except hs.errors.Error as error:
        yield f"Neurons are not among the baselines: {error.reason}."
    for name in SETS:
        data = labelled_set(name, count)
        sites = {site for way in ways.values() for site in (way.reads, way.writes)}
        states = model.capture(list(data.texts), sorted(sites))
        scores = told_apart(hs.features(states, dictionary=fitted, data=data.labels))
        if "neurons" in ways:
            by_neuron = hs.features(
                states, dictionary=ways["neurons"], data=data.labels
            )
            scores.append({**told_apart(by_neuron)[0], "way": "neurons"})
        facts["labels"][name] = scores
        for score in scores:
            yield f"{name}: {score['way']}: AUROC {interval(score)}"


def told_apart(result: hs.Result) -> list[dict[str, Any]]:
    """Return the AUROC of each way to tell two labels apart."""
    (scores,) = (
        comparison["scores"]
        for comparison in result.facts["comparisons"]
        if comparison["measure"] == "auroc"
    )
    return list(scores)


def contexts(
    model: hs.Model, texts: list[str], fitted: hs.Dictionary, facts: dict[str, Any]
) -> Iterator[str]:
    """Yield where some features act: those that write most, and some at random."""
    strongest = [each["feature"] for each in facts["features"]["strongest"]]
    drawn = np.random.default_rng(0).permutation(len(fitted)).tolist()
    several = list(dict.fromkeys([*strongest[: SHOWN // 2], *drawn]))[:SHOWN]
    states = model.capture(texts, fitted.reads)
    result = hs.examples(states, fitted, features=several, k=6)
    facts["examples"] = dict(result.facts)
    yield result.summary()


def interval(score: dict[str, Any]) -> str:
    """Return a number with its interval."""
    return f"{score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def draw(facts: dict[str, Any], path: Path) -> None:
    """Draw every comparison: the dictionary beside its baselines."""
    comparisons = facts["features"]["comparisons"]
    figure, axes = plt.subplots(
        1, len(comparisons), figsize=(4 * len(comparisons), 2.6), squeeze=False
    )
    for axis, comparison in zip(axes[0], comparisons, strict=True):
        scores = comparison["scores"]
        names = [score["way"] for score in scores]
        values = np.array([score["value"] for score in scores])
        ends = np.array([(score["low"], score["high"]) for score in scores]).T
        colours = [COLOURS.get(name, "#999999") for name in names]
        errors = np.abs(ends - values)
        axis.barh(names, values, xerr=errors, color=colours, capsize=2)
        axis.invert_yaxis()
        axis.set_xlabel(MEASURES[comparison["measure"]])
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a name or a folder")
    parser.add_argument("--site", help="by default two fifths up the model")
    parser.add_argument("--device", help="cpu, cuda or mps")
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--k", type=int, default=32, help="how many act in a state")
    parser.add_argument("--texts", type=int, default=400, help="reviews to train on")
    parser.add_argument("--states", type=int, default=1_000_000, help="states in all")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="other reviews")
    parser.add_argument("--labelled", type=int, default=400, help="texts of each set")
    parser.add_argument("--out", type=Path, default=Path("out/dictionary"))
    parser.add_argument(
        "--quick", action="store_true", help="a first look, in a minute"
    )
    options = parser.parse_args()
    if options.quick:
        options.features, options.texts, options.states = 512, 40, 100_000
        options.held_out, options.labelled, options.batch = 12, 40, 512
    return options


if __name__ == "__main__":
    main()
