"""Compile and train models whose answer is known, and score every analysis on them.

python -m labs.truth                          every model, with what each question scored
python -m labs.truth --only induction gpt2    some, by program or host
python -m labs.truth --scores edges           some of the analyses
python -m labs.truth --peers                  with TransformerLens beside them
python -m labs.truth --write                  every model, and write tables.md
python -m labs.truth --save models/           compiled models as folders that load like any other
python -m labs.truth --device cuda            on another device
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from labs.truth.hosts import HOSTS, compile_into
from labs.truth.programs import PROGRAMS
from labs.truth.report import report
from labs.truth.runs import SCORES, Job, Outcome, begin_worker, every_job, run
from labs.truth.save import save

TABLES = Path(__file__).with_name("tables.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Score every model and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.truth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], help="programs or hosts")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes of one thread each; as many as there are cores if not given",
    )
    parser.add_argument(
        "--scores", nargs="+", default=[], choices=[*SCORES], help="only these analyses"
    )
    parser.add_argument("--device", default="cpu", help="where the models are")
    parser.add_argument("--write", action="store_true", help="write tables.md")
    parser.add_argument(
        "--peers", action="store_true", help="put the questions to TransformerLens too"
    )
    parser.add_argument("--save", type=Path, help="a folder for the compiled models")
    options = parser.parse_args(arguments)
    known = [*PROGRAMS, *HOSTS, "trained"]
    for name in options.only:
        if name not in known:
            parser.error(
                f"{name!r} is no program or host; there are {', '.join(known)}"
            )
    if options.write and (options.only or options.scores):
        parser.error("--write needs all of it: leave --only and --scores out")
    if options.workers < 1:
        parser.error("--workers must be 1 or more")
    jobs = [job for job in every_job() if _is_wanted(job, options.only)]
    if options.save:
        return _save(jobs, options.save)
    ask = partial(run, device=options.device, scores=tuple(options.scores))
    outcomes = list(_outcomes(jobs, options.workers, ask))
    # As in the list of jobs, whichever came first.
    outcomes.sort(key=lambda outcome: jobs.index(outcome.job))
    if options.write:
        _write(outcomes)
    if options.peers:
        # Installed and imported only where it is asked for.
        from labs.truth.baselines import score_with_transformer_lens

        for job, card in score_with_transformer_lens(jobs):
            outcomes[jobs.index(job)].card.cases.update(card.cases)
        if options.write:
            _write(outcomes)
    print(report(outcomes))
    return 0


def _write(outcomes: Sequence[Outcome]) -> None:
    TABLES.write_text(f"# Every score of `make truth`\n\n{report(outcomes)}")


def _is_wanted(job: Job, names: Sequence[str]) -> bool:
    """Tell whether a job has one of the programs and one of the hosts that are named."""
    programs = [name for name in names if name in PROGRAMS]
    hosts = [name for name in names if name not in PROGRAMS]
    of_program = not programs or job.program in programs
    return of_program and (not hosts or job.host in hosts)


def _save(jobs: Sequence[Job], folder: Path) -> int:
    """Save what was compiled, and say where; return 1 if that is nothing."""
    saved = 0
    for job in jobs:
        # The plain module is a class of this lab, which no folder can name.
        if job.host in HOSTS and job.host != "plain":
            path = folder / f"{job.host}-{job.program}"
            save(compile_into(job.host, PROGRAMS[job.program]()), path)
            print(path)
            saved += 1
    if not saved:
        print("Only models compiled into GPT-2, OPT, BERT or Llama can be saved.")
    return int(not saved)


def _outcomes(
    jobs: Sequence[Job], workers: int, ask: Callable[[Job], Outcome]
) -> Iterator[Outcome]:
    """Yield what comes of the jobs, in processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=begin_worker)
    try:
        futures = [pool.submit(ask, job) for job in jobs]
        for number, future in enumerate(as_completed(futures), 1):
            outcome = future.result()
            job = outcome.job
            print(
                f"{number} of {len(jobs)}: {job.program} in {job.host},"
                f" {outcome.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            yield outcome
    finally:
        # After a fault or an interrupt the jobs that wait are not begun.
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Stopped. Models that were trained are kept.", file=sys.stderr)
        sys.exit(130)
