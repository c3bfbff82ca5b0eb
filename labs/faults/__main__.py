"""Plant faults, let `hs.drift` look for them, and print what it found.

python -m labs.faults                       all of it, against the bars
python -m labs.faults --only llama norm_eps some, by family or by kind
python -m labs.faults --write               all, and write the tables of docs/faults.md
python -m labs.faults --check               not drift, but what the faults declare, by plain hooks
python -m labs.faults --device cuda         on another device, and between the CPU and that device
python -m labs.faults --merge gpu.jsonl     all, with outcomes of another machine in the tables
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from labs.faults.pairs import Spec, device_specs, specs
from labs.faults.report import met, page, report, tables
from labs.faults.trial import Outcome, attempt, check, prepare

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TABLES = Path(__file__).with_name("tables.md")
MARK = "<!-- measured: written by `python -m labs.faults --write` -->\n"
END = "<!-- end of what is measured by `python -m labs.faults --write` -->\n"
Made = TypeVar("Made")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every pair and print the outcomes; return 1 if a bar is not met."""
    parser = argparse.ArgumentParser(
        prog="labs.faults", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="families, kinds or groups to try",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="how often each kind is planted in each family",
    )
    parser.add_argument(
        "--no-real",
        "--tiny",
        dest="real",
        action="store_false",
        help="leave the real model out",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="where the models are; on any but the CPU, tiny ones alone",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--write", action="store_true", help="write the tables of docs/faults.md"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check what the faults declare, and leave drift alone",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="a file to add outcomes to; pairs that are in it are not tried",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        help="files of outcomes to report as well",
    )
    options = parser.parse_args(arguments)
    prepare()
    everything = _everything(options.rounds, options.device, real=options.real)
    selected = _select(everything, options.only)
    if not selected:
        parser.error(f"nothing is called {' or '.join(options.only)}")
    if options.check:
        return _check(selected, options.workers)
    outcomes = _outcomes(selected, options.json, options.workers)
    outcomes += [outcome for file in options.merge for outcome in read(file)]
    print("\n".join(report(outcomes)))
    if options.write:
        PAGE.write_text(_written(PAGE.read_text("utf-8"), outcomes), "utf-8")
        TABLES.write_text(tables(outcomes), "utf-8")
    return 0 if met(outcomes) else 1


def _everything(rounds: int, device: str, *, real: bool) -> list[Spec]:
    """List every pair for a device."""
    return specs(rounds, real=real) if device == "cpu" else device_specs(device)


def _check(selected: list[Spec], workers: int) -> int:
    """Check what faults declare; return 1 if anything is wrong."""
    planted = [spec for spec in selected if spec.fault]
    objections = [message for message in run_all(check, planted, workers) if message]
    print("\n".join([*objections, f"{len(objections)} declarations are wrong"]))
    return 1 if objections else 0


def _written(text: str, outcomes: list[Outcome]) -> str:
    """Replace the tables on the page."""
    head, _, measured = text.partition(MARK)
    _, _, tail = measured.partition(END)
    return f"{head}{MARK}\n{page(outcomes)}\n\n{END}{tail}"


def read(file: Path) -> list[Outcome]:
    """Read outcomes, one on each line."""
    return [Outcome.from_json(line) for line in file.read_text("utf-8").splitlines()]


def _outcomes(selected: list[Spec], file: Path | None, workers: int) -> list[Outcome]:
    """Return the outcome of every pair; read those that are in the file, add others."""
    before = read(file) if file is not None and file.exists() else []
    known = {outcome.spec: outcome for outcome in before}
    for outcome in run_all(
        attempt, [spec for spec in selected if spec not in known], workers
    ):
        known[outcome.spec] = outcome
        if file is not None:
            with file.open("a", encoding="utf-8") as end:
                print(outcome.to_json(), file=end)
    return [known[spec] for spec in selected]


def _select(everything: list[Spec], only: Sequence[str]) -> list[Spec]:
    """Select pairs by families, kinds, groups, dtypes and devices."""
    attributes = ("subject", "kind", "group", "dtype", "device")
    known: set[str] = set()
    for attribute in attributes:
        known |= {getattr(spec, attribute) for spec in everything}
    if set(only) - known:
        return []
    pairs = everything
    for attribute in attributes:
        wanted = {getattr(spec, attribute) for spec in pairs} & set(only)
        if wanted:
            pairs = [spec for spec in pairs if getattr(spec, attribute) in wanted]
    return pairs


def run_all(
    trial: Callable[[Spec], Made], selected: list[Spec], workers: int
) -> Iterator[Made]:
    """Run a function on every pair in parallel, with progress on stderr."""
    if not selected:
        return
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, prepare) as pool:
        jobs = [pool.submit(trial, spec) for spec in selected]
        for done, job in enumerate(as_completed(jobs), 1):
            message = (
                f"{done} of {len(selected)} pairs, {time.monotonic() - start:.0f} s"
            )
            if sys.stderr.isatty():
                print(
                    f"\r\033[K{message}",
                    end="" if done < len(selected) else "\n",
                    file=sys.stderr,
                    flush=True,
                )
            elif done % 100 == 0 or done == len(selected):
                print(message, file=sys.stderr, flush=True)
            yield job.result()


if __name__ == "__main__":
    sys.exit(main())
