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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from reviews import reviews

import hiddenscope as hs
from hiddenscope.analyses.profile.story import NEURON_MEASURES

MODELS = ("smollm2", "gemma3-270m", "minilm")
SITES = "*.mlp.neurons"
# What the neurons write, and the stream that it is added to.
STORED = "*.mlp.neurons,*.mlp,*.mid"
DRAWN = {
    "neuron_activation": "mean |activation|",
    "neuron_write": "MLP's write / stream",
    "neuron_kurtosis": "kurtosis",
    "neuron_sparseness": "sparseness",
}
# A model and its control, with their colours.
KINDS = {"trained": "#0b6e99", "random weights": "#999999"}

Facts: TypeAlias = dict[str, Any]


def main() -> None:
    """Measure every model, print what was found, and draw it."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = reviews()
    facts: dict[str, Facts] = {}
    lines: list[str] = []
    for name in options.model:
        start = time.perf_counter()
        model = hs.load(name, device=options.device)
        cut = cut_texts(model, texts, options.texts, options.tokens)
        for kind in KINDS:
            subject = model if kind == "trained" else model.randomised()
            facts[f"{name}, {kind}"] = measure(subject, cut, options.out)
        seconds = time.perf_counter() - start
        lines.append(
            f"{name}: {len(cut)} texts of {options.tokens} tokens took {seconds:,.0f} s."
        )
        print(lines[-1], flush=True)
    lines += report(facts, options.model)
    print("\n".join(lines))
    (options.out / "findings.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (options.out / "findings.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(facts, options.model, options.out / "neurons.png")


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


def measure(model: hs.Model, texts: list[str], out: Path) -> Facts:
    """Profile the neurons of every layer from a store on disk.

    They are what was found of the last layer, and every measure of every layer.
    """
    with TemporaryDirectory(dir=out) as folder:
        store = hs.extract(model, texts, Path(folder) / "store", sites=STORED)
        result = hs.profile(store, sites=SITES)
    facts: Facts = dict(result.facts["stacks"][0]["neurons"])
    for name in NEURON_MEASURES:
        for end in ("", "_low", "_high"):
            facts[f"{name}{end}"] = result.data[f"{name}{end}"].values.tolist()
    return facts


def report(facts: Mapping[str, Facts], names: Sequence[str]) -> list[str]:
    """Return what was measured, and tables of verdicts, of levels and of controls."""
    lines = []
    for name in names:
        neurons = facts[f"{name}, trained"]
        lines.append(
            f"{name}: {neurons['last']} against {neurons['previous']}, and against a"
            f" {neurons['trend']}; {neurons['tokens']:,} tokens of"
            f" {neurons['groups']} texts, {neurons['types']} token types."
        )
    for kind in KINDS:
        of_kind = {name: facts[f"{name}, {kind}"] for name in names}
        lines += ["", f"The last layer, {kind}", *table(of_kind, comparisons)]
        lines += ["", f"The last two layers, {kind}", *table(of_kind, levels)]
    return lines


def table(
    facts: Mapping[str, Facts], cells: Callable[[Facts, str], list[str]]
) -> list[str]:
    """Return a row for each measure and two columns for each model, in Markdown."""
    heads = ["measure"]
    for name in facts:
        heads += [name, ""]
    rows = [heads, ["---"] * len(heads)]
    for name, measure_of in NEURON_MEASURES.items():
        row = [f"{measure_of.aspect}: {measure_of.words}"]
        for neurons in facts.values():
            row += cells(neurons, name)
        rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


def comparisons(neurons: Facts, name: str) -> list[str]:
    """Return the last layer against the one before, and against the trend."""
    both = []
    for other in ("against_previous", "against_trend"):
        found = {gap["measure"]: gap for gap in neurons[other]}
        gap = found.get(name)
        both.append(f"{value(gap)} {gap['verdict']}" if gap else "")
    return both


def levels(neurons: Facts, name: str) -> list[str]:
    """Return a measure of the last two layers, with its intervals."""
    both = []
    for place in (-2, -1):
        middle, low, high = (
            neurons[f"{name}{end}"][place] for end in ("", "_low", "_high")
        )
        both.append(f"{middle:.3g} ({low:.3g} to {high:.3g})")
    return both


def value(gap: Mapping[str, Any]) -> str:
    """Say a ratio or a difference with its interval."""
    if NEURON_MEASURES[gap["measure"]].factor:
        return f"{gap['value']:.3g} times ({gap['low']:.3g} to {gap['high']:.3g})"
    return f"{gap['value']:+.3f} ({gap['low']:+.3f} to {gap['high']:+.3f})"


def draw(facts: Mapping[str, Facts], names: Sequence[str], path: Path) -> None:
    """Draw two measures of intensity and two of selectivity by depth."""
    shape = len(DRAWN), len(names)
    size = (3.2 * shape[1] + 0.6, 2.1 * shape[0])
    figure, axes = plt.subplots(
        *shape, figsize=size, squeeze=False, layout="constrained"
    )
    for column, name in enumerate(names):
        axes[0, column].set_title(name)
        axes[-1, column].set_xlabel("layer")
        for row, measure_name in enumerate(DRAWN):
            for kind, colour in KINDS.items():
                neurons = facts[f"{name}, {kind}"]
                draw_line(axes[row, column], neurons, measure_name, colour, kind)
    for row, (measure_name, words) in enumerate(DRAWN.items()):
        axes[row, 0].set_ylabel(f"{NEURON_MEASURES[measure_name].aspect}:\n{words}")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_line(axis: Axes, neurons: Facts, name: str, colour: str, label: str) -> None:
    """Draw a measure by layer with its interval, the last layer marked."""
    middle, low, high = (neurons[f"{name}{end}"] for end in ("", "_low", "_high"))
    layers = range(1, len(middle) + 1)
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
