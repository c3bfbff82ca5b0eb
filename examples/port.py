"""Find which line of a port is wrong: plant bugs in a plain Llama, one at a time.

    python examples/port.py

`examples/plain_llama.py` is a Llama in plain PyTorch with the weights of smollm2. Each
bug below is one that ports really have. The script first asks what the outputs alone
say: how far the logits move, and whether the model still writes the same text. Then it
asks `hs.drift`. It writes a table, two pictures and the page of one comparison.
`--quick` takes the first blocks of smollm2 and one bug.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
from plain_llama import Attention, Norm, PlainLlama
from torch import Tensor

import hiddenscope as hs
from hiddenscope.testing import tiny_model

TEXTS = [
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "In 1969, people landed on the moon for the first time.",
]
PROMPT = "The capital of France is"
NEW_TOKENS, QUICK_TOKENS = 12, 2
QUICK_BLOCKS = 2
# The block that holds a bug which is not in all of them: in the middle of smollm2.
BLOCK = 11
TABLE_END = 64


def main() -> None:
    """Plant every bug, print what the outputs and drift say, and draw both."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load()
    bugs, new_tokens = BUGS, NEW_TOKENS
    if options.quick:
        new_tokens = QUICK_TOKENS
        model = first_blocks(model, QUICK_BLOCKS)
        bugs = tuple(filter(lambda bug: bug.quick, BUGS))

    expected = greedy(lambda ids: model.module(ids).logits, model, new_tokens)
    trials = []
    for bug in bugs:
        print(f"\n{bug.name}, in {bug.where}:", flush=True)
        trial = examine(model, bug, expected)
        trials.append(trial)
        print(f"  {trial.outputs_say()}\n  {trial.drift_says()}", flush=True)

    (options.out / "port.md").write_text(table(trials), "utf-8")
    rows = [trial.row() for trial in trials]
    draw_verdicts(rows, options.out / "port-verdicts.png")
    shown = next(trial.result for trial in trials if trial.bug.plant is rope_theta)
    for suffix in ("html", "nc", "png"):
        shown.save(options.out / f"port-drift.{suffix}")

    if not options.quick:
        print(f"\nThe short RoPE table, on a text of {TABLE_END * 2} tokens:")
        found_on_long_text(model)
    print("\nRounding to bfloat16, in a tiny random Llama:")
    round_tiny_model()


# The bugs. Each changes a sound port in place.


def rope_theta(port: PlainLlama) -> None:
    """Use 10,000, the base of the first Llama; smollm2 was trained with 100,000."""
    for block in port.blocks:
        block.attention.base = 10_000.0


def rotate_pairs(port: PlainLlama) -> None:
    """Rotate neighbouring channels; the weights are laid out for halves."""
    for block in port.blocks:
        block.attention.mistake = "interleaved"


def repeat_heads(port: PlainLlama) -> None:
    """Repeat key and value heads as 0, 1, 2, 0, 1, 2 and not as 0, 0, 1, 1, 2, 2."""
    for block in port.blocks:
        block.attention.mistake = "repeat"


def norm_eps(port: PlainLlama) -> None:
    """Use an eps of 1e-6; the config of smollm2 says 1e-5."""
    for block in port.blocks:
        block.norm1.eps = 1e-6
        block.norm2.eps = 1e-6
    port.norm.eps = 1e-6


def swap_gate_and_up(port: PlainLlama) -> None:
    """Exchange the two matrices of one MLP, as a wrong name in a loader does."""
    block = port.blocks[BLOCK]
    block.gate, block.up = block.up, block.gate


class UnscaledAttention(Attention):
    """Attention whose scores are not divided by the root of the head's width."""

    def rotate(self, x: Tensor) -> Tensor:
        # Queries and keys both pass through here: together that undoes the division.
        return super().rotate(x) * self.width**0.25


def forget_scale(port: PlainLlama) -> None:
    """Leave the scores of one block unscaled."""
    port.blocks[BLOCK].attention.__class__ = UnscaledAttention


