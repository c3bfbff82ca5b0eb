"""The tables: by kind, by family, the harmless pairs, and every miss."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from faults.oracle import FACTOR
from faults.trial import Outcome

BARS = {"first layer exact": 0.99, "module exact": 0.95, "false alarms": 0}


def shares(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The three numbers that there are bars for: shares of the effective faults, and a count."""
    outcomes = list(outcomes)
    effective = [one for one in outcomes if one.spec.fault and one.effective]
    count = max(1, len(effective))
    return {
        "first layer exact": sum(one.site_exact for one in effective) / count,
        "module exact": sum(one.module_exact for one in effective) / count,
        "false alarms": sum(one.false_alarm for one in outcomes),
    }


def met(outcomes: Sequence[Outcome]) -> bool:
    """Whether every bar is met."""
    found = shares(outcomes)
    return found["false alarms"] <= BARS["false alarms"] and all(
        found[name] >= BARS[name] for name in ("first layer exact", "module exact")
    )


def fault_rows(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> list[list[Any]]:
    """A row for each value of a key: planted, effective, first layer and module exact, of the effective."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        if one.spec.fault:
            groups[key(one)].append(one)
    rows = [[name, *_counts(group)] for name, group in groups.items()]
    return [*rows, ["all", *_counts([one for group in groups.values() for one in group])]]


def _counts(group: list[Outcome]) -> list[int]:
    effective = [one for one in group if one.effective]
    exact = [sum(one.site_exact for one in effective), sum(one.module_exact for one in effective)]
    return [len(group), len(effective), *exact]


def harmless_rows(outcomes: Iterable[Outcome]) -> list[list[Any]]:
    """A row for each harmless change: pairs, false alarms, and how far the output moved, in units of the noise."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        if not one.spec.fault:
            groups[one.spec.kind].append(one)
    rows: list[list[Any]] = [
        [name, len(group), sum(one.false_alarm for one in group), f"{max(one.moved for one in group):.3g}"]
        for name, group in groups.items()
    ]
    everything = [one for group in groups.values() for one in group]
    return [*rows, ["all", len(everything), sum(one.false_alarm for one in everything), ""]]


def misses(outcomes: Iterable[Outcome]) -> list[list[str]]:
    """Every effective fault whose layer or module was not named, and every false alarm."""
    rows = []
    for one in outcomes:
        wrong_site, wrong_module = not one.site_exact, not one.module_exact
        if one.false_alarm or (one.spec.fault and one.effective and (wrong_site or wrong_module)):
            where = f"{one.spec.subject}, {one.spec.kind}, seed {one.spec.seed}"
            found = f"{one.first_site}, {one.module} ({one.beyond:.3g} times the noise)" if one.drifted else "no drift"
            truth = f"{one.site}, {' or '.join(one.paths[:3])}" if one.spec.fault else "no drift"
            rows.append([where, one.detail, truth, one.error or found, f"{one.moved:.3g}"])
    return rows


HEADS = ["planted", "effective", "first layer exact", "module exact"]
MISS_HEADS = ["pair", "what was done", "true", "drift says", "output moved, times the noise"]


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """All of it for a terminal."""
    for title, key in (("kind", lambda one: one.spec.kind), ("family", lambda one: one.spec.subject)):
        yield from _table([title, *HEADS], fault_rows(outcomes, key))
    yield from _table(["harmless", "pairs", "false alarms", "output moved, times the noise"], harmless_rows(outcomes))
    yield from _table(MISS_HEADS, misses(outcomes))
    yield from bars(outcomes)


def bars(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What was reached, beside what is asked."""
    for name, value in shares(outcomes).items():
        asked = f"at least {BARS[name]:.0%}" if BARS[name] else "none"
        yield f"{name}: {f'{value:.2%}' if BARS[name] else int(value)} (bar: {asked})"


def _table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> Iterator[str]:
    if lines:
        cells = [list(map(str, line)) for line in (head, *lines)]
        wide = [max(len(line[i]) for line in cells) for i in range(len(head))]
        yield from ("  ".join(cell.ljust(w) for cell, w in zip(line, wide, strict=True)).rstrip() for line in cells)
        yield ""


def markdown(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table for a page."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def page(outcomes: Sequence[Outcome]) -> str:
    """The measured part of docs/faults.md."""
    named = [one for one in outcomes if one.spec.group == "named" or not one.spec.fault]
    unnamed = [one for one in outcomes if one.spec.group == "unnamed"]
    quiet = [one for one in outcomes if one.spec.fault and not one.effective]
    faults = [one for one in outcomes if one.spec.fault]
    parts = [
        f"{len(faults)} faults were planted, and {len(faults) - len(quiet)} of them move the output by more than "
        f"{FACTOR:g} times its noise. {sum(not one.spec.fault for one in outcomes)} pairs are harmless.",
        "\n".join(f"- {line}" for line in bars(outcomes)),
        "## By family",
        markdown(["family", *HEADS], fault_rows(outcomes, lambda one: one.spec.subject)),
        "## By kind",
        markdown(["kind", *HEADS], fault_rows(named, lambda one: one.spec.kind)),
        "## Faults without a name",
        markdown(["change", *HEADS], fault_rows(unnamed, lambda one: one.spec.kind)),
        "## Harmless pairs",
        markdown(["change", "pairs", "false alarms", "output moved, times the noise"], harmless_rows(outcomes)),
        "## Misses",
        markdown(MISS_HEADS, misses(outcomes)) if misses(outcomes) else "None.",
    ]
    return "\n\n".join(parts)
