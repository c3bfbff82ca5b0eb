"""A first look: one page with what several analyses find in one small model."""

import math
from collections.abc import Iterator
from pathlib import Path

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, print_json, table, visible
from hiddenscope.errors import TextError

DETAILS = """
The page needs no network. It shows how large every state is, what each layer would
predict, where two sentences differ, where two cities come apart, which states influence
which, which states carry an answer, and the proof that each state has the right name.
"""


@command("demo", details=DETAILS, writes=(".html",))
def demo(shared: Shared) -> None:
    """Write the page, and print what it begins with."""
    page = shared.out or Path("hiddenscope-demo.html")
    model = shared.load()
    results = {result.kind: result for result in _results(model)}
    hs.story(
        [results[kind] for kind in STORY if kind in results],
        page,
        title=f"The hidden states of {model.name}",
        opening=OPENING,
        closing="\n".join(CLOSING),
    )
    if shared.json:
        facts = {kind: result.facts for kind, result in results.items()}
        print_json(
            {"page": str(page), "text": SENTENCE, "other_text": ANOTHER, **facts}
        )
        return
    echo(visible(f"{results['anatomy'].summary()}\n", keep="\n"))
    _print_grid(results["profile"])
    summaries = ""
    for kind in SUMMARISED:
        if kind in results:
            summaries += f"\n{results[kind].summary()}\n"
    echo(visible(summaries, keep="\n"))
    place = visible(str(page.resolve()))
    echo(f"The whole page, to open in a browser: {place}")
    width = max(map(len, NEXT)) + 2
    lines = [f"  hiddenscope {code:{width}}{NEXT[code]}" for code in NEXT]
    echo("\n".join(["", "Try next:", *lines]))


def _results(model: "hs.Model") -> Iterator["hs.Result"]:
    """Yield the results on the page.

    Those that need next-token logits are left out for a model that has none.
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
        try:
            yield hs.patch(
                model, hs.Contrast(PROMPT, OTHER_PROMPT, " Paris", " Berlin")
            )
        # The tokenizer has a capital as several tokens.
        except TextError as error:
            progress.note(f"The page has no patched states. {error}")
    yield hs.project(
        model, {name: name for name in ("cities-incomplete", "cities-complete")}
    )


SENTENCE = "The capital of France is Paris."
ANOTHER = "The capital of Germany is Berlin."
PROMPT, OTHER_PROMPT = "The capital of France is", "The capital of Germany is"
SUMMARISED = ("compare", "lens", "patch")
# The easiest idea comes first: states as they are, then what they say, how they differ,
# and what changing one does.
STORY = ("profile", "lens", "compare", "project", "visibility", "patch", "anatomy")
SHADES = " ░▒▓█"

OPENING = """
A transformer turns every token into a vector, and every block changes that vector:
these are its hidden states. Point at anything to read its numbers.
"""

# Each command with what it shows: first on the page, then on the terminal.
ON_PAGE = {
    'hiddenscope profile "Your own text." --out profile.html': (
        "shows how large every state of your text is."
    ),
    'hiddenscope compare "One text." "Another text." --out difference.html': (
        "shows where two of your texts differ."
    ),
    'hiddenscope lens "Your own text" --out lens.html': (
        "shows what every layer would predict."
    ),
    "hiddenscope project your.csv --out panels.html": (
        "draws your labelled texts, layer by layer."
    ),
    "hiddenscope anatomy --model gpt2": (
        "proves the names of another model's states; a folder or a `.gguf` file works"
        " too."
    ),
    'hs.profile(hs.load(), "Your own text.").data': (
        "is an xarray Dataset to compute with."
    ),
}
CLOSING = [
    "",
    "# Try it on your own text",
    "",
    "Saved pages such as this one need no network.",
    "",
    *(f"- `{code}` {meaning}" for code, meaning in ON_PAGE.items()),
    "",
]
NEXT = {
    "anatomy": "the proof, layer by layer",
    'profile "Your own text." --out profile.html': (
        "how large every state of your text is"
    ),
    'compare "One text." "Another text."': (
        "where, and by how much, their states differ"
    ),
    'lens "Your own text"': "what every layer would predict",
    'capture "Your own text." --sites final': (
        "its states; --out states.safetensors keeps them"
    ),
    "models": "models that need no model hub",
}


def _print_grid(profile: "hs.Result") -> None:
    """Print about ten layers of the grid, the first and the last two among them.

    The shade is the logarithm of the norm.
    """
    norm = profile.data["norm"]
    finite = filter(math.isfinite, norm.to_numpy().ravel().tolist())
    logs = [math.log(max(value, 1e-9)) for value in finite]
    low = min(logs)
    span = (max(logs) - low) or 1.0

    def cell(value: float) -> str:
        if not math.isfinite(value):
            return ""
        shade = SHADES[round(4 * (math.log(max(value, 1e-9)) - low) / span)]
        if value >= 10:
            return f"{shade} {value:,.0f}"
        return f"{shade} {value:.1f}"

    sites = norm["site"].values
    step = max(1, len(sites) // 8)
    rows = []
    for place, values in enumerate(norm.values.tolist()):
        if place % step == 0 or place >= len(sites) - 2:
            rows.append([sites[place], *map(cell, values)])
    table(["", *norm["string"].values.tolist()], reversed(rows))
