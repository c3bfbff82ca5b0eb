"""Write the tables of outcomes: faults, harmless pairs, ports, devices and misses."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from labs.faults.oracle import FACTOR
from labs.faults.ports import PORTS
from labs.faults.trial import Outcome

BARS = {
    "first layer exact": 0.99,
    "module exact": 0.95,
    "correct modules blamed": 0,
    "false claims": 0,
    "false alarms": 0,
}


Rows = list[list[object]]
"""The lines of a table."""


def faults_in(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes of planted faults."""
    return [outcome for outcome in outcomes if outcome.spec.fault]


def harmless_in(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes of harmless pairs."""
    return [outcome for outcome in outcomes if not outcome.spec.fault]


def _effective(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in faults_in(outcomes) if outcome.effective]


def _count(outcomes: Iterable[Outcome], attribute: str) -> int:
    """Count the outcomes of which an attribute is true."""
    return sum(bool(getattr(outcome, attribute)) for outcome in outcomes)


def shares(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the numbers that have bars: shares of the effective faults, and counts.

    A module is exact where both sides have the same modules; in a port, none that is
    correct may be blamed.
    """
    outcomes = list(outcomes)
    effective = _effective(outcomes)
    same_modules = [outcome for outcome in effective if outcome.spec.group != "port"]
    in_ports = [outcome for outcome in effective if outcome.spec.group == "port"]
    module_exact = 1.0
    if same_modules:
        module_exact = _count(same_modules, "module_exact") / len(same_modules)
    blames = [outcome.blame for outcome in in_ports]
    return {
        "first layer exact": _count(effective, "site_exact") / max(1, len(effective)),
        "module exact": module_exact,
        "correct modules blamed": blames.count("wrong"),
        "false claims": _count(in_ports, "false_claim"),
        "false alarms": _count(outcomes, "false_alarm"),
    }


def met(outcomes: Sequence[Outcome]) -> bool:
    """Check whether every bar is met."""
    reached = shares(outcomes)
    for name, bar in BARS.items():
        if bar and reached[name] < bar:
            return False
        if not bar and reached[name]:
            return False
    return True


def fault_rows(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> Rows:
    """Count for each value of a key: planted, effective, and exact of the effective."""
    faults = faults_in(outcomes)
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in faults:
        groups[key(outcome)].append(outcome)
    rows: Rows = []
    for name, group in groups.items():
        rows.append([name, *_counts(group)])
    return [*rows, ["all", *_counts(faults)]]


def _kind(outcome: Outcome) -> str:
    return outcome.spec.kind


def _family(outcome: Outcome) -> str:
    return outcome.spec.subject


def _counts(group: list[Outcome]) -> list[int]:
    effective = _effective(group)
    sites, modules = _count(effective, "site_exact"), _count(effective, "module_exact")
    return [len(group), len(effective), sites, modules]


def harmless_rows(outcomes: Iterable[Outcome]) -> Rows:
    """Count pairs and false alarms of each harmless change, and how far it moved."""
    harmless = harmless_in(outcomes)
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in harmless:
        groups[outcome.spec.kind].append(outcome)
    rows: Rows = []
    for name, group in groups.items():
        moved = max(outcome.moved for outcome in group)
        rows.append([name, len(group), _count(group, "false_alarm"), f"{moved:.3g}"])
    return [*rows, ["all", len(harmless), _count(harmless, "false_alarm"), ""]]


HARMLESS_HEADS = ["pairs", "false alarms", "output moved, times the noise"]
PORT_HEADS = [
    "layout",
    "dtype",
    "device",
    "planted",
    "effective",
    "first site exact",
    "module right",
    "larger than need be",
    "correct module blamed",
    "no module",
    "own code, falsely",
    "a false hint",
    "sound ports",
    "false alarms",
]


def port_rows(outcomes: Iterable[Outcome]) -> Rows:
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
    effective, sound = _effective(group), harmless_in(group)
    blames = [outcome.blame or "none" for outcome in effective]
    return [
        len(faults_in(group)),
        len(effective),
        _count(effective, "site_exact"),
        blames.count("right"),
        blames.count("larger"),
        blames.count("wrong"),
        blames.count("none"),
        _count(effective, "false_claim"),
        _count(effective, "false_hints"),
        len(sound),
        _count(sound, "false_alarm"),
    ]


DEVICE_HEADS = [
    "reference and candidate",
    "planted",
    "effective",
    "first layer exact",
    "module exact",
    "harmless",
    "false alarms",
    "errors",
]


def device_rows(outcomes: Iterable[Outcome]) -> Rows:
    """Count outcomes for each device but the CPU, without ports."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.spec.device != "cpu" and outcome.spec.group != "port":
            groups[outcome.spec.device].append(outcome)
    rows: Rows = []
    for device, group in groups.items():
        harmless = harmless_in(group)
        alarms, errors = _count(harmless, "false_alarm"), _count(group, "error")
        counts = _counts(faults_in(group))
        rows.append([device, *counts, len(harmless), alarms, errors])
    return rows


def misses(outcomes: Iterable[Outcome]) -> Rows:
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


def _miss(outcome: Outcome) -> list[object]:
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
    moved = f"{outcome.moved:.3g}"
    return [where, truth, outcome.error or verdict, moved]


HEADS = ["planted", "effective", "first layer exact", "module exact"]
MISS_HEADS = [
    "pair",
    "true",
    "drift says",
    "output moved, times the noise",
]


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return the whole report for a terminal."""
    here = _on_the_cpu(outcomes)
    yield from _table(["kind", *HEADS], fault_rows(here, _kind))
    yield from _table(["family", *HEADS], fault_rows(here, _family))
    yield from _table(["harmless", *HARMLESS_HEADS], harmless_rows(here))
    yield from _table(PORT_HEADS, port_rows(outcomes))
    yield from _table(DEVICE_HEADS, device_rows(outcomes))
    yield from _table(MISS_HEADS, misses(outcomes))
    yield from bars(outcomes)


def _on_the_cpu(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Select the outcomes with tables by kind and family: no ports, on the CPU."""
    selected = []
    for outcome in outcomes:
        if outcome.spec.device == "cpu" and outcome.spec.group != "port":
            selected.append(outcome)
    return selected


def bars(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return what was reached beside the bars."""
    for name, value in shares(outcomes).items():
        bar = BARS[name]
        if bar:
            yield f"{name}: {value:.2%} (bar: at least {bar:.0%})"
        else:
            yield f"{name}: {int(value)} (bar: none)"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    if not rows:
        return
    lines = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        yield "  ".join(cells).rstrip()
    yield ""


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = []
    for row in (head, ["---"] * len(head), *rows):
        cells = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(outcomes: Sequence[Outcome]) -> str:
    """Write the measured part of docs/faults.md."""
    here = _on_the_cpu(outcomes)
    named = []
    for outcome in here:
        if outcome.spec.group == "named" or not outcome.spec.fault:
            named.append(outcome)
    unnamed = [outcome for outcome in here if outcome.spec.group == "unnamed"]
    planted, effective = len(faults_in(outcomes)), len(_effective(outcomes))
    parts = [
        (
            f"{planted} faults were planted, and {effective} of them move the output by"
            f" more than {FACTOR:g} times its noise. {len(outcomes) - planted} pairs"
            " are harmless."
        ),
        "\n".join(f"- {line}" for line in bars(outcomes)),
        "## By family",
        fault_text("family", fault_rows(here, _family)),
        "## By kind",
        fault_text("kind", fault_rows(named, _kind)),
        "## Faults without a name",
        fault_text("change", fault_rows(unnamed, _kind)),
        "## Harmless pairs",
        harmless_text(harmless_rows(here)),
        "## Ports by layout",
        port_text(port_rows(outcomes)),
        "## Other devices",
        _or_none(DEVICE_HEADS, device_rows(outcomes), "Measured on the CPU alone."),
        "## Misses",
        _or_none(MISS_HEADS, misses(outcomes), "None."),
    ]
    return "\n\n".join(parts)


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return every row, which docs/faults.md sums up."""
    here = _on_the_cpu(outcomes)
    parts = [
        "# Every row of `make faults`",
        markdown(["family", *HEADS], fault_rows(here, _family)),
        markdown(["kind", *HEADS], fault_rows(here, _kind)),
        markdown(["change", *HARMLESS_HEADS], harmless_rows(here)),
        markdown(PORT_HEADS, port_rows(outcomes)),
    ]
    return "\n\n".join(parts) + "\n"


def fault_text(title: str, rows: Rows) -> str:
    """Say how many were found, and tabulate where some were not."""
    *rows, (_, planted, effective, sites, modules) = rows
    missed = [row for row in rows if not row[2] == row[3] == row[4]]
    told = (
        f"{effective} of {planted} planted faults are effective; the first layer is"
        f" exact in {sites} of these, the module in {modules}."
    )
    return f"{told}\n\n{markdown([title, *HEADS], missed)}" if missed else told


def harmless_text(rows: Rows) -> str:
    """Count the harmless pairs, and name the changes with false alarms."""
    *rows, (_, pairs, alarms, _) = rows
    alarming = [f"{name} {false}" for name, _, false, _ in rows if false]
    where = f" ({', '.join(alarming)})" if alarming else ""
    return f"{alarms} false alarms in {pairs} pairs{where}."


def port_text(rows: Rows) -> str:
    """Tabulate all layouts together, and name those that are not always exact."""
    right = PORT_HEADS.index("module right")
    effective = PORT_HEADS.index("effective")
    inexact = []
    for row in rows:
        layout, dtype, device = row[:3]
        if layout != "all" and row[right] != row[effective]:
            inexact.append(
                f"{layout}, {dtype}, {device}: {row[right]} of {row[effective]}"
            )
    together = [row[1:] for row in rows if row[0] == "all"]
    table = markdown(PORT_HEADS[1:], together)
    if not inexact:
        return table
    return (
        f"{table}\n\nLayouts in which the module is not always right, of the effective"
        f" faults: {'; '.join(inexact)}."
    )


def _or_none(head: Sequence[str], rows: Rows, otherwise: str) -> str:
    return markdown(head, rows) if rows else otherwise
