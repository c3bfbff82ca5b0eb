"""Which lens reads the next token earliest, on texts that it was not fitted to?

    python examples/lenses.py
    python examples/lenses.py --large    # more text, where there is a GPU

It fits a tuned and a Jacobian lens of smollm2 to some film reviews, reads other reviews
with each, and compares every layer's prediction with the model's own. `--quick` takes
the same steps on a tiny model with random weights: its numbers mean nothing.
"""

import argparse
import time
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from over_texts import Mean, first_tokens, mean_over_texts, share_over_texts
from reviews import reviews

import hiddenscope as hs
from hiddenscope.results.report import FEWEST_GROUPS
from hiddenscope.testing import tiny_model, tiny_tokenizer

COLOURS = {
    "logit": "#555555",
    "tuned": "#0b6e99",
    "tuned, little text": "#7fc4e0",
    "Jacobian": "#c4501b",
}


class Size(NamedTuple):
    """How much text is used: numbers of texts, and tokens of each."""

    tuned_texts: int
    tuned_tokens: int
    jacobian_texts: int
    jacobian_tokens: int
    read_texts: int
    read_tokens: int


FULL = Size(40, 24, 3, 8, 24, 16)
QUICK = Size(6, 8, 2, 8, 3, 6)
# For a GPU.
LARGE = Size(200, 64, 16, 32, 100, 32)


class Scores(NamedTuple):
    """How well a lens agrees with the model: arrays [text, layer]."""

    layers: NDArray[np.int64]
    kl: NDArray[np.float64]
    agreement: NDArray[np.float64]
    cpu_seconds: float


def main() -> None:
    """Fit the lenses, read held-out reviews, print what was seen and draw it."""
    options = _options()
    size = FULL
    if options.large:
        size = LARGE
    if options.quick:
        size = QUICK
    options.out.mkdir(parents=True, exist_ok=True)
    # The derivatives of a Jacobian lens take minutes in a real model.
    model = tiny() if options.quick else hs.load()
    texts = reviews()
    # The reviews that are read come after all those that lenses are fitted to.
    held_out = first_tokens(model, texts[1000:], size.read_texts, size.read_tokens)
    lenses: dict[str, str | hs.Lens] = {"logit": "logit"}
    for name in ("tuned", "tuned, little text", "Jacobian"):
        lenses[name] = fit(model, name, texts[:1000], size)
    scores = {}
    for name, lens in lenses.items():
        scores[name] = read(model, held_out, lens)
        print(f"Reading with the {name} lens: {scores[name].cpu_seconds:.0f} s of CPU.")
    report(scores)
    draw(scores, options.out / "lenses.png")
    save_table(scores, options.out / "lenses.csv")
    example = hs.lens(model, "The capital of France is", lens=lenses["tuned"])
    example.save(options.out / "tuned.html")


def tiny() -> hs.Model:
    """Build a tiny Llama with random weights."""
    return hs.load((tiny_model("llama", layers=6), tiny_tokenizer()))


def fit(model: hs.Model, name: str, texts: list[str], size: Size) -> hs.Lens:
    """Fit a lens, and print what that costs.

    The Jacobian lens is so dear that it gets little text. A second tuned lens is
    fitted to the same little, so that the two can be compared.
    """
    count, length = size.jacobian_texts, size.jacobian_tokens
    if name == "tuned":
        count, length = size.tuned_texts, size.tuned_tokens
    chosen = first_tokens(model, texts, count, length)
    kind: Literal["jacobian", "tuned"] = "tuned"
    if name == "Jacobian":
        kind = "jacobian"
    start = time.process_time()
    lens = hs.Lens.fit(model, chosen, kind)
    seconds = time.process_time() - start
    print(
        f"Fitting the {name} lens to {count} texts, {count * length:,} tokens:"
        f" {seconds:.0f} s of CPU."
    )
    return lens


def read(model: hs.Model, texts: list[list[int]], lens: str | hs.Lens) -> Scores:
    """Read texts of one length with a lens; average over the tokens of each text."""
    depth = model.module.config.num_hidden_layers
    # Every second layer, which halves the cost, and the last layer.
    layers = np.arange(depth % 2, depth + 1, 2)
    sites = [f"layer.{layer}" for layer in layers]
    start = time.process_time()
    data = hs.lens(model, texts, lens=lens, k=1, sites=sites).data
    seconds = time.process_time() - start
    words = data["word_id"].sel(rank=1).transpose("site", "token").values
    kl = data["kl"].transpose("site", "token").values
    # The last layer is the model's own prediction.
    agrees = words == words[-1]
    shape = (len(kl), len(texts), -1)
    mean_kl = kl.reshape(shape).mean(2).T
    agreement = agrees.reshape(shape).mean(2).T
    return Scores(layers, mean_kl.astype(np.float64), agreement, seconds)


