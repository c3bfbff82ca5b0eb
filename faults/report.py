"""Write the tables of outcomes: faults, harmless pairs, ports, devices and misses."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from faults.oracle import FACTOR
from faults.ports import PORTS
from faults.trial import Outcome

BARS = {
    "first layer exact": 0.99,
    "module exact": 0.95,
    "correct modules blamed": 0,
    "false claims": 0,
    "false alarms": 0,
}


def shares(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the numbers that have bars: shares of the effective faults, and counts.

    A module is exact where both sides have the same modules; in a port, none that is
    correct may be blamed.
    """
    outcomes = list(outcomes)
    effective = [
        outcome for outcome in outcomes if outcome.spec.fault and outcome.effective
    ]
    same_modules = [outcome for outcome in effective if outcome.spec.group != "port"]
    in_ports = [outcome for outcome in effective if outcome.spec.group == "port"]
    return {
        "first layer exact": (
            sum(outcome.site_exact for outcome in effective) / max(1, len(effective))
        ),
        "module exact": _share_exact(same_modules),
        "correct modules blamed": sum(outcome.blame == "wrong" for outcome in in_ports),
        "false claims": sum(outcome.false_claim for outcome in in_ports),
        "false alarms": sum(outcome.false_alarm for outcome in outcomes),
    }


def _share_exact(effective: Sequence[Outcome]) -> float:
    if not effective:
        return 1.0
    return sum(outcome.module_exact for outcome in effective) / len(effective)


def met(outcomes: Sequence[Outcome]) -> bool:
    """Check whether every bar is met."""
    reached = shares(outcomes)
    enough = [reached[name] >= bar for name, bar in BARS.items() if bar]
    none = [reached[name] == 0 for name, bar in BARS.items() if not bar]
    return all([*enough, *none])


def fault_rows(
    outcomes: Iterable[Outcome], key: Callable[[Outcome], str]
) -> list[list[Any]]:
    """Count for each value of a key: planted, effective, and exact of the effective."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.spec.fault:
            groups[key(outcome)].append(outcome)
    rows = [[name, *_counts(group)] for name, group in groups.items()]
    return [
        *rows,
        ["all", *_counts([outcome for group in groups.values() for outcome in group])],
    ]


def _counts(group: list[Outcome]) -> list[int]:
    effective = [outcome for outcome in group if outcome.effective]
    exact = [
        sum(outcome.site_exact for outcome in effective),
        sum(outcome.module_exact for outcome in effective),
    ]
    return [len(group), len(effective), *exact]


def harmless_rows(outcomes: Iterable[Outcome]) -> list[list[Any]]:
    """Count pairs and false alarms of each harmless change, and how far it moved."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if not outcome.spec.fault:
            groups[outcome.spec.kind].append(outcome)
    rows: list[list[Any]] = [
        [
            name,
            len(group),
            sum(outcome.false_alarm for outcome in group),
            f"{max(one.moved for one in group):.3g}",
        ]
        for name, group in groups.items()
    ]
    everything = [outcome for group in groups.values() for outcome in group]
    return [
        *rows,
        [
            "all",
            len(everything),
            sum(outcome.false_alarm for outcome in everything),
            "",
        ],
    ]


PORT_HEADS = [
    *(
        "layout",
        "dtype",
        "device",
        "planted",
        "effective",
        "first site exact",
        "module right",
        "larger than need be",
    ),
    *(
        "correct module blamed",
        "no module",
        "own code, falsely",
        "a false hint",
        "sound ports",
        "false alarms",
    ),
]


def port_rows(outcomes: Iterable[Outcome]) -> list[list[Any]]:
    """Count outcomes for each layout, dtype and device of ports."""
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.spec.group == "port":
            spec = outcome.spec
            groups[PORTS[spec.subject].layout, spec.dtype, spec.device].append(outcome)
            groups["all", spec.dtype, spec.device].append(outcome)
    order = sorted(
        groups, key=lambda key: (key[2], key[1] != "float32", key[0] == "all")
    )
    return [[*key, *_port_counts(groups[key])] for key in order]


def _port_counts(group: Sequence[Outcome]) -> list[int]:
    planted = [outcome for outcome in group if outcome.spec.fault]
    effective = [outcome for outcome in planted if outcome.effective]
    blames = [outcome.blame or "none" for outcome in effective]
    sound = [outcome for outcome in group if not outcome.spec.fault]
    return [
        len(planted),
        len(effective),
        sum(outcome.site_exact for outcome in effective),
        blames.count("right"),
        blames.count("larger"),
        blames.count("wrong"),
        blames.count("none"),
        sum(outcome.false_claim for outcome in effective),
        sum(bool(outcome.false_hints) for outcome in effective),
        len(sound),
        sum(outcome.false_alarm for outcome in sound),
    ]


DEVICE_HEADS = [
    "reference and candidate",
    "planted",
    "effective",
    "first layer exact",
    "module exact",
]
DEVICE_HEADS += ["harmless", "false alarms", "errors"]


