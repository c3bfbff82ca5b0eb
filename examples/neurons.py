"""Do the neurons of the last layer act more strongly, and on fewer tokens?

    python examples/neurons.py
    python examples/neurons.py --model gpt2 --device cuda

It measures the neurons of every layer on film reviews, in three models and in a copy of
each with random weights, and compares the last layer with the one before and with the
trend of the layers below. States go to disk and are read from there (4 GB for the
largest of the three), so that memory does not grow with the texts. `--quick` measures
one small model on few texts.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from reviews import reviews

import hiddenscope as hs
from hiddenscope.analyses.profile.story import NEURON_MEASURES

MODELS = ("smollm2", "gemma3-270m", "minilm")
SITES = "*.mlp.neurons"
# What the neurons write, and the stream that it is added to.
STORED = "*.mlp.neurons,*.mlp,*.mid"
DRAWN = ("neuron_activation", "neuron_write", "neuron_sparseness", "neuron_entropy")
VERDICTS = {"more": "yes", "less": "no, less", "undecided": "undecided"}


class Pair(NamedTuple):
    """The profiles of a model and of its copy with random weights."""

    trained: hs.Result
    random: hs.Result


def main() -> None:
    """Measure every model, print what was found, and draw it."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = reviews()
    pairs: dict[str, Pair] = {}
    lines = []
    for name in options.model:
        start = time.perf_counter()
        model = hs.load(name, device=options.device)
        cut = cut_texts(model, texts, options.texts, options.tokens)
        trained = measure(model, cut, options.out)
        control = measure(model.randomised(), cut, options.out)
        pairs[name] = Pair(trained, control)
        seconds = time.perf_counter() - start
        lines += report(name, pairs[name])
        lines.append(f"{len(cut)} texts of {options.tokens} tokens, {seconds:,.0f} s.")
        print("\n".join(lines[-30:]), flush=True)
    (options.out / "findings.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    facts = {}
    for name, pair in pairs.items():
        for kind, result in pair._asdict().items():
            facts[f"{name}, {kind}"] = {**gaps(result), **by_layer(result)}
    (options.out / "findings.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(pairs, options.out / "neurons.png")


def cut_texts(
    model: hs.Model, texts: Sequence[str], count: int, length: int
) -> list[str]:
    """Return the beginnings of the first texts that make `length` tokens, as text."""
    chosen: list[str] = []
    for text in texts:
        # The special tokens of an encoder count too, at both ends.
        start = text[: 12 * length]
        inputs = model.encode(start, truncate=True)
        special = sum(first == last for first, last in inputs.spans[0])
        ends = [last for first, last in inputs.spans[0] if last > first]
        if len(ends) + special < length:
            continue
        cut = start[: ends[length - special - 1]]
        # A cut may join or split the last tokens.
        if model.encode(cut).lengths == [length]:
            chosen.append(cut)
        if len(chosen) == count:
            return chosen
    raise ValueError(f"only {len(chosen)} of {count} texts have {length} tokens")


def measure(model: hs.Model, texts: list[str], out: Path) -> hs.Result:
    """Profile the neurons of every layer from a store on disk."""
    with TemporaryDirectory(dir=out) as folder:
        store = hs.extract(model, texts, Path(folder) / "store", sites=STORED)
        return hs.profile(store, sites=SITES)


def gaps(result: hs.Result) -> dict[str, Any]:
    """Return what was found of the last layer."""
    found: dict[str, Any] = result.facts["stacks"][0]["neurons"]
    return found


def report(name: str, pair: Pair) -> list[str]:
    """Return a table: each measure against the layer before and against the trend."""
    lines = [f"\n{name}"]
    for kind, result in zip(("trained", "random weights"), pair, strict=True):
        neurons = gaps(result)
        lines.append(
            f"  {kind}: {neurons['last']} against {neurons['previous']}, and against a"
            f" {neurons['trend']}; {neurons['tokens']:,} tokens of"
            f" {neurons['groups']} texts, {neurons['types']} token types"
        )
        others = {"previous": neurons["against_previous"]}
        others["trend"] = neurons["against_trend"]
        for other, found in others.items():
            for gap in found:
                words = NEURON_MEASURES[gap["measure"]].words
                lines.append(
                    f"    {gap['aspect']:11} {words:50} {other:8} {value(gap):32}"
                    f" p {gap['p']:.3g}, more: {VERDICTS[gap['verdict']]}"
                )
        for measure_name in NEURON_MEASURES:
            levels = []
            for place in (-2, -1):
                levels.append(level(result, measure_name, place))
            lines.append(f"    {measure_name:18} {' -> '.join(levels)}")
    return lines


def value(gap: Mapping[str, Any]) -> str:
    """Say a ratio or a difference with its interval."""
    if NEURON_MEASURES[gap["measure"]].factor:
        return f"{gap['value']:.3g} times ({gap['low']:.3g} to {gap['high']:.3g})"
    return f"{gap['value']:+.3f} ({gap['low']:+.3f} to {gap['high']:+.3f})"


def level(result: hs.Result, name: str, place: int) -> str:
    """Say a measure of a layer with its interval."""
    middle, low, high = (
        float(result.data[f"{name}{end}"][place]) for end in ("", "_low", "_high")
    )
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def by_layer(result: hs.Result) -> dict[str, list[float]]:
    """Return every measure of every layer, with the ends of its interval."""
    numbers: dict[str, list[float]] = {}
    for name in NEURON_MEASURES:
        for end in ("", "_low", "_high"):
            numbers[f"{name}{end}"] = result.data[f"{name}{end}"].values.tolist()
    return numbers


def draw(pairs: Mapping[str, Pair], path: Path) -> None:
    """Draw two measures of intensity and two of selectivity by depth."""
    shape = len(DRAWN), len(pairs)
    size = (3.2 * shape[1] + 0.6, 2.1 * shape[0])
    figure, axes = plt.subplots(
        *shape, figsize=size, squeeze=False, layout="constrained"
    )
    for column, (name, pair) in enumerate(pairs.items()):
        for row, measure_name in enumerate(DRAWN):
            axis = axes[row, column]
            draw_line(axis, pair.trained, measure_name, "#0b6e99", "trained")
            draw_line(axis, pair.random, measure_name, "#999999", "random weights")
            if not row:
                axis.set_title(name)
            if not column:
                axis.set_ylabel(NEURON_MEASURES[measure_name].words, fontsize=8)
        axes[-1, column].set_xlabel("layer")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_line(
    axis: Axes, result: hs.Result, name: str, colour: str, label: str
) -> None:
    """Draw a measure by layer with its interval, the last layer marked."""
    middle, low, high = (
        result.data[f"{name}{end}"].to_numpy() for end in ("", "_low", "_high")
    )
    layers = np.arange(1, len(middle) + 1)
    axis.plot(layers, middle, color=colour, label=label, linewidth=1.5)
    axis.fill_between(layers, low, high, color=colour, alpha=0.3, linewidth=0)
    axis.plot(layers[-1], middle[-1], "o", color=colour, markersize=4)
    if NEURON_MEASURES[name].factor:
        axis.set_yscale("log")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--device", help="such as cuda; by default the CPU")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a minute or so")
    parser.add_argument("--out", type=Path, default=Path("out/neurons"))
    options = parser.parse_args()
    if options.quick:
        options.model, options.texts, options.tokens = ["minilm"], 24, 32
    return options


if __name__ == "__main__":
    main()
