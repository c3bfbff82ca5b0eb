"""Does it matter which layers come from a model that predicts wrongly?

    python examples/checkpoints.py
    python examples/checkpoints.py --device cuda --steps 8000

It trains a small GPT-2 on film reviews, and puts blocks of an early checkpoint into the
last one and the other way round. It does the same to smollm2 with itself in 4 bits, and
with two adapters of which one learnt shuffled text. Then it shows what the checkpoints
learn. What is trained is kept in the cache folder. `--quick` takes the same steps with
tiny models: its numbers mean nothing.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from over_texts import first_tokens
from scipy.stats import norm
from torch import Tensor, nn
from training import Size, adapter, checkpoints, corpus

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer

WINDOWS = (1, 3)
TINY = Size(6, 32, 2, 512, 64, 8, 16, reviews=200)
# The numbers that share a scale in a weight of 4 bits.
BLOCK = 64
COLOURS = ("#0b6e99", "#c4501b", "#6a994e")


class Grafted(NamedTuple):
    """What blocks of a donor do to a model."""

    model: str
    donor: str
    result: hs.Result

    @property
    def losses(self) -> dict[str, Any]:
        """Return the facts about the loss."""
        losses: dict[str, Any] = self.result.facts["losses"]
        return losses

    def line(self) -> str:
        """Say in a line what the thirds of the depth do."""
        facts = self.losses
        parts = []
        for name in ("early", "middle", "late"):
            third = facts[name]
            parts.append(
                f"{name} {interval(third['loss_change'], '+.3f')}, same"
                f" {interval(third['agreement'], '.0%')}"
            )
        return (
            f"{self.model} with {self.result.facts['layers']} of {self.donor}: alone"
            f" {facts['model']['value']:.3f} and {facts['donor']['value']:.3f};"
            f" {'; '.join(parts)}; late less middle"
            f" {interval(facts['late_less_middle'], '+.3f')}; raised in"
            f" {len(facts['raised'])}, lowered in {len(facts['lowered'])} of"
            f" {facts['windows']}"
        )


def main() -> None:
    """Train, graft, and look at the checkpoints."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    lines: list[str] = []

    def tell(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    folders = checkpoints(options.size, options.device)
    tell(
        f"Trained, or read, after {time.perf_counter() - start:,.0f} s: {options.size}"
    )
    grafts = []
    for part in (graft_checkpoints(folders, options), graft_itself(options)):
        for grafted in part:
            tell(grafted.line())
            grafts.append(grafted)
    numbers: dict[str, Any] = {"grafts": [as_json(grafted) for grafted in grafts]}
    draw_harm(numbers["grafts"], options.out / "harm.png")
    series = read_series(folders, options)
    draw_series(series, options.out / "series.png")
    for analysis, result in series.items():
        tell(f"\n{analysis}\n{result.summary()}")
    for grafted in grafts:
        lines.append(f"\n{grafted.model} with blocks of {grafted.donor}")
        lines.append(grafted.result.summary())
    tell(f"\nAll of it took {time.perf_counter() - start:,.0f} s.")
    findings = options.out / "findings.txt"
    findings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for analysis, result in series.items():
        numbers[analysis] = result.facts["headlines"]
        result.save(options.out / f"{analysis}.json")
    (options.out / "findings.json").write_text(json.dumps(numbers), encoding="utf-8")


def graft_checkpoints(
    folders: dict[int, Path], options: argparse.Namespace
) -> Iterator[Grafted]:
    """Put blocks of early checkpoints into the last, and those of the last into them."""
    steps = sorted(folders)
    last = hs.load(folders[steps[-1]], device=options.device)
    texts = held_out_starts(last, options)
    # Untrained, after a 64th of the training, and after an eighth.
    for step in (steps[0], steps[1], steps[-4]):
        early = hs.load(folders[step], device=options.device)
        names = f"step {steps[-1]:,}", f"step {step:,}"
        yield from both_ways((last, early), names, texts)


def graft_itself(options: argparse.Namespace) -> Iterator[Grafted]:
    """Put blocks of changed copies of a model into it, and its own into them."""
    source, name = options.source, options.name
    model = hs.load(source, device=options.device)
    texts = held_out_starts(model, options)
    four_bits = hs.load((in_four_bits(model.module), model.tokenizer))
    yield from both_ways((model, four_bits), (name, f"{name} in 4 bits"), texts)
    del four_bits
    for order, words in (("as written", "adapted"), ("shuffled", "misadapted")):
        folder = adapter(source, order, options.adapter_steps, options.device)
        adapted = hs.load(hs.Adapted(source, folder), device=options.device)
        yield from both_ways((model, adapted), (name, f"{name} {words}"), texts)


def both_ways(
    models: tuple[hs.Model, hs.Model], names: tuple[str, str], texts: list[list[int]]
) -> Iterator[Grafted]:
    """Graft each of two models into the other, by single blocks and by three."""
    for into, of in ((0, 1), (1, 0)):
        for layers in WINDOWS:
            result = hs.graft(models[into], models[of], texts, layers=layers)
            yield Grafted(names[into], names[of], result)


def held_out_starts(model: hs.Model, options: argparse.Namespace) -> list[list[int]]:
    """Return the first tokens of reviews that nothing was trained on."""
    reviews = [review.text for review in corpus().held_out]
    return first_tokens(model, reviews, options.texts, options.tokens)


def in_four_bits(module: nn.Module) -> nn.Module:
    """Return a copy whose projections hold what NF4 leaves of them.

    The head and the embeddings stay as they are, as in bitsandbytes.
    """
    rounded = copy.deepcopy(module)
    head: Any = getattr(rounded, "get_output_embeddings", lambda: None)()
    with torch.no_grad():
        for part in rounded.modules():
            if isinstance(part, nn.Linear) and part is not head:
                part.weight.copy_(round_to_nf4(part.weight))
    return rounded


def round_to_nf4(weight: Tensor) -> Tensor:
    """Round a weight to the 16 levels of NF4, scaled by the largest of each block."""
    blocks = weight.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)
    levels = nf4_levels().to(weight)
    borders = (levels[1:] + levels[:-1]) / 2
    numbers = torch.bucketize((blocks / scale).contiguous(), borders)
    return (levels[numbers] * scale).reshape(weight.shape)


