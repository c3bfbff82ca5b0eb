"""What differs inside a model between two sentences that differ in two words?

    python examples/two_sentences.py

It measures every state of both sentences, reads each layer with the lens, moves states
from one sentence into the other, lets a damaged copy of the model compute some of the
layers, and asks what the final norm takes away. It does so for smollm2 and for
gemma3-270m. `--quick` takes smollm2 alone and few texts, and damages a tiny random
model instead, so that its numbers of the donor mean nothing.
"""

import argparse
import copy
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray
from over_texts import first_tokens, mean_over_texts
from reviews import reviews
from torch import Tensor

import hiddenscope as hs
from hiddenscope.measures.running import effective_rank
from hiddenscope.testing import tiny_model, tiny_tokenizer

PARIS = "The capital of France is Paris."
BERLIN = "The capital of Germany is Berlin."
CAPITALS = hs.Contrast(
    "The capital of France is", "The capital of Germany is", " Paris", " Berlin"
)
COUNTRIES = {
    "France": " Paris",
    "Germany": " Berlin",
    "Italy": " Rome",
    "Spain": " Madrid",
    "Japan": " Tokyo",
    "China": " Beijing",
    "Russia": " Moscow",
    "England": " London",
    "Egypt": " Cairo",
    "Greece": " Athens",
    "Austria": " Vienna",
    "Ireland": " Dublin",
}
# The vocabulary of a tiny model has no capitals.
TINY_PROMPTS = [("The rest", " t"), ("The end", " a")]
# The damaged copy: this much noise in each weight matrix of its blocks, as a share of
# the matrix's own standard deviation.
NOISE = 0.2


class Size(NamedTuple):
    """How much is computed."""

    models: tuple[str, ...]
    window: int
    donors: int
    texts: int
    tokens: int


FULL = Size(("smollm2", "gemma3-270m"), window=5, donors=5, texts=24, tokens=48)
QUICK = Size(("smollm2",), window=2, donors=2, texts=3, tokens=12)


def main() -> None:
    """Ask every question of every model."""
    options = _options()
    size = QUICK if options.quick else FULL
    options.out.mkdir(parents=True, exist_ok=True)
    for name in size.models:
        print(f"\n{name}")
        model = hs.load(name)
        stem = f"{options.out}/two-sentences-{name}"
        measure_states(model, Path(f"{stem}-sizes.png"))
        raw_beside_final(model)
        read_layers(model, Path(f"{stem}-lens.html"))
        move_states(model, Path(f"{stem}-patch.png"))
        graft = Path(f"{stem}-graft.png")
        if options.quick:
            lend_layers(tiny(), TINY_PROMPTS, size, graft)
        else:
            lend_layers(model, capitals(), size, graft)
        ask_for_rank(model, size, Path(f"{stem}-rank.png"))


def measure_states(model: hs.Model, path: Path) -> None:
    """Draw mean, deviation and L2 norm by layer and token, and the difference."""
    sizes = hs.profile(model, PARIS).data
    result = hs.compare(model, PARIS, BERLIN)
    result.save(path.with_suffix(".html"))
    (facts,) = result.facts["stacks"]
    mean_share = abs(sizes["mean"] / sizes["deviation"]).max().item()
    norm = sizes["norm"].sel(site=_layers(model)).values
    layer, token = np.unravel_index(norm.argmax(), norm.shape)
    largest = norm[layer, token]
    median = np.median(norm[layer])
    print(f"The mean is at most {mean_share:.2f} standard deviations from zero.")
    print(
        f"The largest state is that of token {token} at layer.{layer}: norm"
        f" {largest:,.0f}; the median of layer.{layer} is {median:,.0f}."
    )
    print(
        f"{facts['tokens_equal']} of {facts['tokens_compared']} tokens have the same"
        " states in both sentences, bit for bit."
    )
    follow_difference(result)
    panels = {
        "mean": sizes["mean"],
        "standard deviation": np.log10(sizes["deviation"]),
        "L2 norm": np.log10(sizes["norm"]),
        "L2 of the difference / norm": result.data["relative"],
    }
    draw_grids(panels, path)


def follow_difference(result: hs.Result) -> None:
    """Print how the difference rises, where it jumps and what it does at the end."""
    (facts,) = result.facts["stacks"]
    medians = result.data["l2_median"].to_series()
    relative = result.data["relative_median"].to_series()
    end = facts["end"]
    # At layer.0 only the words that differ do.
    rises = medians.iloc[1:-2].diff()
    jump = medians.index.get_loc(rises.idxmax())
    sites = [medians.index[1], *medians.index[jump - 1 : jump + 1]]
    sites += [end[name]["site"] for name in ("before_last", "last", "final")]
    print("The median L2 norm of the difference, and as a share of the states' norm:")
    for site in dict.fromkeys(sites):
        print(f"  {site}: {medians[site]:,.1f}, {relative[site]:.2f}")
    share = end["share_of_drop_by_final_norm"]
    print(
        f"  Before the last block it grows most to {medians.index[jump]}; the final norm"
        f" causes {share:.1%} of the drop at the end."
    )


