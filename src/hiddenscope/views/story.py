"""A guided story: results one after another on one page, each with a title, what to look at, and its view.

Every kind of result tells its own sections, in `TELLERS`; the numbers in them are read off the results.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenscope.errors import FileError
from hiddenscope.results import Result, replacing
from hiddenscope.views.page import document
from hiddenscope.views.pictures import pictures
from hiddenscope.views.values import Grid, Lines, View


@dataclass(frozen=True)
class Section:
    """A title, a few paragraphs as `document` takes them, and the views that they are about."""

    title: str
    prose: str
    views: tuple[View, ...]


def story(
    results: Sequence[Result], path: str | os.PathLike[str], *, title: str = "", opening: str = "", closing: str = ""
) -> None:
    """Write one offline page that tells of several results in order, whole or not at all.

    `opening` and `closing` are plain text: blank lines part paragraphs, `# ` begins a heading, `- ` a list, and words
    between backticks are code.

    >>> import tempfile, xarray
    >>> from pathlib import Path
    >>> norms = Result("profile of sizes", xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["a", "b"]}), {}, {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     story([norms], f"{folder}/story.html", title="Two numbers")
    ...     "<h1>Two numbers</h1>" in Path(folder, "story.html").read_text()
    True
    """
    if Path(path).suffix.lower() != ".html":
        raise FileError(f"A story in {os.fspath(path)!r}", "it is a page", "Give the path the suffix .html.")
    told = page(results, title or ", ".join(result.title for result in results), opening, closing)
    with replacing(Path(path)) as fresh:
        fresh.write_text(told, "utf-8")


def page(results: Sequence[Result], title: str, opening: str, closing: str) -> str:
    """The page itself, as HTML."""
    prose: list[str] = []
    views: list[View] = []
    for section in (section for result in results for section in tell(result)):
        prose += [f"# {section.title}\n\n{section.prose}", *[""] * (len(section.views) - 1)]
        views += section.views
    return document(views, title, [f"{opening}\n\n{prose[0]}" if prose else opening, *prose[1:], closing])


def tell(result: Result) -> list[Section]:
    """The sections of one result; a kind without a teller shows its views and no more."""
    return list(TELLERS.get(result.kind, _plainly)(result))


def _plainly(result: Result) -> Iterator[Section]:
    yield Section(result.title.capitalize(), "", pictures(result))


def _anatomy(result: Result) -> Iterator[Section]:
    model = result.source.get("model", "the model")
    stacks = {name: facts for name, facts in result.facts.items() if isinstance(facts, dict) and "blocks" in facts}
    built = "; ".join(
        f"the {name} has {said['blocks']} blocks of width {said['width']}" for name, said in stacks.items()
    )
    proofs = "; ".join(str(facts["proof"]) for facts in stacks.values())
    normed = any(facts["final norm"] != "none" for facts in stacks.values())
    final = " The last one also goes through a norm, and is then called `final`." if normed else ""
    trap = (
        " The bar that stands out is the raw last layer, which Hugging Face does not report at all: its last entry is "
        "`final`, normed, and the others are not."
    )
    yield Section(
        "What the model computes, and the proof",
        f"A vector for every token enters `{model}` and runs through its blocks, and every block changes it: {built}. "
        f"The vector after k blocks is called `layer.k`; `layer.0` is what enters the first block.{final}\n\n"
        "Names can be wrong, so these were checked on the model itself when it was loaded, against what Hugging Face "
        f"reports as `hidden_states`. They agree: {proofs}.{trap if normed else ''}",
        pictures(result),
    )


def _profile(result: Result) -> Iterator[Section]:
    shown = pictures(result)
    texts = result.data.attrs.get("texts", [])
    text = f"“{texts[0]}”" if len(texts) == 1 else f"{result.facts['texts']} texts"
    yield Section(
        "The size of every state",
        f"These are all the states of {text}: tokens run across, layers run up, and the colour is the norm of the "
        "vector, on a log scale. Point at a cell, or use the arrow keys, to read it out.\n\n" + norms_seen(result),
        tuple(view for view in shown if isinstance(view, Grid)),
    )
    yield Section(
        "The same along the layers",
        "One line for the first token, one for the others, with a band around the middle half of them. "
        + " ".join(sentence for name in _stacks(result) for sentence in _lessons(result.facts[name])),
        tuple(view for view in shown if isinstance(view, Lines)),
    )


def _lessons(facts: dict[str, Any]) -> Iterator[str]:
    """What follows from the norms, where it does."""
    if facts.get("times as large", 0) >= 10:
        yield (
            "A first token that is so much larger hides the rest: whoever averages states over tokens, or compares "
            "texts by the distance of their states, sees hardly anything else."
        )
    ends = list(_drops(facts).values())
    if len(ends) == 2 and ends[0][0] > 2 * ends[1][0] and ends[1][1] / 2 < ends[0][1] < 2 * ends[1][1]:
        yield "At `final` all are of one size again: the norm sees to that."


def _stacks(result: Result) -> list[str]:
    return [name for name in ("norm", "encoder", "decoder") if name in result.facts]


def norms_seen(result: Result) -> str:
    """What a profile's norms show, in plain sentences."""
    return " ".join(sentence for stack in _stacks(result) for sentence in _sentences(stack, result.facts[stack]))


def _sentences(stack: str, facts: dict[str, Any]) -> Iterator[str]:
    whose = "" if stack == "norm" else f" of the {stack}"
    if "times as large" in facts:
        first, others, times = (facts[name] for name in ("first token", "other tokens", "times as large"))
        yield (
            f"Over the middle{whose} ({facts['middle layers']}) the first token has a median norm of about "
            f"{first:,.0f} and the others of about {others:,.0f}: {times:,.1f} times as much."
        )
    if drops := _drops(facts):
        told = " and ".join(f"the {who} from {before:,.0f} to {after:,.0f}" for who, (before, after) in drops.items())
        yield f"The final norm{whose} then takes {told}."


def _drops(facts: dict[str, Any]) -> dict[str, list[float]]:
    """For first and other tokens, the norm before and after the final norm."""
    return {key.partition(" from ")[0]: ends for key, ends in facts.items() if " from " in key}


def _compare(result: Result) -> Iterator[Section]:
    shown = pictures(result)
    texts = [result.data.attrs.get(name, []) for name in ("texts", "other_texts")]
    models = [result.source.get("model"), result.source.get("other", {}).get("model")]
    if models[1]:
        sides = f"`{models[0]}` and `{models[1]}`"
    else:
        sides = " and ".join(f"“{side[0]}”" for side in texts) if [*map(len, texts)] == [1, 1] else "pairs of texts"
    heading = "Two models, compared" if models[1] else "Two texts, compared"
    maps = [view for view in shown if isinstance(view, Grid)]
    lines = tuple(view for view in shown if isinstance(view, Lines))
    parts = [
        facts for name in ("difference", "encoder", "decoder") if isinstance(facts := result.facts.get(name), dict)
    ]
    told = " ".join(sentence for facts in parts for sentence in _differences(facts))
    if parts:
        how = f"The states of {sides}, token by token: one side stands below, the other above, and the colour is the "
        how += "length of the difference of the two states, on a log scale. Other measures are a click away."
        yield Section(heading, f"{how}\n\n{told}", (maps.pop(0),))
    if lines:
        ends = " ".join(sentence for facts in parts for sentence in _at_the_end(facts))
        yield Section("The difference along the layers", f"{RELATIVE} {ends}".strip(), lines)
    if maps:
        yield Section("How alike every pair of sites is", _alike(result.facts["cka"]), tuple(maps))


RELATIVE = (
    "States grow from layer to layer, and their difference with them: so the second picture gives it as a share of the "
    "mean of the two norms. Both are taken over the tokens that differ at all."
)


def _differences(facts: dict[str, Any]) -> Iterator[str]:
    """Where two texts part, and where that shows most."""
    first = facts["first at"]
    if isinstance(first, str):
        yield "They differ nowhere."
        return
    here, there = (token.strip() for token in first["token"])
    yield f"They part at token {max(first['position'])}, “{here}” against “{there}”."
    yield f"Exactly zero at every site: {facts['exactly zero at every site']}."
    if jump := facts.get("largest jump between layers"):
        low, high = jump["median"]
        between = f"from `{jump['from']}` to `{jump['to']}`"
        yield f"The difference jumps most {between}, where its median goes from {low:.3g} to {high:.3g}."


def _at_the_end(facts: dict[str, Any]) -> Iterator[str]:
    """What the final norm does to a difference, which whoever reads hidden_states takes for the last block's doing."""
    ends = list(facts.get("median at the end", {}).items())
    if len(ends) < 3:
        return
    (before, low), (raw, high), (final, normed) = ends[:3]
    yield f"At the end the median is {low:.3g} at `{before}`, {high:.3g} at {raw} and {normed:.3g} at `{final}`."
    if high > low > normed:
        yield (
            "Whoever reads Hugging Face's `hidden_states` goes from the first of these to the third, and sees the last "
            "block pull the two together. It does not: it takes them farther apart, and all of the drop is the norm's."
        )


def _alike(facts: dict[str, Any]) -> str:
    best = facts["most alike"]
    told = (
        f"Linear CKA over {facts['tokens']:,} tokens: 1 where two sites hold the same up to a rotation and a scale. "
        f"Most alike are `{best['site']}` and `{best['source_site']}`, with {best['cka']:.2f}. The median of all pairs "
        f"is {facts['median']:.2f}; tokens paired at random would give {facts['median by chance']:.2f}."
    )
    return f"{told} Mind: {facts['few tokens']}." if "few tokens" in facts else told


TELLERS: dict[str, Callable[[Result], Iterator[Section]]] = {
    "anatomy": _anatomy,
    "compare": _compare,
    "profile": _profile,
}