def report(scores: dict[str, Scores]) -> None:
    """Print where each lens reads the model's answer, and which lens is ahead."""
    for name, score in scores.items():
        agreement = share_over_texts(score.agreement)
        kl = mean_over_texts(score.kl)
        half = first_lasting(score.layers, agreement.value >= 0.5)
        sure = first_lasting(score.layers, agreement.low >= 0.5)
        near = first_lasting(score.layers, kl.value <= 1)
        print(
            f"{name}: agrees with the model on half of the tokens from {half} on"
            f" (by its interval from {sure}), and is within 1 nat from {near} on."
        )
        for row, layer in enumerate(score.layers):
            print(f"  layer.{layer}: KL {_text(kl, row)}, agreement", end=" ")
            print(_text(agreement, row))
    for name, other in (
        ("tuned", "logit"),
        ("Jacobian", "logit"),
        ("tuned", "Jacobian"),
        ("tuned, little text", "Jacobian"),
    ):
        _compare(scores, name, other)


def _compare(scores: dict[str, Scores], name: str, other: str) -> None:
    """Print at which layers one lens is ahead of another, text by text."""
    # At the last layer every lens is the model itself.
    layers = scores[name].layers[:-1]
    for measure, sign in (("agreement", 1), ("kl", -1)):
        difference = getattr(scores[name], measure) - getattr(scores[other], measure)
        gains = sign * difference[:, :-1]
        gain = mean_over_texts(gains, comparisons=len(layers))
        if len(gains) < FEWEST_GROUPS:
            print(f"{name} against {other}, {measure}: too few texts to compare.")
            continue
        ahead = layers[gain.low > 0]
        behind = layers[gain.high < 0]
        print(
            f"{name} against {other}, {measure}: better at {_layers(ahead)}, worse at"
            f" {_layers(behind)} of {len(layers)} layers (95% for all layers together)."
        )


def first_lasting(layers: NDArray[np.int64], holds: NDArray[np.bool_]) -> str:
    """Name the layer from which on a condition holds at every layer."""
    fails = np.flatnonzero(~holds)
    first = 0
    if len(fails):
        first = fails[-1] + 1
    if first == len(layers):
        return "no layer"
    return f"layer.{layers[first]}"


def draw(scores: dict[str, Scores], path: Path) -> None:
    """Draw KL and agreement along the layers, with their intervals over texts."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(6, 7.2), sharex=True, layout="constrained"
    )
    for name, score in scores.items():
        for axes, values in ((above, score.kl), (below, score.agreement)):
            average = share_over_texts if axes is below else mean_over_texts
            mean = average(values)
            colour = COLOURS[name]
            axes.plot(score.layers, mean.value, color=colour, label=name, lw=2)
            axes.fill_between(
                score.layers, mean.low, mean.high, color=colour, alpha=0.2, lw=0
            )
    above.set_ylabel("KL from the model, nats", fontsize=13)
    below.set_ylabel("same top token as the model", fontsize=13)
    below.set_xlabel("layer", fontsize=13)
    below.axhline(0.5, color="#999999", lw=1, ls=":")
    below.legend(frameon=False, fontsize=12, loc="upper left")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=12)
        axes.spines[["top", "right"]].set_visible(False)
    # The embeddings, read with the logit lens, would flatten all other curves.
    above.set_ylim(0, 20)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save_table(scores: dict[str, Scores], path: Path) -> None:
    """Write every mean and interval as a table."""
    with path.open("w", encoding="utf-8") as file:
        file.write("lens,measure,layer,mean,low,high\n")
        for name, score in scores.items():
            for measure in ("kl", "agreement"):
                average = mean_over_texts if measure == "kl" else share_over_texts
                mean = average(getattr(score, measure))
                for layer, *numbers in zip(score.layers, *mean, strict=True):
                    row = ",".join(f"{number:.4f}" for number in numbers)
                    file.write(f'"{name}",{measure},{layer},{row}\n')


def _text(mean: Mean, row: int) -> str:
    low, high = mean.low[row], mean.high[row]
    if not np.isfinite(low):
        return f"{mean.value[row]:.2f}"
    return f"{mean.value[row]:.2f} ({low:.2f} to {high:.2f})"


def _layers(layers: NDArray[np.int64]) -> str:
    if not len(layers):
        return "none"
    return f"{len(layers)} (layer.{layers[0]} to layer.{layers[-1]})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", action="store_true", help="more text, for a GPU")
    parser.add_argument("--out", type=Path, default=Path("out/lenses"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
