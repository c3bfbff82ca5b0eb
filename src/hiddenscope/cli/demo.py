"""A first look: one page that shows what the analyses say of one small model."""

import math
from collections.abc import Iterator
from pathlib import Path

import hiddenscope as hs
from hiddenscope import errors, progress
from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, print_json, table, visible


@command("demo", writes=(".html",))
def demo(shared: Shared) -> None:
    """Write a page that shows a model's hidden states, and print where it is.

    The page needs no network. It shows how large every state is, what each layer would
    predict, where two sentences differ, where two cities come apart, which states
    influence which, which states carry an answer, and the proof that each state has the
    right name.
    """
    page = shared.out or Path("hiddenscope-demo.html")
    model = shared.load()
    results = {result.kind: result for result in _results(model)}
    shown = [results[kind] for kind in STORY if kind in results]
    hs.story(
        shown,
        page,
        title=f"The hidden states of {model.name}",
        opening=OPENING,
        closing=CLOSING,
    )
    if shared.json:
        facts = {kind: result.facts for kind, result in results.items()}
        print_json(
            {"page": str(page), "text": SENTENCE, "other_text": ANOTHER, **facts}
        )
        return
    echo(visible(f"{results['anatomy'].summary()}\n", keep="\n"))
    _print_grid(results["profile"])
    summaries = "".join(
        f"\n{results[kind].summary()}\n" for kind in SUMMARISED if kind in results
    )
    echo(visible(summaries, keep="\n"))
    echo(
        f"The whole page, to open in a browser: {visible(str(page.resolve()))}\n{NEXT}"
    )


def _results(model: "hs.Model") -> Iterator["hs.Result"]:
    """The results on the page; those that need next-token logits only for a model that
    has them.
    """
    yield hs.anatomy(model)
    yield hs.profile(model, SENTENCE)
    yield hs.compare(model, SENTENCE, ANOTHER)
    predicts = (
        model.anatomy.head is not None
        and model.anatomy.stacks[-1].causal
        and len(model.anatomy.stacks) == 1
    )
    if predicts:
        yield hs.lens(model, PROMPT)
    yield hs.visibility(model, SENTENCE)
    if predicts:
        yield from _patched(model)
    yield hs.project(
        model, {name: name for name in ("cities-incomplete", "cities-complete")}
    )


def _patched(model: "hs.Model") -> Iterator["hs.Result"]:
    """The capitals patched, in a model whose tokenizer has each of them as one token."""
    try:
        yield hs.patch(model, hs.Contrast(PROMPT, OTHER_PROMPT, " Paris", " Berlin"))
    except errors.TextError as error:
        progress.note(f"The page has no patched states. {error}")


SENTENCE = "The capital of France is Paris."
ANOTHER = "The capital of Germany is Berlin."
PROMPT, OTHER_PROMPT = "The capital of France is", "The capital of Germany is"
SUMMARISED = ("compare", "lens", "patch")
# The easiest idea comes first: states as they are, then what they say, how they differ,
# and what changing one does.
STORY = (
    "profile",
    "lens",
    "compare",
    "project",
    "visibility",
    "patch",
    "anatomy",
)

OPENING = """
A transformer turns every token into a vector, and every block changes that vector: these are its hidden states. Point
at anything to read its numbers.
"""

CLOSING = """
# Try it on your own text

Saved pages such as this one need no network.

- `hiddenscope profile "Your own text." --out profile.html` shows how large every state of your text is.
- `hiddenscope compare "One text." "Another text." --out difference.html` shows where two of your texts differ.
- `hiddenscope lens "Your own text" --out lens.html` shows what every layer would predict.
- `hiddenscope project your.csv --out panels.html` draws your labelled texts, layer by layer.
- `hiddenscope anatomy --model gpt2` proves the names of another model's states; a folder or a `.gguf` file works too.
- `hs.profile(hs.load(), "Your own text.").data` is an xarray Dataset to compute with.
"""

NEXT = """
Try next:
  hiddenscope anatomy                                      the proof, layer by layer
  hiddenscope profile "Your own text." --out profile.html  how large every state of your text is
  hiddenscope compare "One text." "Another text."          where, and by how much, their states differ
  hiddenscope lens "Your own text"                         what every layer would predict
  hiddenscope capture "Your own text." --sites final       its states; --out states.safetensors keeps them
  hiddenscope models                                       models that need no model hub"""


def _print_grid(profile: "hs.Result") -> None:
    """About ten layers of the grid, the first and the last two among them; the shade is
    the logarithm of the norm.
    """
    norm = profile.data["norm"]
    logs = [
        math.log(max(value, 1e-9))
        for value in norm.to_numpy().ravel().tolist()
        if math.isfinite(value)
    ]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0

    def cell(value: float) -> str:
        if not math.isfinite(value):
            return ""
        shade = " ░▒▓█"[round(4 * (math.log(max(value, 1e-9)) - low) / span)]
        return f"{shade} {value:,.0f}" if value >= 10 else f"{shade} {value:.1f}"

    rows = [
        [site, *map(cell, row)]
        for site, row in zip(norm["site"].values, norm.values.tolist(), strict=True)
    ]
    step = max(1, len(rows) // 8)
    shown = [
        row
        for place, row in enumerate(rows)
        if place % step == 0 or place >= len(rows) - 2
    ]
    table(["", *norm["string"].values.tolist()], reversed(shown))
