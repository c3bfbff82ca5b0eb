"""The first look: one page that tells the whole story."""

import math
from pathlib import Path

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, command
from hiddenscope.cli.terminal import print_json, table, visible


@command
def demo(shared: Shared) -> None:
    """Write a page that shows a model's states, and say where it lies.

    The page needs no network: it proves where the states live, paints the size of every state of a sentence, and
    compares that sentence with another.
    """
    page = shared.out or Path("hiddenscope-demo.html")
    model = shared.load()
    proof, norms, difference = hs.anatomy(model), hs.profile(model, SENTENCE), hs.compare(model, SENTENCE, ANOTHER)
    results = [proof, norms, difference]
    hs.story(results, page, title=f"The hidden states of {model.name}", opening=OPENING, closing=CLOSING)
    if shared.json:
        facts = {result.kind: result.facts for result in results}
        print_json({"page": str(page), "text": SENTENCE, "other text": ANOTHER, **facts})
        return
    typer.echo(visible(f"{proof.summary()}\n\n{norms.summary()}\n", keep="\n"))
    _print_grid(norms)
    typer.echo(visible(f"\n{difference.summary()}", keep="\n"))
    typer.echo(f"\nThe whole story, to look at and to touch: {visible(str(page.resolve()))}\n{NEXT}")


SENTENCE = "The capital of France is Paris."


ANOTHER = "The capital of Germany is Berlin."


OPENING = """
A transformer turns every token into a vector and changes that vector block by block: its hidden states. This page shows
those of one sentence, in a small real model, and how those of another sentence differ from them. It needs no network,
and everything in it was computed when it was made.
"""


CLOSING = """
# Go on

- `hiddenscope profile "Your own text." --out norms.html` makes such a page of your own text; `.pdf` makes a figure.
- `hiddenscope compare "One text." "Another text." --out difference.html` shows where two texts of yours part.
- `hiddenscope anatomy --model gpt2` proves another model; a folder or a `.gguf` file will do too.
- `hs.profile(hs.load(), "Your own text.").data` is an xarray Dataset, to go on with.
"""


NEXT = """
Try next:
  hiddenscope anatomy                                    the whole proof, layer by layer
  hiddenscope profile "Your own text." --out norms.html  the same picture of your own text
  hiddenscope compare "One text." "Another text."        where, and by how much, their states differ
  hiddenscope capture "Your own text." --sites final     its states; --out states.safetensors keeps them
  hiddenscope models                                     other models for a machine that reaches no model hub"""


def _print_grid(profile: "hs.Result") -> None:
    """Some layers of the grid, the first and the last two among them; the shade is the logarithm of the number."""
    norm = profile.data["norm"]
    logs = [math.log(max(value, 1e-9)) for value in norm.to_numpy().ravel().tolist() if math.isfinite(value)]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0

    def cell(value: float) -> str:
        if not math.isfinite(value):
            return ""
        shade = " ░▒▓█"[round(4 * (math.log(max(value, 1e-9)) - low) / span)]
        return f"{shade} {value:,.0f}" if value >= 10 else f"{shade} {value:.1f}"

    rows = [[site, *map(cell, row)] for site, row in zip(norm["site"].values, norm.values.tolist(), strict=True)]
    step = max(1, len(rows) // 8)
    shown = [row for place, row in enumerate(rows) if place % step == 0 or place >= len(rows) - 2]
    table(["", *norm["string"].values.tolist()], reversed(shown))
