"""What each state of one run brings to another, shown and told."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.results import Result
from hiddenscope.views.drawing import grid_of, labels, quoted
from hiddenscope.views.values import Lines, Section, Series, Style, View

if TYPE_CHECKING:
    import xarray

CELLS = ("effect", "attribution", "probability", "kl", "effect_error")


def views(result: Result) -> Iterator[View]:
    """Both texts above the effects of their states; whole layers along the depth; a donor's windows."""
    if "accuracy" in result.data:
        yield _windows(result)
        return
    grid = grid_of(result, [name for name in CELLS if name in result.data], _title(result))
    if grid is not None:
        data = result.data.isel(token=slice(len(grid.tokens)))
        corrupt, clean = (_with_gaps(data, prefix) for prefix in ("other_", ""))
        gaps = "Hatched: a token that only one text has." if None in (*clean, *corrupt) else ""
        pairs = "The tokens are those of the first pair." if result.facts.get("pairs", 1) > 1 else ""
        note = " ".join(filter(None, [grid.note, "Clean above, corrupt below.", gaps, pairs]))
        yield replace(grid, tokens=corrupt, second=clean, note=note)
    if "swap" in result.data:
        yield _swaps(result)


def _title(result: Result) -> str:
    model, facts = result.source.get("model", "the model"), result.facts
    answers = f"“{facts['answer'].strip()}” over “{facts['other'].strip()}”"
    bound = "brings back of" if facts["patched"].startswith("states of the clean") else "takes from"
    return f"What each state {bound} {answers} in {model}"


def _with_gaps(data: "xarray.Dataset", prefix: str) -> tuple[str | None, ...]:
    sides = (data[f"{prefix}{name}"].to_numpy().tolist() for name in ("string", "position"))
    return tuple(None if position < 0 else string for string, position in zip(*sides, strict=True))


def _swaps(result: Result) -> Lines:
    """Whole layers from the other run, one at a time and several in a row."""
    data = result.data
    series = []
    styles: dict[str, Style] = {"swap": "line", "swap_window": "dash"}
    for name, style in styles.items():
        y, error, said = data[name].to_numpy(), data.get(f"{name}_error"), str(data[name].attrs["long_name"])
        if error is None:
            series.append(Series(said, y, style=style))
        else:
            low, high = y - error.to_numpy(), y + error.to_numpy()
            series.append(Series(said, y, low, high, band="one standard error", style=style))
    series = [one for one in series if np.isfinite(one.y).any()]
    title = f"Whole layers from the other run, in {result.source.get('model', 'the model')}"
    return Lines(title, labels(data, "site"), tuple(series), y_name="effect", unit="share of the logit difference")


def _windows(result: Result) -> Lines:
    data, facts = result.data, result.facts
    low, high = (data[f"accuracy_{end}"].to_numpy() for end in ("low", "high"))
    count = len(data["site"])
    series = [Series("with a window from the donor", data["accuracy"].to_numpy(), low, high, band="95% interval")]
    for name in ("model", "donor"):
        series.append(Series(f"the {name} alone", np.full(count, facts[f"{name} alone"]["right"]), style="dash"))
    kind = "blocks" if facts["from the donor"] == "block" else f"states ({facts['from the donor']})"
    title = f"Right answers of {result.source.get('model', 'the model')} with {facts['window']} {kind} of a donor"
    note = f"A window is named by its first layer; {facts['prompts']} prompts."
    return Lines(title, labels(data, "site"), tuple(series), y_name="right answers", unit="share", note=note)


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    shown, facts = tuple(views(result)), result.facts
    if "accuracy" in result.data:
        yield Section("A donor's windows", " ".join(_donor(facts)), shown)
        return
    texts = [result.data.attrs.get(name, []) for name in ("texts", "other_texts")]
    sides = " and ".join(quoted(side[0]) for side in texts) if [*map(len, texts)] == [1, 1] else "pairs of texts"
    answer, other = (quoted(facts[name].strip() or facts[name]) for name in ("answer", "other"))
    runs = facts["logit difference"]
    opening = (
        f"Two runs, {sides}. The first prefers {answer} to {other} by "
        f"{runs['clean']:.2f} in logits, the second by {runs['corrupt']:.2f}. In every cell the {facts['patched']} "
        "took the place of its own, one at a time; the colour is the share of that difference which came along."
    )
    yield Section("Which states carry the answer", f"{opening}\n\n{' '.join(_where(facts))}", shown[:1])
    if shown[1:]:
        yield Section("Whole layers from the other run", " ".join(_layers(facts)), shown[1:])


def _where(facts: Any) -> Iterator[str]:
    for name, said in (
        ("tokens that differ", "The token that differs"),
        ("token of the answer", "The token it is read at"),
    ):
        if "half or more" in facts.get(name, {}):
            low, high = facts[name]["half or more"]
            token = quoted(facts[name]["token"].strip() or facts[name]["token"])
            yield f"{said}, {token}, carries half or more of it from `{low}` to `{high}`."
    if "correlation" in facts.get("exact against estimate", {}):
        told = facts["exact against estimate"]
        yield f"The gradient's estimate goes with the exact effect at r = {told['correlation']:.2f}."
    yield f"Exactly zero: {facts['exactly zero']}."


def _layers(facts: Any) -> Iterator[str]:
    yield "Here all tokens are exchanged at once, at one site and at several in a row."
    windows = facts.get("windows of whole layers")
    if windows:
        best = windows["largest"]
        yield (
            f"Of windows of {best['layers']} layers the one from `{best['from']}` does most, {best['effect']:.2f}; on "
            f"average those in the middle do {windows.get('middle', 0):.2f} and late ones {windows['late']:.2f}."
        )


def _donor(facts: Any) -> Iterator[str]:
    own, other = (facts[f"{name} alone"]["right"] for name in ("model", "donor"))
    yield f"Alone the model answers {own:.0%} of {facts['prompts']} prompts rightly, the donor {other:.0%}."
    if "middle less late" in facts:
        gap, (low, high) = (facts["middle less late"][name] for name in ("difference", "95% interval"))
        yield (
            f"With windows from the donor in the middle it is {facts['middle windows']:.0%}, late "
            f"{facts['late windows']:.0%}: a difference of {gap:+.2f} (95% interval {low:+.2f} to {high:+.2f})."
        )
