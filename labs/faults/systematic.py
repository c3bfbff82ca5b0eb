"""Measure how small a fault is recognised, and how often sound programs are blamed.

python -m labs.faults.systematic                      all pairs, in order; the tables
python -m labs.faults.systematic --only llama bfloat16 some, by model, dtype, kind, device, `sound`, `planted`
python -m labs.faults.systematic --json FILE          add outcomes to a file, and measure what is not in it
python -m labs.faults.systematic --write              write the section of docs/faults.md as well
python -m labs.faults.systematic --tiny --only sound cuda cpu-cuda cuda-tf32   the pairs on a GPU
"""

import argparse
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from labs.faults.small import Measured, Trial, measure_all, trials
from labs.faults.small_report import tables, write_section
from labs.faults.trial import prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the pairs and print the tables; 1 if a sound pair was called faulty."""
    parser = argparse.ArgumentParser(
        prog="labs.faults.systematic", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="models, dtypes, kinds, sound, planted",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="leave the trained model out"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="a file to add outcomes to; pairs that are in it are not measured",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="how many processes measure"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the section of docs/faults.md"
    )
    options = parser.parse_args(arguments)
    prepare()
    selected = _select(list(trials(trained=not options.tiny)), options.only)
    outcomes = _measure_all(selected, options.json, options.workers)
    print("\n\n".join(tables(outcomes)))
    if options.write:
        write_section(outcomes)
    false_alarms = [
        outcome for outcome in outcomes if outcome.trial.sound and outcome.beyond > 1
    ]
    return 1 if false_alarms else 0


def _select(pairs: list[Trial], names: Sequence[str]) -> list[Trial]:
    """Select the pairs that match: of each attribute that is named, any of the names."""
    for attribute in ("subject", "dtype", "kind", "device"):
        wanted = {getattr(trial, attribute) for trial in pairs} & set(names)
        if wanted:
            pairs = [trial for trial in pairs if getattr(trial, attribute) in wanted]
    if "sound" in names:
        pairs = [trial for trial in pairs if trial.sound]
    if "planted" in names:
        pairs = [trial for trial in pairs if not trial.sound]
    return pairs


def _measure_all(
    selected: list[Trial], file: Path | None, workers: int
) -> list[Measured]:
    outcomes = _read(file)
    known = {outcome.trial for outcome in outcomes}
    groups: dict[tuple[object, ...], list[Trial]] = defaultdict(list)
    for trial in selected:
        if trial not in known:
            # Pairs of a group share the reference's rows.
            groups[
                trial.subject, trial.dtype, trial.seed, trial.sound, trial.device
            ].append(trial)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, prepare) as pool:
        jobs = [pool.submit(measure_all, group) for group in groups.values()]
        for number, job in enumerate(as_completed(jobs), 1):
            fresh = job.result()
            outcomes += fresh
            if file is not None:
                with file.open("a", encoding="utf-8") as end:
                    end.writelines(f"{outcome.to_json()}\n" for outcome in fresh)
            print(
                f"{number} of {len(jobs)} groups of pairs", file=sys.stderr, flush=True
            )
    return outcomes


def _read(file: Path | None) -> list[Measured]:
    if file is None or not file.exists():
        return []
    return [Measured.from_json(line) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
