"""Are the states that Hugging Face returns the outputs of the blocks?

    python examples/hooks.py

It puts plain PyTorch hooks on every block of four models, and compares what they see
with `hidden_states` and with `hs.capture`, bit for bit. It asks which layers the
installed transformers selects, and what a hook on the MLP's projection sees. Then it
profiles the layers of smollm2 as `hidden_states` has them, and on one footing. `--quick`
takes fewer families and texts.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from over_texts import first_tokens, mean_over_texts
from reviews import reviews
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.testing import families, tiny_model, tiny_tokenizer

SENTENCE = "The capital of France is Paris."
TARGET_IDS = [1, 7, 8, 9]
SAME, DIFFERENT = "#7fb3a6", "#d9772b"
# Ways to ask transformers for some entries, or for all with the last one raw.
SELECTIONS: tuple[Any, ...] = (True, [2], [-1], 2)
# The block whose projection is hooked; it makes `layer.10`.
PROJECTION = "model.layers.9.mlp.down_proj"


class Stack(NamedTuple):
    """Where a stack has its blocks, and where Hugging Face returns its states."""

    blocks: str
    entries: str = "hidden_states"
    prefix: str = ""


class Case(NamedTuple):
    """A model to look at."""

    name: str
    load: Callable[[], hs.Model]
    stacks: tuple[Stack, ...]


class Entry(NamedTuple):
    """One entry of `hidden_states`, compared with the block of the same number."""

    # Whether the entry has the same bits as the block's output.
    is_output: bool
    # Their distance, as a share of the output's norm.
    distance: float


class Comparison(NamedTuple):
    """One stack of one model: what hooks see against the other two."""

    title: str
    entries: list[Entry]
    # Sites of `hs.capture` whose bits are those of the hooks, of all layers.
    captured: int
    # Whether `final` is the last entry, or None where there is no `final`.
    final_is_last_entry: bool | None


@cache
def smollm2() -> hs.Model:
    """Load the default model once."""
    return hs.load()


def tiny(family: str) -> Callable[[], hs.Model]:
    """Return a function that loads a tiny random model of a family."""
    return lambda: hs.load((tiny_model(family), tiny_tokenizer()))


CASES = (
    Case("smollm2 (pre-norm)", smollm2, (Stack("model.layers"),)),
    Case("minilm (post-norm)", lambda: hs.load("minilm"), (Stack("encoder.layer"),)),
    Case(
        "tiny T5 (pre-norm)",
        tiny("t5"),
        (
            Stack("encoder.block", "encoder_hidden_states", "encoder."),
            Stack("decoder.block", "decoder_hidden_states", "decoder."),
        ),
    ),
    Case(
        "tiny BART (post-norm)",
        tiny("bart"),
        (
            Stack("model.encoder.layers", "encoder_hidden_states", "encoder."),
            Stack("model.decoder.layers", "decoder_hidden_states", "decoder."),
        ),
    ),
)


def main() -> None:
    """Compare the four models, count the families, profile, and draw."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    comparisons: list[Comparison] = []
    for case in CASES:
        comparisons += compare(case)
    for comparison in comparisons:
        report(comparison)
    draw_entries(comparisons, options.out / "hooks-entries.png")
    select_entries()
    hook_projection()
    names = list(families())
    texts = 24
    tokens = 24
    if options.quick:
        names = names[:4]
        texts = 3
        tokens = 8
    count_families(names)
    profile(options.out, texts, tokens)


def compare(case: Case) -> Iterator[Comparison]:
    """Run a model once with hooks of our own, and hold the three against each other."""
    model = case.load()
    inputs = model_inputs(model, two_stacks=len(case.stacks) > 1)
    for stack in case.stacks:
        blocks = model.module.get_submodule(stack.blocks)
        with hooked(list(blocks)) as outputs, torch.no_grad():
            returned = model.module(**inputs, output_hidden_states=True)
        entries = [entry[0].cpu() for entry in returned[stack.entries]]
        captured = capture(model, inputs)
        same_bits = 0
        for number, output in enumerate(outputs):
            state = captured[f"{stack.prefix}layer.{number}"]
            same_bits += torch.equal(state, output)
        final = f"{stack.prefix}final"
        final_is_last_entry = None
        if final in map(str, captured.sites):
            final_is_last_entry = torch.equal(captured[final], entries[-1])
        title = f"{case.name} {stack.prefix.rstrip('.')}".strip()
        rows = compared(outputs, entries)
        yield Comparison(title, rows, same_bits, final_is_last_entry)


