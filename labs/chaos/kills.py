"""Kills: jobs, and workers of jobs, that are killed at random instants, and what their
stores are in the end.

Most of the killed are whole jobs, each a process of its own, forked from one that has
torch already, so that hundreds take minutes. The others are workers of one long job.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import psutil

import hiddenscope as hs
from hiddenscope.extract import JobProgress, worker
from hiddenscope.store import verify
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.chaos import memory_folder

UNIT_BYTES = 250_000
COUNT, OF_WORKERS = 520, 25
HOST = f"""
import os, sys
import torch
from labs.chaos.kills import texts
import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
torch.set_num_threads(1)  # a process with threads of torch's must not be forked
model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
for line in sys.stdin:
    child = os.fork()
    if not child:
        hs.extract(model, texts(), line.strip(), engine=hs.Engine(unit_bytes={UNIT_BYTES}, threads=1))
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def run(count: int = COUNT) -> list[str]:
    """Kill this many processes, and say what came of it: the figures first, then what is
    wrong.
    """
    with TemporaryDirectory(dir=memory_folder()) as folder:
        of_workers = min(OF_WORKERS, count // 10)
        jobs, ended, wrong = kill_jobs(count - of_workers, Path(folder, "jobs"))
        killed, also_wrong = kill_workers(of_workers, Path(folder, "workers"))
    what = (
        f"{jobs} jobs and {killed} workers killed with SIGKILL; {ended} stores"
        " completed in spite of it"
    )
    bad = [*wrong, *also_wrong]
    return [
        f"kills: {what}, {len(bad)} of them other than undisturbed ones, or not clean",
        *bad,
    ]


def texts(count: int = 24) -> list[str]:
    """Texts of different lengths."""
    return [
        f"The cat number {number} sat on the mat." * (1 + number % 3)
        for number in range(count)
    ]


def files_of(folder: Path) -> dict[str, str]:
    """The hash of every file of a store."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def kill_jobs(count: int, folder: Path, seed: int = 0) -> tuple[int, int, list[str]]:
    """Kill this many jobs: how many were killed, how many stores were completed, and
    which are not as they should be.
    """
    chance, wrong = random.Random(seed), list[str]()
    folder.mkdir()
    with _Host() as host:
        status, took = host.attempt(folder / "whole", None)
        if status:
            return 0, 0, [f"an undisturbed job ended with {status}"]
        kills = stores = 0
        while True:
            store = folder / str(stores)
            # Up to what a job takes, as fast as the machine is now: when one ends
            # nevertheless, the next begins a store of its own, and the time is measured
            # by it; when one is killed, the next is given a little more.
            after = None if kills >= count else chance.uniform(0.1, 1.0) * took
            status, seconds = host.attempt(store, after)
            kills += status == signal.SIGKILL
            took = (took + seconds) / 2 if status == 0 else took * 1.05
            if status == 0:
                stores += 1
                wrong += faults(store, folder / "whole")
                if kills >= count:
                    return kills, stores, wrong
            elif status != signal.SIGKILL:
                return kills, stores, [*wrong, f"a job ended with {status}"]


def kill_workers(count: int, folder: Path, seed: int = 0) -> tuple[int, list[str]]:
    """Kill this many workers of one job, a moment after a unit is done."""
    chance, killed = random.Random(seed), list[int]()
    folder.mkdir()
    model, corpus = (
        hs.load((tiny_model("gpt2"), tiny_tokenizer())),
        texts(12 * max(count, 2)),
    )
    hs.extract(
        model,
        corpus,
        folder / "whole",
        engine=hs.Engine(unit_bytes=UNIT_BYTES, threads=1),
    )
    engine = hs.Engine(unit_bytes=UNIT_BYTES, threads=1, workers=2)

    def kill() -> None:
        time.sleep(chance.uniform(0, 0.05))
        if own := workers():
            killed.append(chance.choice(own))
            with suppress(ProcessLookupError):
                os.kill(killed[-1], signal.SIGKILL)

    def report(now: JobProgress) -> None:
        if len(killed) < count and now.units_done % 2:
            threading.Thread(target=kill).start()

    hs.ExtractJob.plan(model, corpus, folder / "store", engine=engine).run(report)
    return len(set(killed)), faults(folder / "store", folder / "whole")


def workers(besides: Collection[int] = ()) -> list[int]:
    """The workers of jobs of this process that live: never another child, such as a
    browser or a server of a test.
    """
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if (
                worker.__name__ in child.cmdline()
                and child.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(child.pid)
    return sorted(set(found) - set(besides))


def faults(store: Path, whole: Path) -> list[str]:
    """What is wrong with a store that was completed."""
    there, wanted = files_of(store), files_of(whole)
    differ = sorted(
        name
        for name in there.keys() | wanted.keys()
        if there.get(name) != wanted.get(name)
    )
    found = (
        [f"{store.name}: {len(differ)} files differ, such as {differ[0]}"]
        if differ
        else []
    )
    return found + [f"{store.name}: {damage}" for damage in verify(store).damages]


class _Host:
    """A process that forks one job after another."""

    def __enter__(self) -> Self:
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST], env=environment, **pipes
        )  # type: ignore[call-overload]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def attempt(self, folder: Path, after: float | None) -> tuple[int, float]:
        """Run a job, and kill it after this many seconds: its status, and the seconds
        that it took.
        """
        self.process.stdin.write(f"{folder}\n".encode())
        self.process.stdin.flush()
        child, begin = int(self.process.stdout.readline()), time.monotonic()
        if after is not None:
            time.sleep(after)
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(child, signal.SIGKILL)
        return int(self.process.stdout.readline()), time.monotonic() - begin
