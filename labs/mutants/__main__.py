"""Draw faults of the package, and count how many the tests find."""

import argparse
import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from labs.mutants import report
from labs.mutants.draw import Mutant, draw
from labs.mutants.trial import (
    ALL_SECONDS,
    Outcome,
    check_copy,
    failing_anyway,
    hold,
)


def main() -> int:
    """Draw, try, print; 1 if a test failed that fails without the fault too."""
    options = _options()
    mutants, aside = draw(options.seed, options.count, options.room)
    if options.list:
        for number, mutant in enumerate(mutants, 1):
            print(f"{number} {mutant.place} {mutant.fault.what}")
        return 0
    numbers = {mutant.place: number for number, mutant in enumerate(mutants, 1)}
    if options.only:
        mutants = [mutants[options.only - 1]]
    check_copy()
    without = options.without.read_text("utf-8").splitlines() if options.without else []
    unsound = set(without)
    sound: set[str] = set()
    outcomes = kept(options.keep, mutants)
    waiting = [mutant for mutant in mutants if mutant.place not in outcomes]
    while True:
        for number, outcome in enumerate(tried(waiting, options, unsound), 1):
            outcomes[outcome.mutant.place] = outcome
            keep(options.keep, outcome)
            told = f"[{number} of {len(waiting)}] {numbers[outcome.mutant.place]}"
            print(f"{told} {report.line_of(outcome)}", flush=True)
        # A test that fails on the package as it is finds nothing: it is left out, and
        # the others are asked.
        tests = {outcome.test for outcome in outcomes.values()} - {"", *sound}
        failing = failing_anyway(sorted(tests - unsound), options.jobs)
        for test in sorted(failing):
            print(f"fails without a fault too, and is left out: {test}", flush=True)
        unsound |= failing
        sound |= tests - unsound
        waiting = [m for m in mutants if outcomes[m.place].test in unsound]
        if not waiting:
            break
    ordered = [outcomes[mutant.place] for mutant in mutants]
    for outcome in ordered:
        if not outcome.found:
            print(f"\n{report.line_of(outcome)}\n{report.difference(outcome.mutant)}")
    print(f"\n{report.summary(ordered, aside, options.seed)}")
    if options.write:
        page = report.page(ordered, aside, options.seed)
        report.PAGE.write_text(page, "utf-8")
    return int(unsound != set(without))


def kept(file: Path | None, mutants: Sequence[Mutant]) -> dict[str, Outcome]:
    """Return what came of these mutants in earlier runs, by place; the last counts."""
    outcomes = {}
    lines = file.read_text("utf-8").splitlines() if file and file.exists() else []
    rows = [json.loads(line) for line in lines]
    for mutant in mutants:
        for row in rows:
            if row["name"] == list(mutant.name):
                outcome = Outcome(mutant, row["verdict"], row["test"], row["seconds"])
                outcomes[mutant.place] = outcome
    return outcomes


def keep(file: Path | None, outcome: Outcome) -> None:
    """Add a line for what came of a mutant."""
    if file is None:
        return
    row = {
        "name": outcome.mutant.name,
        "verdict": outcome.verdict,
        "test": outcome.test,
        "seconds": outcome.seconds,
    }
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def tried(
    mutants: Sequence[Mutant], options: argparse.Namespace, without: Collection[str]
) -> Iterator[Outcome]:
    """Yield what comes of each mutant, as it comes; some are tried side by side."""
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(hold, mutant, options.reach, options.seconds, without)
            for mutant in mutants
        ]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            for future in waiting:
                future.cancel()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m labs.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=6, help="which faults are drawn")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument(
        "--room", default="", help="a folder of the package, such as analyses/patch"
    )
    parser.add_argument("--only", type=int, metavar="N", help="the N-th of them alone")
    parser.add_argument("--list", action="store_true", help="print them, try none")
    parser.add_argument(
        "--reach",
        choices=["near", "all"],
        default="",
        help="the room's own tests alone; or every unit test, after the checks",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="mutants side by side"
    )
    parser.add_argument(
        "--seconds", type=float, default=ALL_SECONDS, help="for all tests of a mutant"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="add a line for each mutant, and leave out those that have one",
    )
    parser.add_argument(
        "--without",
        type=Path,
        metavar="FILE",
        help="names of tests that fail on this machine anyway, one a line",
    )
    parser.add_argument(
        "--write", action="store_true", help="write labs/mutants/results.md"
    )
    options = parser.parse_args()
    if options.write and (options.only or options.room or options.reach):
        parser.error("--write keeps a whole run: leave --only, --room and --reach out")
    return options


if __name__ == "__main__":
    sys.exit(main())
