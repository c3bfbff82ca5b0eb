"""How much of the answer each state carries from one run to another."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.results import Facts, Result
from hiddenscope.views.drawing import grid_of, labels, quoted
from hiddenscope.views.values import Lines, Section, Series, Style, View

if TYPE_CHECKING:
    import xarray

BRANCHES = (".attn", ".cross", ".mlp")
CELLS = ("effect", "attribution", "probability", "kl", "effect_error")


def views(result: Result) -> Iterator[View]:
    """The effect of every site and token, below the tokens of both prompts; then whole layers along the depth."""
    grid = grid_of(result, [name for name in CELLS if name in result.data], _title(result))
    if grid is not None:
        data = result.data.isel(token=slice(len(grid.tokens)))
        corrupt, clean = (_tokens(data, prefix) for prefix in ("other_", ""))
        gaps = "Hatched: a token that only one prompt has." if None in (*clean, *corrupt) else ""
        several = "The tokens are those of the first contrast." if result.facts["contrasts"] > 1 else ""
        note = " ".join(filter(None, [grid.note, "Clean prompt above, corrupt prompt below.", gaps, several]))
        yield replace(grid, tokens=corrupt, second=clean, note=note)
    if "swap" in result.data:
        yield _layers(result)


def findings(result: Result) -> Iterator[str]:
    """Both runs, where the answer is carried, and how sure that is."""
    facts = result.facts
    yield _runs(result)
    yield _exchange(facts)
    yield from _carriers(facts)
    yield from _layer_windows(facts)
    if (facts.get("agreement") or {}).get("correlation") is not None:
        agreement = facts["agreement"]
        yield (
            f"Attribution correlates with the exact effect at r = {agreement['correlation']:.2f} over "
            f"{agreement['cells']} cells; its mean absolute error is {agreement['mean_absolute_error']:.2f}."
        )
    yield _certainty(facts)
    cells = facts["cells"]
    yield f"{cells['equal']} of {cells['total']} cells are exactly zero: there the states of both runs are equal."
    yield from facts["notes"]


def sections(result: Result) -> Iterator[Section]:
    """The grid with what it shows, then whole layers."""
    shown, facts = tuple(views(result)), result.facts
    opening = f"{_runs(result)} {_exchange(facts)} The colour is the effect."
    carriers = " ".join([*_carriers(facts), _certainty(facts)])
    yield Section("Which states carry the answer", f"{opening}\n\n{carriers}", shown[:1])
    if shown[1:]:
        tokens = "All tokens but the one at which the answer is read are" if _streams(result) else "All tokens are"
        exchange = f"{tokens} exchanged at once, at one site and at several layers in a row."
        yield Section("Whole layers from the other run", " ".join([exchange, *_layer_windows(facts)]), shown[1:])


def _title(result: Result) -> str:
    facts, model = result.facts, result.source.get("model", "the model")
    answers = f"{_answer(facts, 'answer')} over {_answer(facts, 'other')}"
    verb = "restores of" if facts["into"] == "corrupt" else "takes from"
    return f"What each state {verb} {answers} in {model}"


def _answer(facts: Facts, name: str) -> str:
    """The answers of all contrasts, each once, without the space that its token begins with."""
    strings = dict.fromkeys(pair[name].strip() or pair[name] for pair in facts["answers"])
    return " / ".join(map(quoted, list(strings)[:3])) + (" and others" if len(strings) > 3 else "")


def _tokens(data: "xarray.Dataset", prefix: str) -> tuple[str | None, ...]:
    """The tokens of one prompt, None where it has a gap."""
    columns = (data[f"{prefix}{name}"].to_numpy().tolist() for name in ("string", "position"))
    return tuple(None if position < 0 else string for string, position in zip(*columns, strict=True))


def _runs(result: Result) -> str:
    facts = result.facts
    texts = [result.data.attrs.get(name, []) for name in ("texts", "other_texts")]
    clean, corrupt = facts["logit_difference"]["clean"], facts["logit_difference"]["corrupt"]
    answer, other = (_answer(facts, name) for name in ("answer", "other"))
    if [len(side) for side in texts] == [1, 1]:
        return (
            f"After {quoted(texts[0][0])} the logit of {answer} is {_above(clean)} that of {other}, after "
            f"{quoted(texts[1][0])} it is {_above(corrupt)}."
        )
    average = f", on average over {facts['contrasts']} contrasts" if facts["contrasts"] > 1 else ""
    logit = f"In the clean run the logit of {answer} is {_above(clean)} that of {other}"
    return f"{logit}, in the corrupt run it is {_above(corrupt)}{average}."


def _above(difference: float) -> str:
    return f"{abs(difference):.2f} {'below' if difference < 0 else 'above'}"


def _exchange(facts: Facts) -> str:
    source, change = ("clean", "comes back") if facts["into"] == "corrupt" else ("corrupt", "is lost")
    tokens = "one site and token" if facts["window"] == 1 else f"one site and {facts['window']} tokens"
    return (
        f"States of the {source} run were put into the {facts['into']} run, {tokens} at a time; the effect is the "
        f"share of that difference which {change}."
    )


def _carriers(facts: Facts) -> Iterator[str]:
    """Where two tokens carry half of the answer."""
    names = {"differing_token": "The token that differs", "answer_token": "The token at which the answer is read"}
    for key, name in names.items():
        carrier = facts[key]
        if carrier and carrier["from"]:
            token = quoted(carrier["token"].strip() or carrier["token"])
            where = f"first at {carrier['from']} and last at {carrier['to']}"
            yield f"{name}, {token}, reaches one half {where}; its largest effect is {carrier['largest']:.2f}."


def _layer_windows(facts: Facts) -> Iterator[str]:
    windows = facts.get("layer_windows")
    if not windows:
        return
    largest = windows["largest"]
    spared = "" if largest["site"].endswith(BRANCHES) else ", except the one at which the answer is read"
    yield (
        f"When all tokens of {windows['layers']} layers in a row are exchanged{spared}, the window from "
        f"{largest['site']} has the largest effect, {largest['value']:.2f}."
    )


def _certainty(facts: Facts) -> str:
    """How far the numbers reach."""
    count = facts["contrasts"]
    if count == 1:
        return "This is one contrast; whether it holds for others was not tested."
    return f"These are averages over {count} contrasts; differences between sites were not tested."


def _streams(result: Result) -> bool:
    """Whether whole states of the residual stream are exchanged, and not only what branches add."""
    return not all(site.endswith(BRANCHES) for site in labels(result.data, "site"))


def _layers(result: Result) -> Lines:
    """All tokens from the other run, at one site and at several layers in a row."""
    data = result.data
    series = []
    styles: dict[str, Style] = {"swap": "line", "swap_window": "dash"}
    for name, style in styles.items():
        y, error, long_name = data[name].to_numpy(), data.get(f"{name}_error"), str(data[name].attrs["long_name"])
        if error is None:
            series.append(Series(long_name, y, style=style))
        else:
            low, high = y - error.to_numpy(), y + error.to_numpy()
            series.append(Series(long_name, y, low, high, band="one standard error", style=style))
    series = [one for one in series if np.isfinite(one.y).any()]
    title = f"Whole layers from the other run, in {result.source.get('model', 'the model')}"
    return Lines(title, labels(data, "site"), tuple(series), y_name="effect", unit="share of the logit difference")
