"""Run the experiments, and write what came of them to labs/calibrate/results.json,
docs/calibration.md and docs/probe.md.
"""

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from labs.calibrate import attention, exchange, graft, patch, probe, project, visibility
from labs.calibrate.trials import Row, Share, Study

ROOT = Path(__file__).parents[2]
RESULTS, PAGE, PROBE = (
    ROOT / "labs" / "calibrate" / "results.json",
    ROOT / "docs" / "calibration.md",
    ROOT / "docs" / "probe.md",
)
STUDIES = (
    probe.STUDY,
    project.STUDY,
    exchange.STUDY,
    visibility.STUDY,
    graft.STUDY,
    patch.STUDY,
    attention.STUDY,
)  # another analysis is one more line here
MARKED = re.compile(
    r"(<!-- written by make calibrate -->\n).*?(<!-- end -->\n)", re.DOTALL
)
INTRODUCTION = """\
# How far intervals and tests can be trusted

Written by `make calibrate`. A 95% interval must hold the truth in 95% of cases, and a test at 5% must be wrong in at
most 5%. Here data with a known truth are drawn again and again, and it is counted how often that was so. The number
after ± is the standard error of the count. A number in bold is outside the range in the head of its column by more
than two standard errors.
"""


def main() -> None:
    """Parse, run, print, write; what is known is kept after every experiment."""
    options = _options()
    console = Console()
    for study in STUDIES:
        for experiment in study.experiments:
            if not re.search(options.only, f"{study.name}: {experiment.what}"):
                continue
            row = experiment.run(
                options.runs, options.device, options.jobs, options.seed_offset
            )
            _keep(study, row)
            told = ", ".join(
                f"{key} {_cell(share)}"
                for key, share in row.shares.items()
                if share.mean == share.mean
            )
            console.print(
                f"{study.name}: {row.what}, {row.runs} runs: {told}", highlight=False
            )
    write(results())
    console.print(
        "Written:"
        f" {', '.join(str(path.relative_to(ROOT)) for path in (RESULTS, PAGE, PROBE))}"
    )


def _options() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m labs.calibrate",
        description="Measure whether stated levels hold.",
    )
    parser.add_argument(
        "only",
        nargs="?",
        default="",
        help="a regular expression: only these, as in 'probe: noise'",
    )
    parser.add_argument("--runs", type=int, default=200, help="runs of an experiment")
    parser.add_argument(
        "--device", default="cpu", help="where the fits of probes are made: cpu or cuda"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes"
    )
    parser.add_argument(
        "--seed-offset",
        type=int,
        default=0,
        help="the seed of the first run: other draws than those of a former table",
    )
    return parser.parse_args()


def results() -> dict[str, Any]:
    """What was measured, by study and condition."""
    known: dict[str, Any] = (
        json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    )
    return known


def _keep(study: Study, row: Row) -> None:
    known = results()
    known.setdefault(study.name, {})[row.what] = row.to_json()
    RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def write(known: dict[str, Any]) -> None:
    """The page of all studies, and the table of the probe in its own page."""
    PAGE.write_text(whole(known), encoding="utf-8")
    page, count = MARKED.subn(
        rf"\g<1>\n{table(probe.STUDY, known)}\n\g<2>", PROBE.read_text("utf-8")
    )
    assert count == 1, "docs/probe.md has no place for the table"
    PROBE.write_text(page, encoding="utf-8")


def whole(known: dict[str, Any]) -> str:
    """The page of all studies."""
    parts = [INTRODUCTION]
    for study in STUDIES:
        parts += [f"## {study.name}\n\n{study.introduction}\n", table(study, known)]
    return "\n".join(parts)


def table(study: Study, results: dict[str, Any]) -> str:
    """The rows of a study that were measured, in Markdown."""
    lines = [("condition", "runs", *map(str, study.claims.values()))]
    lines.append(("---",) * len(lines[0]))
    lines += _lines(study, results.get(study.name, {}))
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{rows}\n\nMeasured on {_machines(study, results.get(study.name, {}))}.\n"


def _machines(study: Study, known: dict[str, Any]) -> str:
    """The machine of most rows, and the rows of every other one."""
    rows_of: dict[str, list[str]] = {}
    for experiment in study.experiments:
        if experiment.what in known:
            rows_of.setdefault(known[experiment.what]["machine"], []).append(
                experiment.what
            )
    measured = [what for rows in rows_of.values() for what in rows]
    order = [
        experiment.what
        for experiment in study.experiments
        if experiment.what in measured
    ]
    first, *others = sorted(rows_of, key=lambda machine: -len(rows_of[machine]))
    return ". ".join(
        [
            first,
            *(f"On {machine}: {_named(rows_of[machine], order)}" for machine in others),
        ]
    )


def _named(rows: list[str], order: list[str]) -> str:
    """The rows of a table in words: the last ones, or each by its condition."""
    if order[-len(rows) :] == rows:
        return f"the last {len(rows)} rows" if len(rows) > 1 else "the last row"
    return "; ".join(rows)


def _lines(study: Study, known: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for experiment in study.experiments:
        if experiment.what in known:
            row = Row.from_json(experiment.what, known[experiment.what])
            shares = [
                (row.shares.get(key, Share.of([])), claim)
                for key, claim in study.claims.items()
            ]
            cells = [
                _cell(share) if share.meets(claim) else f"**{_cell(share)}**"
                for share, claim in shares
            ]
            yield (row.what, f"{row.runs}", *cells)


def _cell(share: Share) -> str:
    if share.mean != share.mean:
        return ""
    return f"{100 * share.mean:.1f}" + (
        f" ± {100 * share.error:.1f}%" if share.error == share.error else "%"
    )


if __name__ == "__main__":
    main()