class RoundedNorm(Norm):
    """A norm that returns bfloat16 digits in float32, as a lost cast leaves them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16().float()


def round_norm(port: PlainLlama) -> None:
    """Round what one norm returns to bfloat16."""
    port.blocks[BLOCK].norm2.__class__ = RoundedNorm


class ShortTableAttention(Attention):
    """Attention whose table of rotations ends: later tokens are not rotated."""

    def rotate(self, x: Tensor) -> Tensor:
        rotated = super().rotate(x)
        return torch.cat([rotated[..., :TABLE_END, :], x[..., TABLE_END:, :]], -2)


def short_table(port: PlainLlama) -> None:
    """End the table of rotary positions at 64 tokens."""
    for block in port.blocks:
        block.attention.__class__ = ShortTableAttention


def wrong_row(port: PlainLlama) -> None:
    """Zero the embedding of one token that no text of the comparison has."""
    with torch.no_grad():
        port.embed.weight[30_000] = 0.0


def nothing(port: PlainLlama) -> None:
    """Leave the port as it is."""


@dataclass(frozen=True)
class Bug:
    """A bug, the first site at which it shows, and the modules that hold it."""

    name: str
    where: str
    plant: Callable[[PlainLlama], None]
    site: str | None
    modules: tuple[str, ...]
    quick: bool = False


EVERY, ONE, AFTER = "every block", f"block {BLOCK}", f"layer.{BLOCK + 1}"
FIRST_ATTENTION = ("blocks.0.attention",)
# What is true is written down before drift is asked. Of two exchanged matrices each is
# wrong, and so is the block that holds both.
BUGS = (
    Bug("no bug", "the whole port", nothing, None, ()),
    Bug("RoPE theta", EVERY, rope_theta, "layer.1", FIRST_ATTENTION, quick=True),
    Bug("RoPE pairs", EVERY, rotate_pairs, "layer.1", FIRST_ATTENTION),
    Bug("KV heads in turn", EVERY, repeat_heads, "layer.1", FIRST_ATTENTION),
    Bug("norm eps", EVERY, norm_eps, "layer.1", ("blocks.0.norm1",)),
    Bug(
        "gate and up",
        ONE,
        swap_gate_and_up,
        AFTER,
        (f"blocks.{BLOCK}", f"blocks.{BLOCK}.gate", f"blocks.{BLOCK}.up"),
    ),
    Bug("no 1/sqrt(d)", ONE, forget_scale, AFTER, (f"blocks.{BLOCK}.attention",)),
    Bug("bf16 norm", ONE, round_norm, AFTER, (f"blocks.{BLOCK}.norm2",)),
    Bug("short RoPE table", EVERY, short_table, "layer.1", FIRST_ATTENTION),
    Bug("a row of embed", "one token", wrong_row, "layer.0", ("embed",)),
)


@dataclass(frozen=True)
class Trial:
    """What the outputs of a port say of a bug, and what drift says."""

    bug: Bug
    logit_difference: float
    same_text: bool
    text: str
    result: hs.Result

    def row(self) -> "Row":
        """Return what the figure shows."""
        beyond = self.result.facts["beyond"]
        return Row(self.bug.name, self.logit_difference, self.same_text, beyond)

    def verdict(self) -> str:
        """Say whether drift named the site and the module that are wrong."""
        facts = self.result.facts
        if facts["first_site"] != self.bug.site:
            missed = facts["first_site"] is None
            return "missed" if missed else "wrong"
        if self.bug.site is None or facts["module"] in self.bug.modules:
            return "right"
        return "right site, wrong module"

    def outputs_say(self) -> str:
        """Say in a sentence what can be seen without hidden states."""
        verdict = "another text"
        if self.same_text:
            verdict = "the same text"
        return (
            f"The outputs: logits differ by up to {self.logit_difference:.2g};"
            f" {verdict}: {self.text!r}."
        )

    def drift_says(self) -> str:
        """Say in a sentence which site and module drift names."""
        facts = self.result.facts
        if not facts["drifted"]:
            return (
                f"Drift: none ({self.verdict()}); the largest error is"
                f" {facts['beyond']:.2f} times the noise envelope."
            )
        code = ""
        if facts["own_code"]:
            code = ", its own code"
        hints = [hint["fault"] for hint in facts["hints"]]
        return (
            f"Drift: first at {facts['first_site']}, in {facts['module']}{code};"
            f" {facts['beyond']:,.0f} times the noise envelope;"
            f" hints: {', '.join(hints) or 'none'}; {self.verdict()}."
        )


def examine(model: hs.Model, bug: Bug, expected: list[int]) -> Trial:
    """Plant a bug in a fresh port and compare it with the model."""
    port = PlainLlama(model.module).eval()
    bug.plant(port)
    difference = logit_difference(model, port)
    written = greedy(port, model, len(expected))
    return Trial(
        bug,
        difference,
        written == expected,
        model.tokenizer.decode(written, clean_up_tokenization_spaces=False),
        hs.drift(model, port, TEXTS),
    )


@torch.no_grad()
def logit_difference(model: hs.Model, port: PlainLlama) -> float:
    """Return the largest difference of any logit over the texts."""
    differences = []
    for ids in model.encode(TEXTS).ids:
        batch = torch.tensor([ids], device=model.device)
        difference = model.module(batch).logits - port(batch)
        differences.append(difference.abs().max().item())
    return max(differences)


@torch.no_grad()
def greedy(
    forward: Callable[[Tensor], Tensor], model: hs.Model, count: int
) -> list[int]:
    """Write a few tokens after the prompt, each the most likely."""
    (prompt,) = model.encode(PROMPT).ids
    ids = list(prompt)
    for _ in range(count):
        logits = forward(torch.tensor([ids], device=model.device))
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def found_on_long_text(model: hs.Model) -> None:
    """Show that the bug of the short table appears once a text is long enough."""
    (ids,) = model.encode(" ".join(TEXTS * 8)).ids
    port = PlainLlama(model.module).eval()
    short_table(port)
    result = hs.drift(model, port, [list(ids[: 2 * TABLE_END])])
    first = result.facts["first_token"]
    print(
        f"  Drift: first at {result.facts['first_site']}, in"
        f" {result.facts['module']}; largest at position {first['position']}."
    )


def round_tiny_model() -> None:
    """Compare a port that is bfloat16 throughout with a port that hides a rounding."""
    module = tiny_model("llama")
    model = hs.load(module)
    texts = [list(range(1, 33)), list(range(40, 64))]
    whole = PlainLlama(module).eval().bfloat16()
    silent = PlainLlama(module).eval()
    silent.blocks[1].norm2.__class__ = RoundedNorm
    for name, port in (("all of it in bfloat16", whole), ("one norm", silent)):
        facts = hs.drift(model, port, texts).facts
        if facts["drifted"]:
            print(f"  {name}: drift at {facts['first_site']}, in {facts['module']}.")
        else:
            print(f"  {name}: no drift; {facts['beyond']:.2f} times the envelope.")


def first_blocks(model: hs.Model, count: int) -> hs.Model:
    """Return a model of the first blocks, so that a first look takes seconds."""
    module = copy.deepcopy(model.module)
    module.model.layers = module.model.layers[:count]
    module.config.num_hidden_layers = count
    return hs.load(module, model.tokenizer)


def table(trials: list[Trial]) -> str:
    """Return the table of the page: the bug, what outputs say, what drift says."""
    rows = [
        "| bug | where | largest logit difference | greedy text | drift: first site"
        " | module | times the envelope | hints | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for trial in trials:
        facts = trial.result.facts
        written = "another"
        if trial.same_text:
            written = "the same"
        hints = [hint["fault"] for hint in facts["hints"]]
        cells = (
            trial.bug.name,
            trial.bug.where,
            f"{trial.logit_difference:.2g}",
            written,
            str(facts["first_site"] or "none"),
            str(facts["module"] or "none"),
            f"{facts['beyond']:,.2g}",
            ", ".join(hints) or "none",
            trial.verdict(),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


class Row(NamedTuple):
    """What the figure shows of a bug."""

    name: str
    logit_difference: float
    same_text: bool
    beyond: float


def draw_verdicts(rows: list[Row], path: Path) -> None:
    """Draw how loudly each bug speaks: in the logits, and in drift."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (outputs, drift) = plt.subplots(
        1, 2, figsize=(6.2, 0.3 * len(rows) + 1.5), sharey=True
    )
    for number, row in enumerate(rows):
        colour = "tab:red"
        if row.same_text:
            colour = "tab:blue"
        outputs.plot(row.logit_difference, number, "o", color=colour)
        shown = "o"
        if row.beyond <= 1.0:
            shown = "x"
        drift.plot(row.beyond, number, shown, color="black")
    drift.axvspan(drift.get_xlim()[0], 1.0, color="whitesmoke", zorder=0)
    drift.axvline(1.0, color="lightgrey", zorder=0)
    for axes in (outputs, drift):
        axes.set_xscale("log")
        axes.grid(axis="x", color="whitesmoke")
    outputs.set_yticks(range(len(rows)), [row.name for row in rows])
    outputs.invert_yaxis()
    outputs.set_title("largest logit difference\nblue: the same text", fontsize=9)
    drift.set_title("drift, times the envelope\nx: within rounding", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/port"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
