"""Plant faults, let `hs.drift` look for them, and print what it found.

python -m faults                       all of it, against the bars
python -m faults --only llama norm_eps some, by family or by kind
python -m faults --write               all, and write the tables of docs/faults.md
python -m faults --check               not drift, but what the faults declare, by plain hooks
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from faults.pairs import Spec, specs
from faults.report import met, page, report
from faults.trial import Outcome, attempt, check, prepare

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"
MARK = "<!-- measured: written by `python -m faults --write` -->\n"
WORKERS = 2
Made = TypeVar("Made")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every pair and say what came of it; 1 if a bar is not met."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="families, kinds or groups to try")
    parser.add_argument("--rounds", type=int, default=1, help="how often each kind is planted in each family")
    parser.add_argument("--tiny", action="store_true", help="leave the real model out")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/faults.md")
    parser.add_argument("--check", action="store_true", help="check what the faults declare, and leave drift alone")
    parser.add_argument("--json", type=Path, help="a file to add outcomes to; pairs that are in it are not tried")
    given = parser.parse_args(arguments)
    prepare()
    chosen = _chosen(specs(given.rounds, real=not given.tiny), given.only)
    if not chosen:
        parser.error(f"nothing is called {' or '.join(given.only)}")
    if given.check:
        objections = [said for said in tried(check, [spec for spec in chosen if spec.fault]) if said]
        print("\n".join([*objections, f"{len(objections)} declarations are wrong"]))
        return 1 if objections else 0
    outcomes = _outcomes(chosen, given.json)
    print("\n".join(report(outcomes)))
    if given.write:
        head = PAGE.read_text("utf-8").partition(MARK)[0]
        PAGE.write_text(f"{head}{MARK}\n{page(outcomes)}\n", "utf-8")
    return 0 if met(outcomes) else 1


def _outcomes(chosen: list[Spec], file: Path | None) -> list[Outcome]:
    """What came of every pair: read from the file where it is there already, or else tried, and added to the file."""
    lines = file.read_text("utf-8").splitlines() if file is not None and file.exists() else []
    known = {outcome.spec: outcome for outcome in map(Outcome.from_json, lines)}
    for outcome in tried(attempt, [spec for spec in chosen if spec not in known]):
        known[outcome.spec] = outcome
        if file is not None:
            with file.open("a", encoding="utf-8") as end:
                print(outcome.to_json(), file=end)
    return [known[spec] for spec in chosen]


def _chosen(everything: list[Spec], only: Sequence[str]) -> list[Spec]:
    """What the names ask for: any of the families named, and of them any of the kinds, and any of the groups."""
    known = {name for spec in everything for name in (spec.subject, spec.kind, spec.group)}
    if set(only) - known:
        return []
    for attribute in ("subject", "kind", "group"):
        wanted = {getattr(spec, attribute) for spec in everything} & set(only)
        everything = [spec for spec in everything if not wanted or getattr(spec, attribute) in wanted]
    return everything


def tried(trial: Callable[[Spec], Made], chosen: list[Spec]) -> Iterator[Made]:
    """Try every pair, some at a time, with a word on stderr about how far it is."""
    if not chosen:
        return
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, context, prepare) as pool:
        jobs = [pool.submit(trial, spec) for spec in chosen]
        for done, job in enumerate(as_completed(jobs), 1):
            said = f"{done} of {len(chosen)} pairs, {time.monotonic() - start:.0f} s"
            if sys.stderr.isatty():
                print(f"\r\033[K{said}", end="" if done < len(chosen) else "\n", file=sys.stderr, flush=True)
            elif done % 100 == 0 or done == len(chosen):
                print(said, file=sys.stderr, flush=True)
            yield job.result()


if __name__ == "__main__":
    sys.exit(main())