def raw_beside_final(model: hs.Model) -> None:
    """Print size and direction of the raw last layer and of `final`, by token."""
    states = model.capture(PARIS)
    last = _layers(model)[-1]
    raw = states[last]
    final = states["final"]
    cosine = torch.cosine_similarity(raw, final)
    print("token: norm of the raw last layer, norm of final, cosine of the two")
    strings = states.tokens.strings
    columns = (strings, raw.norm(dim=1), final.norm(dim=1), cosine)
    for string, of_raw, of_final, angle in zip(*columns, strict=True):
        print(f"  {string!r}: {of_raw:,.0f}, {of_final:,.0f}, {angle:.2f}")


def read_layers(model: hs.Model, path: Path) -> None:
    """Print where each answer comes up among the layers' predictions."""
    answers = {CAPITALS.clean: CAPITALS.answer, CAPITALS.corrupt: CAPITALS.other}
    for prompt, answer in answers.items():
        result = hs.lens(model, prompt, target=answer)
        name = f"{path.stem}-{answer.strip()}.html"
        result.save(path.with_name(name))
        last_token = result.data.isel(token=-1)
        rank = last_token["target_rank"].values
        probability = last_token["target_probability"].values
        print(
            f"{prompt!r}: {answer!r} is among the ten best {_since(rank <= 10)}, the"
            f" best {_since(rank <= 1)}; its probability at the end is"
            f" {probability[-1]:.2f}."
        )


def move_states(model: hs.Model, path: Path) -> None:
    """Put each state of the French prompt into the run of the German prompt."""
    result = hs.patch(model, CAPITALS, layers=0)
    result.save(path)
    result.save(path.with_suffix(".html"))
    result.save(path.with_suffix(".nc"))
    tokens = {
        "differing_token": "the country's token",
        "answer_token": "the last token",
    }
    for key, title in tokens.items():
        facts = result.facts[key]
        print(
            f"Moving {title} brings back at least half of the answer at"
            f" {facts['from']} to {facts['to']}; the largest effect is"
            f" {facts['largest']:.2f}."
        )


def lend_layers(
    model: hs.Model, data: list[tuple[str, str]], size: Size, path: Path
) -> None:
    """Let damaged copies of the model compute some of its layers, one after another."""
    print(
        "A donor is the same model with noise in the weights of its blocks, of"
        f" {NOISE} standard deviations. It computes {size.window} layers in a row."
    )
    for seed in range(size.donors):
        result = hs.graft(model, damaged(model, seed), data, layers=size.window)
        if seed == 0:
            result.save(path)
        print_graft(f"Donor {seed}", result)


def print_graft(title: str, result: hs.Result) -> None:
    """Print how many answers are right with the middle and the late layers of a donor."""
    facts = result.facts
    of_model = facts["model_alone"]["accuracy"]
    of_donor = facts["donor_alone"]["accuracy"]
    parts = []
    for name in ("middle", "late"):
        part = facts[name]
        place = f"{part['from']} to {part['to']}"
        parts.append(f"{name} (of {place}) {part['accuracy']:.0%}")
    difference = facts["middle_less_late"]
    print(
        f"  {title}: of {facts['prompts']} answers the model gives {of_model:.0%}, the"
        f" donor {of_donor:.0%}; with its layers: {', '.join(parts)}; middle less late"
        f" {difference['value']:+.2f}, p = {difference['p']:.3f}.",
        flush=True,
    )


def capitals() -> list[tuple[str, str]]:
    """Return prompts for capitals, and their answers."""
    data = []
    for country, capital in COUNTRIES.items():
        data.append((f"The capital of {country} is", capital))
    return data


def tiny() -> hs.Model:
    """Build a tiny Llama with random weights."""
    return hs.load((tiny_model("llama", layers=6), tiny_tokenizer()))


def damaged(model: hs.Model, seed: int = 0) -> hs.Model:
    """Return a copy of a model with noise in every weight matrix of its blocks."""
    module = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.model.layers.parameters():
            # Norms have vectors of gains, which stay as they are.
            if weight.ndim == 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise.to(weight) * NOISE * weight.std())
    return hs.load((module, model.tokenizer))