@contextmanager
def hooked(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Keep what enters the first block and what every block returns.

    This is what most people write. The two traps of writing it are here as well: a
    block may return a tuple, and a later block may change its input in place, so the
    state is copied.
    """
    outputs: list[Tensor] = []

    def keep_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        outputs.append(state[0].to("cpu", copy=True))

    def keep_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        outputs.append(state[0].to("cpu", copy=True))

    handles = [blocks[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    for block in blocks:
        handles.append(block.register_forward_hook(keep_output))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def model_inputs(model: hs.Model, *, two_stacks: bool) -> dict[str, Tensor]:
    """Return one sentence as the module takes it, and a decoder's text if it has one."""
    (ids,) = model.encode(SENTENCE).ids
    device = model.device
    inputs = {"input_ids": torch.tensor([ids], device=device)}
    if two_stacks:
        inputs["decoder_input_ids"] = torch.tensor([TARGET_IDS], device=device)
    return inputs


def capture(
    model: hs.Model, inputs: dict[str, Tensor], sites: str = "layer.*,final"
) -> hs.States | hs.Pair:
    """Capture sites of the same ids: every layer and `final` unless others are named."""
    ids = inputs["input_ids"].tolist()
    if "decoder_input_ids" not in inputs:
        return model.capture(ids, sites)
    targets = inputs["decoder_input_ids"].tolist()
    return model.capture(ids, targets=targets)


def compared(outputs: list[Tensor], entries: list[Tensor]) -> list[Entry]:
    """Compare each block's output with the entry of the same number."""
    rows = []
    for output, entry in zip(outputs, entries, strict=True):
        distance = (entry - output).norm() / output.norm()
        is_output = torch.equal(output, entry)
        rows.append(Entry(is_output, distance.item()))
    return rows


def report(comparison: Comparison) -> None:
    """Print what holds in one stack."""
    entries = comparison.entries
    last = len(entries) - 1
    same = sum(entry.is_output for entry in entries)
    print(
        f"{comparison.title}: {same} of {last + 1} entries of hidden_states are what"
        " the hooks see, bit for bit."
    )
    print(
        f"  hs.capture has the bits of the hooks at {comparison.captured} of"
        f" {last + 1} layers."
    )
    if entries[last].is_output:
        print(f"  hidden_states[{last}] is the output of the last block.")
    else:
        print(
            f"  hidden_states[{last}] is NOT the output of the last block: it is"
            f" {entries[last].distance:.0%} of that output's norm away from it."
        )
    if comparison.final_is_last_entry is None:
        print("  There is no final norm, and no site `final`.")
    else:
        print(f"  It is `final`, bit for bit: {comparison.final_is_last_entry}.")


def draw_entries(comparisons: list[Comparison], path: Path) -> None:
    """Draw each entry of hidden_states as a square: orange where it is no output."""
    figure, axes = plt.subplots(figsize=(6, 4.8), layout="constrained")
    for row, comparison in enumerate(comparisons):
        last = len(comparison.entries) - 1
        for number, entry in enumerate(comparison.entries):
            # Aligned on the right, where the last entries are.
            place = (number - last - 0.45, row)
            colour = SAME if entry.is_output else DIFFERENT
            square = plt.Rectangle(place, 0.9, 0.4, color=colour, lw=0)
            axes.add_patch(square)
        axes.text(-30.4, row - 0.07, comparison.title, fontsize=11, va="bottom")
    axes.set_xlim(-31, 1)
    axes.set_ylim(len(comparisons) - 0.4, -1)
    axes.set_yticks([])
    places = {-30: "L-30", -20: "L-20", -10: "L-10", 0: "L"}
    axes.set_xticks(list(places), list(places.values()), fontsize=12)
    axes.set_xlabel("entry of hidden_states", fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    patches = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (SAME, DIFFERENT)]
    meanings = ["a block's output", "not"]
    axes.legend(patches, meanings, loc="upper left", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def select_entries() -> None:
    """Print which sites the installed transformers returns for a selection."""
    model = hs.load((tiny_model("llama", layers=6), tiny_tokenizer()))
    # A second model, so that no setting of the first is touched.
    untied = tiny_model("llama", layers=6)
    untied.config.tie_last_hidden_states = False
    (ids,) = model.encode(SENTENCE).ids
    states = model.capture([ids])
    print(f"transformers {transformers.__version__}, a Llama of 6 blocks:")
    for selection in SELECTIONS:
        sites = ", ".join(selected_sites(model.module, ids, selection, states))
        print(f"  output_hidden_states={selection}: {sites or 'nothing'}")
    sites = ", ".join(selected_sites(untied, ids, True, states))
    print(f"  True, with config.tie_last_hidden_states=False: {sites}")


def selected_sites(
    module: Any, ids: Sequence[int], selection: Any, states: hs.States
) -> list[str]:
    """Return the site whose bits each returned entry has."""
    inputs = torch.tensor([list(ids)], device=module.device)
    with torch.no_grad():
        entries = module(inputs, output_hidden_states=selection).hidden_states
    sites = []
    for entry in entries:
        for site in states.sites:
            if entry is not None and torch.equal(entry[0].cpu(), states[site]):
                sites.append(str(site))
    return sites


def hook_projection() -> None:
    """Print what a hook on the MLP's last projection sees, beside the whole state."""
    model = smollm2()
    inputs = model_inputs(model, two_stacks=False)
    with hooked([model.module.get_submodule(PROJECTION)]) as seen, torch.no_grad():
        model.module(**inputs)
    states = capture(model, inputs, "layer.10,layer.10.mlp")
    written, state = seen[1][1:], states["layer.10"][1:]
    is_write = torch.equal(seen[1], states["layer.10.mlp"])
    print(f"A hook on {PROJECTION} sees layer.10.mlp, bit for bit: {is_write}.")
    norms = [tensor.norm(dim=1).mean().item() for tensor in (written, state)]
    cosine = torch.cosine_similarity(written, state).mean().item()
    print(
        f"  Mean norm without the first token: {norms[0]:.1f}; of layer.10:"
        f" {norms[1]:.1f}. Mean cosine of the two: {cosine:.2f}."
    )


def count_families(names: Sequence[str]) -> None:
    """Count the families of tiny models whose last entry is not the last output."""
    normed: dict[str, list[str]] = {"encoder": [], "decoder": []}
    raw: dict[str, list[str]] = {"encoder": [], "decoder": []}
    for name in names:
        result = hs.anatomy((tiny_model(name), None))
        entries = result.data["entry"].to_series()
        stacks = result.facts["stacks"]
        for stack in stacks:
            prefix = f"{stack['stack']}." if len(stacks) > 1 else ""
            # `final` is the last entry of hidden_states, where it is an entry at all.
            where = normed if entries.get(f"{prefix}final") else raw
            where[stack["stack"]].append(name)
    for stack in ("encoder", "decoder"):
        changed = normed[stack]
        unchanged = raw[stack]
        total = len(changed) + len(unchanged)
        print(
            f"{stack}: of {total} families, the last entry of {len(changed)} is"
            f" not the last block's output: {', '.join(changed) or 'none'}."
        )
        print(f"  It is that output in: {', '.join(unchanged) or 'none'}.")


def profile(folder: Path, count: int, length: int) -> None:
    """Profile smollm2 as hidden_states has it, and with every layer normed."""
    model = smollm2()
    texts = first_tokens(model, reviews(), count, length)
    # Neighbours and CKA are dear, and a few hundred tokens suffice here.
    apart = hs.profile(model, texts, final_norm="apart", sample=200)
    everywhere = hs.profile(model, texts, final_norm="everywhere", sample=200)
    apart.save(folder / "profile-apart.html")
    everywhere.save(folder / "profile.html")
    everywhere.save(folder / "profile.nc")
    raw = norms_by_text(apart, count)
    normed = norms_by_text(everywhere, count)
    layers = raw.shape[1] - 1
    # The raw last layer is missing from hidden_states; `final` has its place.
    naive = np.delete(raw, layers - 1, axis=1)
    print(f"The mean norm over {count} texts of {length} tokens, without first tokens:")
    last_three = {
        "raw": raw[:, -4:-1],
        "in hidden_states": naive[:, -3:],
        "through the final norm": normed[:, -3:],
    }
    numbers = range(layers - 3, layers)
    for title, values in last_three.items():
        mean = mean_over_texts(values)
        parts = []
        for number, value, low, high in zip(numbers, *mean, strict=True):
            parts.append(f"{number} {value:.1f} ({low:.1f} to {high:.1f})")
        print(f"  {title}: {'; '.join(parts)}")
    draw_norms(naive, raw[:, :-1], normed, folder / "hooks-norms.png")


def norms_by_text(result: hs.Result, count: int) -> np.ndarray:
    """Return the mean norm of each text [text, site], without first tokens."""
    norm = result.data["norm"].transpose("token", "site")
    is_later = norm["position"].values > 0
    others = norm.values[is_later]
    by_text = others.reshape(count, -1, others.shape[1])
    return by_text.mean(1)


def draw_norms(
    naive: np.ndarray, raw: np.ndarray, normed: np.ndarray, path: Path
) -> None:
    """Draw the norms along the layers in the three readings."""
    figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
    for title, values, colour, style in (
        ("raw: the blocks' outputs", raw, "#0b6e99", "-"),
        ("hidden_states as returned", naive, DIFFERENT, "--"),
        ("every layer normed", normed, "#555555", "-"),
    ):
        mean = mean_over_texts(values)
        layers = np.arange(len(mean.value))
        axes.plot(layers, mean.value, style, color=colour, label=title, lw=2)
        axes.fill_between(layers, mean.low, mean.high, color=colour, alpha=0.2, lw=0)
    axes.set_yscale("log")
    axes.set_xlabel("layer, or entry of hidden_states", fontsize=12)
    axes.set_ylabel("mean L2 norm of a state", fontsize=12)
    axes.tick_params(labelsize=12)
    axes.legend(frameon=False, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/hooks"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
