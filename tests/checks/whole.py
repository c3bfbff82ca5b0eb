"""The whole product: every check of every analysis on every subject.

    python -m tests.checks.whole --jobs 8
    python -m tests.checks.whole --jobs 2 --part 1/6 --subjects phi,cohere --slow

Each process takes one subject and some analyses at a time, so that what a question
came to is computed once. A line is printed for every law that is broken, and a count at
the end; `--out` keeps all of it as JSON.
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from hiddenscope.testing import CHECKS, SUBJECTS
from hiddenscope.testing.checks import NotApplicable
from hiddenscope.testing.subjects import Unavailable
from tests.checks import oracle as oracle
from tests.registry import ENTRIES


class Broken(NamedTuple):
    """A law that does not hold, and how long it took to find out."""

    check: str
    word: str
    subject: str
    problem: str


class Counted(NamedTuple):
    """What some cases came to, and the CPU seconds of each check."""

    kept: int
    silent: int
    broken: list[Broken]
    seconds: Counter[str]


def tried(word: str, subject: str, checks: list[str]) -> Counted:
    """Try the checks of one analysis on one subject."""
    torch.set_num_threads(1)
    kept = silent = 0
    broken = []
    seconds = Counter[str]()
    for name in checks:
        begun = time.process_time()
        try:
            CHECKS[name](ENTRIES[word], SUBJECTS[subject])
            kept += 1
        except (NotApplicable, Unavailable):
            silent += 1
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            said = str(error)
            if not isinstance(error, AssertionError):
                said = f"{type(error).__name__}: {error} ({where})"
            broken.append(Broken(name, word, subject, said[:600]))
        seconds[name] += time.process_time() - begun
    return Counted(kept, silent, broken, seconds)


def parts(
    words: list[str], subjects: list[str], part: str
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of an analysis and a subject that belong to a part, as 2/6."""
    number, count = map(int, part.split("/"))
    pairs = [(word, subject) for subject in subjects for word in words]
    yield from pairs[number - 1 :: count]


def main() -> int:
    """Run the cases, and return 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--words", default=",".join(ENTRIES))
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--checks", default="")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cheap = [name for name, check in CHECKS.items() if options.slow or not check.slow]
    checks = options.checks.split(",") if options.checks else cheap
    pairs = parts(options.words.split(","), options.subjects.split(","), options.part)
    total = Counted(0, 0, [], Counter())
    begun = time.monotonic()
    # Forked processes would share the threads of torch.
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(tried, *pair, checks) for pair in pairs]
        for number, done in enumerate(as_completed(waiting), 1):
            counted = done.result()
            for line in counted.broken:
                print(f"{line.check}: {line.word} on {line.subject}: {line.problem}")
            total = Counted(
                total.kept + counted.kept,
                total.silent + counted.silent,
                total.broken + counted.broken,
                total.seconds + counted.seconds,
            )
            print(f"{number} of {len(waiting)}", end="\r", file=sys.stderr, flush=True)
    print(
        f"{total.kept + len(total.broken)} laws tried, {len(total.broken)} broken,"
        f" {total.silent} say nothing; {time.monotonic() - begun:.0f} s, and"
        f" {sum(total.seconds.values()):.0f} s of CPU"
    )
    if options.out:
        kept = {**total._asdict(), "broken": [line._asdict() for line in total.broken]}
        options.out.write_text(json.dumps(kept, indent=1), "utf-8")
    return int(bool(total.broken))


if __name__ == "__main__":
    sys.exit(main())