def ask_for_rank(model: hs.Model, size: Size, path: Path) -> None:
    """Compare the spectrum of the raw last layer with that of `final`.

    The final norm divides each state by its size, then multiplies each channel by its
    gain. A third cloud, `rows`, has gone through the first step only.
    """
    texts = first_tokens(model, reviews(), size.texts, size.tokens)
    last = _layers(model)[-1]
    states = model.capture(texts, f"{last},final")
    raw = states[last].double()
    final = states["final"].double()
    rows = raw / raw.norm(dim=1, keepdim=True)
    clouds = {"raw": raw, "rows": rows, "final": final}
    is_later = torch.from_numpy(states.tokens.positions > 0)
    print(f"{len(raw)} tokens of {size.texts} reviews, hidden size {raw.shape[1]}:")
    later = {}
    ranks = {}
    for name, cloud in clouds.items():
        later[name] = cloud[is_later]
        ranks[name] = ranks_by_text(cloud, size.texts)
        print(f"  {name}: {describe_ranks(cloud, later[name])}")
    cosine = torch.cosine_similarity(raw, final)[is_later]
    print(f"  cosine of raw and final: median {cosine.median():.2f}")
    for name, other in (("final", "raw"), ("rows", "raw"), ("final", "rows")):
        log_ratio = np.log(ranks[name] / ranks[other])
        value, low, high = np.exp(mean_over_texts(log_ratio))
        print(
            f"  within a text, {name} has {value:.3f} times the effective rank of"
            f" {other} ({low:.3f} to {high:.3f})."
        )
    draw_spectra(later, path)


def describe_ranks(cloud: Tensor, later: Tensor) -> str:
    """Say the rank of a cloud, and its effective rank with and without first tokens."""
    spectrum = variances(later)
    return (
        f"rank {torch.linalg.matrix_rank(cloud)}; effective rank"
        f" {effective_rank(variances(cloud)):.1f} with first tokens,"
        f" {effective_rank(spectrum):.1f} without; participation ratio without"
        f" {participation_ratio(spectrum):.1f}"
    )


def variances(cloud: Tensor) -> Tensor:
    """Return the variances of a cloud of states along its principal directions."""
    singular_values = torch.linalg.svdvals(cloud - cloud.mean(0))
    return singular_values.square() / (len(cloud) - 1)


def participation_ratio(spectrum: Tensor) -> float:
    """Return the squared sum of variances over the sum of their squares."""
    ratio = spectrum.sum().square() / spectrum.square().sum()
    return ratio.item()


def ranks_by_text(cloud: Tensor, texts: int) -> NDArray[np.float64]:
    """Return the effective rank of the states of each text, without its first token."""
    by_text = cloud.reshape(texts, -1, cloud.shape[1])
    parts = by_text[:, 1:]
    return np.array([effective_rank(variances(part)) for part in parts])


def draw_grids(panels: dict, path: Path) -> None:
    """Draw one grid for each number: tokens across, layers up, `final` on top."""
    figure, axes = plt.subplots(2, 2, figsize=(6.4, 8), layout="constrained")
    for ax, (title, data) in zip(axes.flat, panels.items(), strict=True):
        values = data.transpose("site", "token").values
        picture = ax.imshow(values, origin="lower", aspect="auto", cmap="viridis")
        ax.set_title(title, fontsize=11)
        strings = [str(string).strip() for string in data["string"].values]
        ax.set_xticks(range(len(strings)), strings, rotation=90, fontsize=11)
        count = len(values)
        layers = list(range(0, count - 5, 5))
        ax.set_yticks([*layers, count - 1], [*layers, "final"], fontsize=10)
        ax.axhline(count - 1.5, color="white", lw=1.5)
        bar = figure.colorbar(picture, ax=ax)
        bar.ax.tick_params(labelsize=9)
        if title in ("standard deviation", "L2 norm"):
            bar.ax.set_title("log₁₀", fontsize=9)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_spectra(clouds: dict[str, Tensor], path: Path) -> None:
    """Draw the variances of each cloud, as shares of their sum."""
    titles = {
        "raw": "raw last layer",
        "rows": "each state divided by its norm",
        "final": "final: and each channel times its gain",
    }
    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    colours = {"raw": "#0b6e99", "rows": "#999999", "final": "#d9772b"}
    for name, cloud in clouds.items():
        spectrum = variances(cloud)
        shares = spectrum / spectrum.sum()
        numbers = range(1, len(shares) + 1)
        axes.plot(numbers, shares, color=colours[name], label=titles[name])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-6)
    axes.set_xlabel("principal direction", fontsize=12)
    axes.set_ylabel("share of the variance", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.legend(frameon=False, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _since(holds: NDArray[np.bool_]) -> str:
    """Say from which layer on a condition holds at every layer."""
    if not holds[-1]:
        return "at no layer to the end"
    fails = np.flatnonzero(~holds)
    first = 0
    if len(fails):
        first = int(fails[-1]) + 1
    return f"from layer.{first} of {len(holds) - 1} on"


def _layers(model: hs.Model) -> list[str]:
    count = model.module.config.num_hidden_layers
    return [f"layer.{number}" for number in range(count + 1)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/two_sentences"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