def nf4_levels() -> Tensor:
    """Return the levels of NF4: quantiles of a normal distribution, with an exact zero.

    Dettmers et al. 2023 take eight levels above zero and seven below, between the
    quantiles that leave a 32nd and a 30th outside on average.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above = norm.ppf(np.linspace(outermost, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(outermost, 0.5, 8)[:-1])
    levels = np.sort([*above, 0.0, *below])
    return torch.from_numpy(levels / levels.max()).float()


def read_series(
    folders: dict[int, Path], options: argparse.Namespace
) -> dict[str, hs.Result]:
    """Ask every checkpoint what its layers predict, span and tell of the sentiment."""
    members = []
    for step, folder in sorted(folders.items()):
        name = f"step {step:,}"
        members.append(hs.Member(folder, name, at=step, device=options.device))
    reviews = corpus().held_out
    model = hs.load(folders[0], device="cpu")
    texts = []
    labels = []
    for review in reviews[: options.probed]:
        (ids,) = model.encode(review.text[:2_000], truncate=True).ids
        texts.append(model.tokenizer.decode(ids[: options.tokens]))
        labels.append(review.sentiment)
    starts = held_out_starts(model, options)
    return {
        "lens": hs.series(members, "lens", starts),
        "profile": hs.series(members, "profile", starts),
        "probe": hs.series(members, "probe", (texts, labels), options={"pool": "mean"}),
    }


def interval(estimate: dict[str, float], form: str) -> str:
    """Write a mean and its interval."""
    if estimate["low"] is None:
        return f"{estimate['value']:{form}}"
    value, low, high = (estimate[end] for end in ("value", "low", "high"))
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def as_json(grafted: Grafted) -> dict[str, Any]:
    """Return the numbers of a graft."""
    data = grafted.result.data
    return {
        "model": grafted.model,
        "donor": grafted.donor,
        "facts": grafted.result.facts,
        "by_window": {str(name): data[name].values.tolist() for name in data},
    }


def draw_harm(grafts: list[dict[str, Any]], path: Path) -> None:
    """Draw the change of the loss by block: a row for each model, a column for each
    direction.
    """
    single = [graft for graft in grafts if graft["facts"]["layers"] == 1]
    # Of each pair, the first is grafted into the model, the second into the donor.
    pairs = [single[number : number + 2] for number in range(0, len(single), 2)]
    figure, rows = plt.subplots(2, 2, figsize=(8.4, 6.8), layout="constrained")
    for axes, three in zip(rows, (pairs[:3], pairs[3:]), strict=True):
        name = three[0][0]["model"]
        titles = f"one block of ... in {name}", f"one block of {name} in ..."
        labels = "donor", "model"
        for direction, axis in enumerate(axes):
            for colour, pair in zip(COLOURS, three, strict=True):
                graft = pair[direction]
                values = graft["by_window"]
                blocks = np.arange(1, len(values["loss_change"]) + 1)
                label = graft[labels[direction]].removeprefix(f"{name} ")
                axis.plot(blocks, values["loss_change"], color=colour, label=label)
                ends = [
                    np.array(values[f"loss_change_{end}"], dtype=float)
                    for end in ("low", "high")
                ]
                axis.fill_between(blocks, *ends, color=colour, alpha=0.25, lw=0)
            third = len(blocks) / 3
            axis.axvspan(0.5 + third, 0.5 + 2 * third, color="#eeeeee", zorder=-1)
            axis.axhline(0, color="black", lw=0.7)
            axis.set_title(titles[direction], fontsize=11)
            axis.set_xlim(0.5, len(blocks) + 0.5)
            axis.set_yscale("symlog", linthresh=0.01)
            axis.set_xlabel("block (grey: the middle third)")
            axis.set_ylabel("change of the loss (nats)")
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(
                frameon=False, fontsize=9, ncols=3, loc="upper center", borderpad=0
            )
            # Room for the legend above the curves.
            low, high = axis.get_ylim()
            axis.set_ylim(low, 4 * high)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_series(series: dict[str, hs.Result], path: Path) -> None:
    """Draw what each layer of each checkpoint predicts, spans and tells."""
    panels = {
        "lens": ("agreement", "predicts what the model predicts (share)"),
        "profile": ("effective_rank", "effective rank"),
        "probe": ("accuracy", "sentiment read right (share)"),
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    for axis, (analysis, (variable, title)) in zip(axes, panels.items(), strict=True):
        values = series[analysis].data[variable]
        sites = [str(site).removeprefix("layer.") for site in values["site"].values]
        colours = plt.cm.viridis(np.linspace(0, 0.92, len(values["member"])))
        for colour, member in zip(colours, values["member"].values, strict=True):
            row = values.sel(member=member)
            axis.plot(sites, row, color=colour, label=str(member), marker=".")
        axis.set_title(title, fontsize=11)
        axis.set_ylim(bottom=0.5 if analysis == "probe" else 0)
        axis.set_xlabel("layer")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", help="such as cuda; by default the CPU")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=Size().steps)
    parser.add_argument("--adapter-steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a minute")
    parser.add_argument("--out", type=Path, default=Path("out/checkpoints"))
    options = parser.parse_args()
    options.size = Size(steps=options.steps)
    options.probed = 400
    options.source = options.model
    options.name = Path(options.model).name
    if options.quick:
        options.size = TINY
        options.texts = 8
        options.tokens = 16
        options.adapter_steps = 2
        options.probed = 40
        options.source = options.out / "tiny"
        options.name = "tiny"
        tiny_model("llama", layers=6).save_pretrained(options.source)
        tiny_tokenizer().save_pretrained(options.source)
    return options


if __name__ == "__main__":
    main()
