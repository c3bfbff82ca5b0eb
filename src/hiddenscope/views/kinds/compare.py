"""The difference of two texts or two models, shown and told."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import grid_of, labels, quoted
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

if TYPE_CHECKING:
    import xarray


def views(result: Result) -> Iterator[View]:
    """Two rows of tokens around the differences; along the layers; every pair of sites where there are two models."""
    title = _sides(result)
    if "l2" in result.data:
        grid = grid_of(result, ["l2", "relative", "cosine", "mean", "deviation"], title)
        if grid is not None:
            data = result.data.isel(token=slice(len(grid.tokens)))
            tokens, second = (_with_gaps(data, prefix) for prefix in ("", "other_"))
            zeros = int((data["l2"].to_numpy() == 0).all(0).sum())
            same = f"{zeros} of {len(tokens)} tokens are exactly the same at every site." if zeros else ""
            gaps = "Hatched: a token that only one side has." if None in (*tokens, *second) else ""
            note = " ".join(filter(None, [grid.note, same, gaps]))
            yield replace(grid, tokens=tokens, second=second, note=note)
        for measure, said, unit in (("l2", "difference", "L2"), ("relative", "relative difference", "")):
            sides = {name: result.data[f"{measure}_{name}"].to_numpy() for name in ("median", "largest")}
            series = tuple(Series(f"{name} of the tokens that differ", y) for name, y in sides.items())
            sites, look = labels(result.data, "site"), result.data[measure].attrs.get("scale", "linear")
            if any(np.isfinite(one.y).any() for one in series):
                along = f"The {said} along the layers of {result.source.get('model', 'the model')}"
                yield Lines(along, sites, series, y_name=said, unit=unit, scale=look)
    if "cka" in result.data:
        measures = tuple(
            Measure(str(result.data[name].attrs["long_name"]), result.data[name].to_numpy(), limits=(0, 1))
            for name in ("cka", "cka_chance")
        )
        note = f"Across run the sites of {result.source.get('other', result.source).get('model', 'the other')}."
        across = labels(result.data, "source_site")
        yield Grid(
            f"How alike every pair of sites is: {title}", labels(result.data, "site"), across, measures, note=note
        )


def _sides(result: Result) -> str:
    """The two sides in a title: two models, two texts, or many."""
    model, attrs = result.source.get("model", "one"), result.data.attrs
    if "other" in result.source:
        return f"{model} against {result.source['other'].get('model', 'the other')}"
    texts = [attrs.get(name, []) for name in ("texts", "other_texts")]
    if all(len(side) == 1 for side in texts) and len(texts[0][0] + texts[1][0]) <= 66 and texts[0] != texts[1]:
        return f"“{texts[0][0]}” against “{texts[1][0]}”"
    return f"The difference of {'two texts' if result.facts.get('texts', 1) == 1 else 'pairs of texts'} in {model}"


def _with_gaps(data: "xarray.Dataset", prefix: str) -> tuple[str | None, ...]:
    sides = (data[f"{prefix}{name}"].to_numpy().tolist() for name in ("string", "position"))
    return tuple(None if position < 0 else string for string, position in zip(*sides, strict=True))


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    shown = tuple(views(result))
    texts = [result.data.attrs.get(name, []) for name in ("texts", "other_texts")]
    models = [result.source.get("model"), result.source.get("other", {}).get("model")]
    if models[1]:
        sides = f"`{models[0]}` and `{models[1]}`"
    else:
        sides = " and ".join(quoted(side[0]) for side in texts) if [*map(len, texts)] == [1, 1] else "pairs of texts"
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
    here, there = (quoted(token.strip() or token) for token in first["token"])
    yield f"They part at token {max(first['position'])}, {here} against {there}."
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
    if "none" in facts:
        return f"Linear CKA over {facts['tokens']:,} tokens says nothing here: {facts['none']}."
    best = facts["most alike"]
    told = (
        f"Linear CKA over {facts['tokens']:,} tokens: 1 where two sites hold the same up to a rotation and a scale. "
        f"Most alike are `{best['site']}` and `{best['source_site']}`, with {best['cka']:.2f}. The median of all pairs "
        f"is {facts['median']:.2f}; tokens paired at random would give {facts['median by chance']:.2f}."
    )
    return f"{told} Mind: {facts['few tokens']}." if "few tokens" in facts else told
