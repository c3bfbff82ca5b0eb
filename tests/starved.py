"""Extract in a process that has too few descriptors, or too little memory: what each
job ends with, one line each.

Called as `python -m tests.starved descriptors memory`. A line is what the process had
too little of, and `done`, or the error and its text.
"""

import os
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import hiddenscope as hs
from chaos.kills import texts
from hiddenscope.testing import tiny_model, tiny_tokenizer

ENGINE = hs.Engine(threads=1)
MEGABYTE = 2**20


def main(whats: list[str]) -> None:
    """Give one job after another a little more."""
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    with TemporaryDirectory() as folder:
        # What is imported is imported now.
        hs.extract(model, texts(20), Path(folder, "warm"), engine=ENGINE)
    amounts = {"descriptors": (0, 1, 2, 3, 4, 6, 16), "memory": (64 * MEGABYTE,)}
    for what in whats:
        for amount in amounts[what]:
            with TemporaryDirectory() as folder:
                ended = attempt(model, Path(folder), what, amount)
            print(f"{what}: {ended}", flush=True)


def attempt(model: hs.Model, folder: Path, what: str, amount: int) -> str:
    """Extract with so much more than the process has already, and say how that ended."""
    if what == "descriptors":
        kind, used, count = (
            resource.RLIMIT_NOFILE,
            len(os.listdir("/proc/self/fd")) - 1,
            30,
        )
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        kind, used, count = resource.RLIMIT_AS, pages * resource.getpagesize(), 3000
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (used + amount, before[1]))
    try:
        hs.extract(model, texts(count), folder / "store", engine=ENGINE)
    except Exception as error:
        return (
            f"{type(error).__name__} {isinstance(error, hs.errors.Error)}"
            f" {str(error)!a}"
        )
    finally:
        resource.setrlimit(kind, before)
    return "done"


if __name__ == "__main__":
    main(sys.argv[1:])
