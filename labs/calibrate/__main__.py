"""Run the experiments, and write what came of them to labs/calibrate/results.json
and docs/calibration.md.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from labs.calibrate import (
    attention,
    circuit,
    examples,
    exchange,
    features,
    graft,
    monitor,
    patch,
    probe,
    profile,
    project,
    steer,
    variable,
    visibility,
)
from labs.calibrate.trials import Row, Share, Study

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "labs" / "calibrate" / "results.json"
PAGE = ROOT / "docs" / "calibration.md"
STUDIES = (
    probe.STUDY,
    probe.CENTRE_STUDY,
    project.STUDY,
    project.COMPARISON,
    exchange.STUDY,
    visibility.STUDY,
    graft.STUDY,
    patch.STUDY,
    attention.STUDY,
    profile.STUDY,
    examples.STUDY,
    monitor.STUDY,
    features.STUDY,
    variable.STUDY,
    circuit.STUDY,
    steer.STUDY,
)  # another analysis is one more line here
INTRODUCTION = """\
# How far intervals and tests can be trusted

`make calibrate` writes this page. A 95% interval must hold the truth in 95% of cases, and a test at 5% must be wrong in at
most 5%: data with a known truth are drawn again and again, and it is counted how often that was so. Intervals hold where they
must, and those of R² and of few groups are wider than they need be; tests keep their level, but for what is listed as out of range. A table has a row for each
claim: the range in which it must be, the conditions with the least and the most, with the standard error of the count, and
every condition that is out of range by more than two standard errors. All conditions, their runs and machines are in
[results.json](../labs/calibrate/results.json).
"""
# Claims that say how likely a probe is to find what is there.
POWER = ("highest", "power")


def main() -> None:
    """Parse, run, print, write; what is known is kept after every experiment."""
    options = _options()
    console = Console()
    for study in STUDIES:
        for experiment in study.experiments:
            if not re.search(options.only, f"{study.name}: {experiment.what}"):
                continue
            if options.missing and experiment.what in results().get(study.name, {}):
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
    console.print(f"Written: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


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
    parser.add_argument(
        "--missing", action="store_true", help="only what was never measured"
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
    """Write the page of all studies."""
    PAGE.write_text(whole(known), encoding="utf-8")


def whole(known: dict[str, Any]) -> str:
    """Return the page of all studies."""
    parts = [INTRODUCTION]
    for study in STUDIES:
        parts += [f"## {study.name}\n\n{study.introduction}\n", table(study, known)]
        if set(POWER) <= set(study.claims):
            parts.append(power_table(study, known))
    return "\n".join(parts)


def table(study: Study, known: dict[str, Any]) -> str:
    """Return a row for each claim of a study, in Markdown."""
    lines = [("claim", "conditions", "least", "most", "out of range")]
    for key, claim in study.claims.items():
        shares = {row.what: row.shares[key] for row in _rows(study, known, key)}
        if not shares:
            continue
        least = min(shares, key=lambda what: shares[what].mean)
        most = max(shares, key=lambda what: shares[what].mean)
        missed = []
        for what, share in shares.items():
            if not share.meets(claim):
                missed.append(f"{what}: **{_cell(share)}**")
        ends = [f"{_cell(shares[what])} ({what})" for what in (least, most)]
        lines.append((str(claim), f"{len(shares)}", *ends, "; ".join(missed)))
    return _markdown(lines)


def power_table(study: Study, known: dict[str, Any]) -> str:
    """Return how often a probe finds what is planted, for each condition."""
    lines = [("condition", *(study.claims[key].what for key in POWER))]
    for row in _rows(study, known, POWER[-1]):
        lines.append((row.what, *(_cell(row.shares[key]) for key in POWER)))
    return _markdown(lines)


def _rows(study: Study, known: dict[str, Any], key: str) -> list[Row]:
    """Return the conditions in which a claim was measured, in their order."""
    rows = []
    for experiment in study.experiments:
        fields = known.get(study.name, {}).get(experiment.what)
        if fields is None:
            continue
        row = Row.from_json(experiment.what, fields)
        share = row.shares.get(key, Share.of([]))
        if share.mean == share.mean:
            rows.append(row)
    return rows


def _markdown(lines: list[tuple[str, ...]]) -> str:
    head, *body = lines
    rule = ("---",) * len(head)
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))
    return f"{rows}\n"


def _cell(share: Share) -> str:
    if share.mean != share.mean:
        return ""
    return f"{100 * share.mean:.1f}" + (
        f" ± {100 * share.error:.1f}%" if share.error == share.error else "%"
    )


if __name__ == "__main__":
    main()
