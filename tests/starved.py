"""Extract in a process that has too few descriptors, or too little memory: what each
job ends with, one line each.

Called as `python -m tests.starved`. A line is what the process had too little of, and
`done`, or the error and its text.
"""

import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.chaos.kills import texts

ENGINE = hs.Engine(threads=1)


def main() -> None:
    """Give one job after another a little more."""
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    with TemporaryDirectory() as folder:
        # What is imported is imported now.
        hs.extract(model, texts(20), Path(folder, "warm"), engine=ENGINE)
    for more in (0, 1, 2, 3, 4, 6, 16):
        used = len(os.listdir("/proc/self/fd")) - 1
        ended = attempt(model, resource.RLIMIT_NOFILE, used + more, 30)
        print(f"descriptors: {ended}", flush=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 64 * 2**20
    print(f"memory: {attempt(model, resource.RLIMIT_AS, most, 3000)}")


def attempt(model: hs.Model, kind: int, most: int, count: int) -> str:
    """Extract this many texts under a limit, and say how that ended."""
    before = resource.getrlimit(kind)
    with TemporaryDirectory() as folder:
        resource.setrlimit(kind, (most, before[1]))
        try:
            hs.extract(model, texts(count), Path(folder, "store"), engine=ENGINE)
        except Exception as error:
            is_ours = isinstance(error, hs.errors.Error)
            return f"{type(error).__name__} {is_ours} {str(error)!a}"
        finally:
            resource.setrlimit(kind, before)
    return "done"


if __name__ == "__main__":
    main()
