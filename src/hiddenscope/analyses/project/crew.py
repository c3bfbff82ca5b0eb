"""Who computes UMAP pictures: this process, warmed up in a thread, and others where they are worth their start."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from hiddenscope.analyses.project import shared
from hiddenscope.analyses.project.shared import Floats, Neighbours

WORTH_A_PROCESS = 30_000  # points over all pictures: below it another process takes longer to start than it saves


class Crew:
    """Made before the states are captured, so that compiling goes on meanwhile; used once, as a context manager."""

    def __init__(self, points: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.helpers = min(cores - 1, points // WORTH_A_PROCESS)
        self._folder = tempfile.TemporaryDirectory(prefix="hiddenscope-", ignore_cleanup_errors=True)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._warm, daemon=True)
        self._trouble: list[BaseException] = []

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", shared.__file__, self._folder.name, str(os.getpid())]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for _ in range(self.helpers):
            self._processes.append(subprocess.Popen(command, **quiet))  # type: ignore[call-overload]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._thread.join()
        self._folder.cleanup()

    def pictures(
        self, jobs: Sequence[tuple[Floats, Neighbours, int]], advance: Callable[[float], None]
    ) -> list[Floats]:
        """One picture a job: where to begin, the neighbours, the seed."""
        folder = Path(self._folder.name)
        for number, (start, neighbours, seed) in enumerate(jobs):
            shared.put(folder, number, start, neighbours, seed)
        (folder / "ready").touch()
        self._thread.join()
        if self._trouble:
            raise self._trouble[0]
        seen = 0

        def look() -> int:
            nonlocal seen
            there = sum(1 for _ in folder.glob("*.picture.npy"))
            advance(there - seen)
            seen = there
            return there

        for _ in shared.work(folder):
            look()
        while look() < len(jobs):  # what others have begun
            self._wait(folder, len(jobs))
        return [np.load(folder / f"{number}.picture.npy", allow_pickle=False) for number in range(len(jobs))]

    def _wait(self, folder: Path, jobs: int) -> None:
        """A moment; and if all that helped are gone, what they left unfinished is done here."""
        time.sleep(0.02)
        if all(process.poll() is not None for process in self._processes):
            for number in range(jobs):
                if not (folder / f"{number}.picture.npy").exists():
                    (folder / f"{number}.begun").unlink(missing_ok=True)
            for _ in shared.work(folder):
                pass

    def _warm(self) -> None:
        try:
            shared.warm()
        except BaseException as error:
            self._trouble.append(error)
