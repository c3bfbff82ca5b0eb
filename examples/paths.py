"""Along which path does an answer travel, and how many edges does it take?

    python examples/paths.py
    python examples/paths.py --model gpt2 --quick

Two behaviours: the capital of a country, and the verb that agrees with its subject. For
each, twelve contrasts; half of them choose the edges, and the others test how much of
the behaviour circuits of every size keep. The strongest edges are patched exactly.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import hiddenscope as hs

CAPITALS = {
    "France": " Paris",
    "Germany": " Berlin",
    "Italy": " Rome",
    "Spain": " Madrid",
    "Japan": " Tokyo",
    "Russia": " Moscow",
    "Egypt": " Cairo",
    "China": " Beijing",
    "England": " London",
    "Greece": " Athens",
    "Austria": " Vienna",
    "Cuba": " Havana",
}
QUESTION = "Question: what is the capital city of {}? Answer:"
SUBJECTS = (
    "author",
    "key",
    "teacher",
    "picture",
    "song",
    "boy",
    "report",
    "letter",
    "student",
    "farmer",
    "car",
    "river",
)
SENTENCE = "The {} that we saw near the house"
SHOWN = 5


def main() -> None:
    """Ask for both behaviours, and write what was found."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load(options.model, device=options.device)
    facts: dict[str, Any] = {"model": options.model}
    lines = []
    for name, contrasts in (("capitals", capitals()), ("agreement", agreement())):
        if options.quick:
            contrasts = contrasts[:4]
        circuit = hs.circuit(model, contrasts)
        edges = hs.edges(model, contrasts, exact=SHOWN, sample=40)
        for result in (circuit, edges):
            facts[f"{name}, {result.kind}"] = dict(result.facts)
            result.save(options.out / f"{name}-{result.kind}.html")
            lines += [name, result.summary()]
            print("\n".join(lines[-2:]), flush=True)
        edges.save(options.out / f"{name}-edges.png")
    (options.out / "findings.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = json.dumps(facts, indent=1, default=float)
    (options.out / "findings.json").write_text(found + "\n", encoding="utf-8")
    draw(facts, options.out / "circuits.png")


def capitals() -> list[hs.Contrast]:
    """Return each country beside the next."""
    countries = [*CAPITALS]
    contrasts = []
    for country, other in zip(countries, countries[1:] + countries[:1], strict=True):
        prompts = QUESTION.format(country), QUESTION.format(other)
        contrasts.append(hs.Contrast(*prompts, CAPITALS[country], CAPITALS[other]))
    return contrasts


def agreement() -> list[hs.Contrast]:
    """Return sentences whose subject is singular in one and plural in the other.

    Every second contrast has the plural as its clean prompt.
    """
    contrasts = []
    for number, noun in enumerate(SUBJECTS):
        prompts = [SENTENCE.format(noun), SENTENCE.format(f"{noun}s")]
        verbs = [" is", " are"]
        if number % 2:
            prompts.reverse()
            verbs.reverse()
        contrasts.append(hs.Contrast(*prompts, *verbs))
    return contrasts


def draw(facts: dict[str, Any], path: Path) -> None:
    """Draw the faithfulness of circuits by size, for each behaviour."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for axis, name in zip(axes, ("capitals", "agreement"), strict=True):
        sizes = facts[f"{name}, circuit"]["sizes"]
        shares = [100 * size["share"] for size in sizes]
        axis.plot(shares, [size["value"] for size in sizes], label="circuit")
        if all(size["low"] is not None for size in sizes):
            low, high = ([size[end] for size in sizes] for end in ("low", "high"))
            axis.fill_between(shares, low, high, alpha=0.2)
        for number, other in enumerate(sizes[0]["others"]):
            values = [size["others"][number]["value"] for size in sizes]
            axis.plot(shares, values, "--", label=other["way"])
        axis.set(xscale="log", xlabel="% of the edges", title=name)
    axes[0].set_ylabel("faithfulness")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=150)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default=None)
    parser.add_argument("--quick", action="store_true", help="four contrasts each")
    parser.add_argument("--out", type=Path, default=Path("out/paths"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
