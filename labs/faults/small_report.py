"""The tables of small faults and sound pairs, and their section in docs/faults.md."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from labs.faults.report import markdown
from labs.faults.small import TOKENS, Measured

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
START = "<!-- small faults: written by `python -m labs.faults.systematic --write` -->\n"
END = "<!-- end of small faults -->\n"
Key = Callable[[Measured], str]


def tables(outcomes: Sequence[Measured]) -> list[str]:
    """Write every table."""
    sound = [outcome for outcome in outcomes if outcome.trial.sound]
    planted = [outcome for outcome in outcomes if not outcome.trial.sound]
    return [
        f"**Sound pairs.** {_sound_sentence(sound)}",
        _sound_table("dtype and device", sound, _where),
        (
            "**Small faults in bfloat16.** How many are found in the states, and how"
            " many in the states or the single modules, called on equal input."
        ),
        _power_table(planted),
        (
            "**How small.** The bar is the smallest scale of what attention or an MLP"
            " adds that could have shown: the median over pairs. Faults are sorted by"
            " how much they change the part, computed in float64."
        ),
        _size_table(planted),
        "**Not found in the states with the most tokens, in bfloat16.**",
        _miss_table(planted),
    ]


def _sound_sentence(sound: Sequence[Measured]) -> str:
    part = max((outcome.beyond for outcome in sound), default=0.0)
    module = max((outcome.module_beyond for outcome in sound), default=0.0)
    alarms = sum(_alarm(outcome) for outcome in sound)
    return (
        f"{len(sound)} pairs, {alarms} false alarms. The strongest part of any reached"
        f" {part:.2f} of the bar, and the strongest single module {module:.2f}; 1 would"
        " be a false alarm."
    )


def _alarm(outcome: Measured) -> bool:
    return outcome.beyond > 1 or outcome.module_beyond > 1


def _where(outcome: Measured) -> str:
    return f"{outcome.trial.dtype}, {outcome.trial.device}"


def _groups(outcomes: Iterable[Measured], key: Key) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)
    return groups


def _sound_table(title: str, sound: Sequence[Measured], key: Key) -> str:
    lines = []
    for name, group in _groups(sound, key).items():
        worst = max(group, key=lambda outcome: outcome.beyond)
        module = max(outcome.module_beyond for outcome in group)
        alarms = sum(_alarm(outcome) for outcome in group)
        where = (
            f"{worst.trial.subject}, {worst.part}, {worst.pattern}"
            if worst.beyond
            else ""
        )
        lines.append(
            [name, len(group), alarms, f"{worst.beyond:.2f}", where, f"{module:.2f}"]
        )
    head = [
        title,
        "pairs",
        "false alarms",
        "strongest part, times the bar",
        "which",
        "strongest module",
    ]
    return markdown(head, lines)


def _power_table(planted: Sequence[Measured]) -> str:
    narrow = [outcome for outcome in planted if outcome.trial.dtype == "bfloat16"]
    lines = []
    for kind, group in _groups(narrow, lambda outcome: outcome.trial.kind).items():
        line = [kind]
        for tokens in TOKENS:
            line.append(
                _shares([outcome for outcome in group if outcome.tokens == tokens])
            )
        lines.append(line)
    head = ["fault", *(f"{tokens:,} tokens: states, with modules" for tokens in TOKENS)]
    return markdown(head, lines)


def _shares(group: Sequence[Measured]) -> str:
    states = sum(outcome.beyond > 1 for outcome in group)
    either = sum(_alarm(outcome) for outcome in group)
    return f"{states}, {either} of {len(group)}"


# A change of a part, in units of rounding.
SIZES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def _size_table(planted: Sequence[Measured]) -> str:
    lines = []
    for dtype, group in _groups(
        _last(planted), lambda outcome: outcome.trial.dtype
    ).items():
        bars = sorted(outcome.smallest for outcome in group)
        line = [dtype, f"{UNITS[dtype]:.2g}", f"{bars[len(bars) // 2]:.2g}"]
        for size, next_size in zip(SIZES, (*SIZES[1:], float("inf")), strict=True):
            effects = [
                outcome
                for outcome in group
                if size <= outcome.effect / UNITS[dtype] < next_size
            ]
            line.append(_shares(effects) if effects else "")
        shown = [outcome.effect for outcome in group if outcome.beyond > 1]
        line.append(f"{min(shown, default=0.0):.2g}")
        lines.append(line)
    ranges = [f"{size:g} units or more" for size in SIZES]
    return markdown(
        ["dtype", "unit of rounding", "bar", *ranges, "smallest found in states"], lines
    )


def _last(planted: Iterable[Measured]) -> list[Measured]:
    """Keep the outcome with the most tokens of every pair."""
    last = {
        outcome.trial: outcome
        for outcome in sorted(planted, key=lambda outcome: outcome.tokens)
    }
    return list(last.values())


def _miss_table(planted: Sequence[Measured]) -> str:
    lines = []
    for outcome in _last(planted):
        if outcome.trial.dtype == "bfloat16" and outcome.beyond <= 1:
            effect = f"{outcome.effect / UNITS['bfloat16']:.2g}"
            module = "found" if outcome.module_beyond > 1 else "not found"
            lines.append(
                [
                    outcome.trial.subject,
                    outcome.trial.kind,
                    outcome.detail,
                    effect,
                    module,
                ]
            )
    return markdown(
        [
            "model",
            "fault",
            "place",
            "change of the part, in units of rounding",
            "single module",
        ],
        lines,
    )


def write_section(outcomes: Sequence[Measured]) -> None:
    """Replace the section between the two marks."""
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    after = rest.partition(END)[2]
    section = "\n\n".join(tables(outcomes))
    PAGE.write_text(f"{before}{START}\n{section}\n\n{END}{after}", "utf-8")