def device_rows(outcomes: Iterable[Outcome]) -> list[list[Any]]:
    """Count outcomes for each device but the CPU, without ports."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.spec.device != "cpu" and outcome.spec.group != "port":
            groups[outcome.spec.device].append(outcome)
    rows: list[list[Any]] = []
    for device, group in groups.items():
        harmless = [outcome for outcome in group if not outcome.spec.fault]
        alarms = sum(outcome.false_alarm for outcome in harmless)
        errors = sum(bool(outcome.error) for outcome in group)
        faults = [outcome for outcome in group if outcome.spec.fault]
        rows.append([device, *_counts(faults), len(harmless), alarms, errors])
    return rows


def misses(outcomes: Iterable[Outcome]) -> list[list[str]]:
    """List every miss, every false claim and every false alarm."""
    return [_miss(outcome) for outcome in outcomes if _is_miss(outcome)]


def _is_miss(outcome: Outcome) -> bool:
    if not outcome.spec.fault:
        return outcome.false_alarm
    if not outcome.effective:
        return False
    if outcome.spec.group == "port":
        named = outcome.blame in ("right", "larger") and not outcome.false_claim
    else:
        named = outcome.module_exact
    return not (outcome.site_exact and named)


def _miss(outcome: Outcome) -> list[str]:
    spec = outcome.spec
    where = f"{spec.subject}, {spec.kind}, seed {spec.seed}"
    if (spec.dtype, spec.device) != ("float32", "cpu"):
        where += f", {spec.dtype}, {spec.device}"
    verdict = "no drift"
    if outcome.drifted:
        code = ", its own code" if outcome.own_code else ""
        verdict = (
            f"{outcome.first_site}, {outcome.module}{code} ({outcome.beyond:.3g} times"
            " the noise)"
        )
    truth = "no drift"
    if spec.fault:
        truth = f"{outcome.site}, {' or '.join(outcome.paths[:3])}"
    return [
        where,
        outcome.detail,
        truth,
        outcome.error or verdict,
        f"{outcome.moved:.3g}",
    ]


HEADS = ["planted", "effective", "first layer exact", "module exact"]
MISS_HEADS = [
    "pair",
    "what was done",
    "true",
    "drift says",
    "output moved, times the noise",
]


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return the whole report for a terminal."""
    here = _on_the_cpu(outcomes)
    for title, key in (
        ("kind", lambda outcome: outcome.spec.kind),
        ("family", lambda outcome: outcome.spec.subject),
    ):
        yield from _table([title, *HEADS], fault_rows(here, key))
    yield from _table(
        ["harmless", "pairs", "false alarms", "output moved, times the noise"],
        harmless_rows(here),
    )
    yield from _table(PORT_HEADS, port_rows(outcomes))
    yield from _table(DEVICE_HEADS, device_rows(outcomes))
    yield from _table(MISS_HEADS, misses(outcomes))
    yield from bars(outcomes)


def _on_the_cpu(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Select the outcomes with tables by kind and family: no ports, on the CPU."""
    return [
        outcome
        for outcome in outcomes
        if outcome.spec.device == "cpu" and outcome.spec.group != "port"
    ]


def bars(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return what was reached beside the bars."""
    for name, value in shares(outcomes).items():
        asked = f"at least {BARS[name]:.0%}" if BARS[name] else "none"
        yield f"{name}: {f'{value:.2%}' if BARS[name] else int(value)} (bar: {asked})"


def _table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> Iterator[str]:
    if lines:
        cells = [list(map(str, line)) for line in (head, *lines)]
        wide = [max(len(line[i]) for line in cells) for i in range(len(head))]
        yield from (
            "  ".join(
                cell.ljust(w) for cell, w in zip(line, wide, strict=True)
            ).rstrip()
            for line in cells
        )
        yield ""


def markdown(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
        for row in rows
    )


def page(outcomes: Sequence[Outcome]) -> str:
    """Write the measured part of docs/faults.md."""
    here = _on_the_cpu(outcomes)
    named = [
        outcome
        for outcome in here
        if outcome.spec.group == "named" or not outcome.spec.fault
    ]
    unnamed = [outcome for outcome in here if outcome.spec.group == "unnamed"]
    faults = [outcome for outcome in outcomes if outcome.spec.fault]
    effective = [outcome for outcome in faults if outcome.effective]
    harmless = len(outcomes) - len(faults)
    parts = [
        (
            f"{len(faults)} faults were planted, and {len(effective)} of them move the"
            f" output by more than {FACTOR:g} times its noise. {harmless} pairs are"
            " harmless."
        ),
        "\n".join(f"- {line}" for line in bars(outcomes)),
        "## By family",
        markdown(
            ["family", *HEADS], fault_rows(here, lambda outcome: outcome.spec.subject)
        ),
        "## By kind",
        markdown(
            ["kind", *HEADS], fault_rows(named, lambda outcome: outcome.spec.kind)
        ),
        "## Faults without a name",
        markdown(
            ["change", *HEADS], fault_rows(unnamed, lambda outcome: outcome.spec.kind)
        ),
        "## Harmless pairs",
        markdown(
            ["change", "pairs", "false alarms", "output moved, times the noise"],
            harmless_rows(here),
        ),
        "## Ports by layout",
        markdown(PORT_HEADS, port_rows(outcomes)),
        "## Other devices",
        _or_none(DEVICE_HEADS, device_rows(outcomes), "Measured on the CPU alone."),
        "## Misses",
        _or_none(MISS_HEADS, misses(outcomes), "None."),
    ]
    return "\n\n".join(parts)


def _or_none(head: Sequence[str], rows: Sequence[Sequence[Any]], otherwise: str) -> str:
    return markdown(head, rows) if rows else otherwise
