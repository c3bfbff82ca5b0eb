"""A look at this installation: what works, what is missing, and what to do about it."""

from collections import Counter
from dataclasses import asdict

import typer

import hiddenscope as hs
from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, print_json, visible
from hiddenscope.diagnosis import Check, Status, diagnose

TITLES = {
    "environment": "Python and packages",
    "extras": "What not everybody needs",
    "cache": "The cache of models",
    "devices": "torch and its devices",
}
MARKS = {"ok": "ok", "note": "note", "problem": "MEND"}


@command("doctor", writes=(), without=("model", "device", "dtype", "out"))
def doctor(shared: Shared) -> None:
    """Check this installation, and say what to do about whatever is wrong.

    It looks at Python and the packages, the extras, the cache of models, and every
    device on which torch can compute. It exits with 1 if something must be mended, and
    never reaches the network.
    """
    checks: list[Check] = []
    for check in diagnose(hs.__version__):
        if not shared.json:
            is_first = not checks or checks[-1].group != check.group
            _print_check(check, is_first)
        checks.append(check)
    counts = Counter(check.status for check in checks)
    healthy = counts["problem"] == 0
    if shared.json:
        records = [asdict(check) for check in checks]
        print_json({"healthy": healthy, "checks": records})
    else:
        echo(f"\n{_verdict(counts)}")
    if not healthy:
        raise typer.Exit(1)


def _print_check(check: Check, is_first: bool) -> None:
    """Print a check, below the title of its group if it is the first of it."""
    if is_first:
        echo(f"\n{TITLES.get(check.group, check.group)}")
    echo(visible(f"  {MARKS[check.status]:4}  {check.name:14}{check.message}"))
    if check.remedy:
        echo(visible(f"        {'':14}{check.remedy}"))


def _verdict(counts: "Counter[Status]") -> str:
    if counts["problem"] == 1:
        return "1 thing must be mended: see MEND above."
    if counts["problem"]:
        return f"{counts['problem']} things must be mended: see MEND above."
    return "All is well. A note tells of something that not everybody needs."
