"""What is printed of mutants, and the page of the last run."""

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from labs.mutants.draw import Mutant, equivalents
from labs.mutants.trial import Outcome

PAGE = Path(__file__).parent / "results.md"


def line_of(outcome: Outcome) -> str:
    """Return one line: where, what, and what came of it."""
    mutant = outcome.mutant
    told = f"{mutant.place} {mutant.fault.what}: {outcome.verdict}"
    if outcome.test:
        told += f" by {outcome.test}"
    return f"{told} ({outcome.seconds:.0f} s)"


def difference(mutant: Mutant) -> str:
    """Return the change as a diff."""
    lines = difflib.unified_diff(
        mutant.source.splitlines(),
        mutant.changed.splitlines(),
        f"a/{mutant.path}",
        f"b/{mutant.path}",
        lineterm="",
    )
    return "\n".join(lines)


def found_by(outcome: Outcome) -> str:
    """Return which tests found a mutant: those of its room, or which others.

    >>> from types import SimpleNamespace
    >>> found_by(SimpleNamespace(test="tests/checks/test_all.py::test", found=True))
    'tests/checks'
    """
    if not outcome.found:
        return "nothing"
    if not outcome.test:
        return outcome.verdict
    folder = "/".join(outcome.test.split("::")[0].split("/")[:2])
    near = ("tests/unit", "src/hiddenscope")
    return "the room's own tests" if folder in near else folder


def summary(outcomes: Sequence[Outcome], aside: Sequence[Mutant], seed: int) -> str:
    """Return how many were found, and by what, in Markdown."""
    found = sum(outcome.found for outcome in outcomes)
    counts = Counter(map(found_by, outcomes))
    lines = [
        f"Of {len(outcomes)} mutants drawn by seed {seed}, {found} are found;"
        f" {len(aside)} more were put aside, because no test can see them.",
        "",
        "| found by | mutants |",
        "|---|---|",
    ]
    lines += [f"| {name} | {count} |" for name, count in counts.most_common()]
    return "\n".join(lines)


def page(outcomes: Sequence[Outcome], aside: Sequence[Mutant], seed: int) -> str:
    """Return the page of a run."""
    lines = [
        "# Mutants",
        "",
        "`make mutants` writes this page. Each row is a fault that was drawn at random,"
        " and the first test that fails on it.",
        "",
        summary(outcomes, aside, seed),
        "",
        "| place | change | found by |",
        "|---|---|---|",
    ]
    for outcome in outcomes:
        told = f"`{outcome.test}`" if outcome.test else outcome.verdict
        if not outcome.found:
            told = f"**{outcome.verdict}**"
        lines.append(f"| {_cells(outcome.mutant)} | {_cell(told)} |")
    if aside:
        why = equivalents()
        lines += ["", "Put aside:", "", "| place | change | why |", "|---|---|---|"]
        for mutant in aside:
            lines.append(f"| {_cells(mutant)} | {_cell(why[mutant.name])} |")
    return "\n".join([*lines, ""])


def _cells(mutant: Mutant) -> str:
    return f"`{mutant.place}` | {_cell(mutant.fault.what)}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
