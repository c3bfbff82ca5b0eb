"""Draw faults of the package, and count how many the tests find."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

from labs.mutants import report
from labs.mutants.draw import Mutant, draw
from labs.mutants.trial import (
    ALL_SECONDS,
    UNSURE,
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
    numbers = range(1, len(mutants) + 1)
    if options.only:
        numbers, mutants = [options.only], [mutants[options.only - 1]]
    check_copy()
    outcomes = []
    for outcome in tried(mutants, options):
        outcomes.append(outcome)
        number = numbers[mutants.index(outcome.mutant)]
        told = f"[{len(outcomes)} of {len(mutants)}] {number}"
        print(f"{told} {report.line_of(outcome)}", flush=True)
    outcomes.sort(key=lambda outcome: mutants.index(outcome.mutant))
    outcomes = confirmed(outcomes, options.jobs)
    for outcome in outcomes:
        if not outcome.found:
            print(f"\n{report.line_of(outcome)}\n{report.difference(outcome.mutant)}")
    print(f"\n{report.summary(outcomes, aside, options.seed)}")
    if options.write:
        page = report.page(outcomes, aside, options.seed)
        report.PAGE.write_text(page, "utf-8")
    return int(any(outcome.verdict == UNSURE for outcome in outcomes))


def tried(mutants: Sequence[Mutant], options: argparse.Namespace) -> Iterator[Outcome]:
    """Yield what comes of each mutant, as it comes; some are tried side by side."""
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(hold, mutant, options.reach, options.seconds)
            for mutant in mutants
        ]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            for future in waiting:
                future.cancel()


def confirmed(outcomes: Sequence[Outcome], jobs: int) -> list[Outcome]:
    """Return the outcomes without credit for a test that fails on the package as it is."""
    tests = {outcome.test for outcome in outcomes if outcome.test}
    wrong = failing_anyway(sorted(tests), jobs)
    checked = []
    for outcome in outcomes:
        if outcome.test in wrong:
            outcome = replace(outcome, verdict=UNSURE)
        checked.append(outcome)
    return checked


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
        "--write", action="store_true", help="write labs/mutants/results.md"
    )
    options = parser.parse_args()
    if options.write and (options.only or options.room or options.reach):
        parser.error("--write keeps a whole run: leave --only, --room and --reach out")
    return options


if __name__ == "__main__":
    sys.exit(main())
