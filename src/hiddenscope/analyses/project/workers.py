"""UMAP of many sets of points, in this process and, where it pays, in others.

`concurrent.futures.ProcessPoolExecutor` does not do here. Its spawned processes import
the caller's main module again: a plain script without `if __name__ == "__main__"` would
run once more in each of them. Forked ones are not safe once torch and numba have
started threads. So every other process is a plain `python workers.py` that reads jobs
from its standard input and writes pictures to its standard output; a thread of a
`ThreadPoolExecutor` hands it job after job. This file is what those processes run, so
it imports nothing of hiddenscope.

The processes and the compilation of UMAP's code (some seconds) start before the states
are captured, and go on meanwhile.
"""

import io
import os
import queue
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

# Points over all pictures: with fewer, a process takes longer to start than it saves.
WORTH_A_PROCESS = 30_000


class Job(NamedTuple):
    """A picture to compute: where points begin, the neighbours of each point with their
    distances, and the seed.
    """

    start: Floats
    neighbours: NDArray[np.int64]
    distances: Floats
    seed: int

    def compute(self) -> Floats:
        """The picture that umap-learn makes of it."""
        # That TensorFlow is missing, and that new points could not be added.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import umap

            knn = (
                self.neighbours.astype(np.int32),
                self.distances.astype(np.float32),
                None,
            )
            options: dict[str, Any] = {
                "n_neighbors": knn[0].shape[1],
                "random_state": self.seed,
                "n_jobs": 1,
            }
            reducer = umap.UMAP(
                **options, init=self.start.astype(np.float32), precomputed_knn=knn
            )
            return np.asarray(reducer.fit_transform(self.start), dtype=np.float32)


class UmapPool:
    """This process and as many others as pay off for so many points; a context manager
    that is used once.
    """

    def __init__(self, points: int) -> None:
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        self.others = max(0, min(cores - 1, points // WORTH_A_PROCESS))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(1 + self.others, thread_name_prefix="umap")

    def __enter__(self) -> Self:
        # -P: modules in its folder are not imported in place of others.
        command = [
            sys.executable,
            "-P",
            __file__,
        ]
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        for _ in range(self.others):
            self._processes.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
        self._compiled = self._threads.submit(compile_umap)
        self._ready: list[Future[bool]] = [
            self._threads.submit(_is_ready, process) for process in self._processes
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._threads.shutdown()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def wait_until_ready(self) -> None:
        """Return once everything is compiled, here and in the other processes."""
        self._compiled.result()
        wait(self._ready)

    def compute(
        self, jobs: Sequence[Job], advance: Callable[[float], None]
    ) -> list[Floats]:
        """The picture of each job; `advance` is called with the number of pictures that
        are done.
        """
        self._compiled.result()
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(jobs)):
            waiting.put(number)
        pictures: dict[int, Floats] = {}
        reported = 0

        def report() -> None:
            nonlocal reported
            count = len(pictures)
            advance(count - reported)
            reported = count

        served: set[Future[None]] = set()
        idle = dict(zip(self._ready, self._processes, strict=True))
        while len(pictures) < len(jobs):
            for ready in [ready for ready in idle if ready.done()]:
                process = idle.pop(ready)
                if ready.result():
                    served.add(
                        self._threads.submit(_serve, process, jobs, waiting, pictures)
                    )
            next_job = _next(waiting)
            if next_job is not None:
                pictures[next_job] = jobs[next_job].compute()
            # Another process computes what is missing, or ended while it did and has
            # put it back.
            else:
                done, served = wait(served, timeout=0.1, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
            report()
        return [pictures[number] for number in range(len(jobs))]


def compile_umap() -> None:
    """Compile everything that a picture needs, by making one of a few points."""
    points = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    neighbours = np.argsort(distances, axis=1)[:, :5]
    Job(
        points,
        neighbours,
        np.take_along_axis(distances, neighbours, 1).astype(np.float32),
        0,
    ).compute()


def _next(waiting: "queue.SimpleQueue[int]") -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _is_ready(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for the first message of a process; False if it ended instead."""
    assert process.stdout is not None
    try:
        _read(process.stdout)
    except (OSError, EOFError):
        return False
    return True


def _serve(
    process: "subprocess.Popen[bytes]",
    jobs: Sequence[Job],
    waiting: "queue.SimpleQueue[int]",
    pictures: dict[int, Floats],
) -> None:
    """Hand job after job to a process, until none waits; the job of a process that
    ended is put back.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    while (number := _next(waiting)) is not None:
        try:
            packed = io.BytesIO()
            np.savez(packed, **jobs[number]._asdict())
            _write(process.stdin, packed.getvalue())
            pictures[number] = np.load(
                io.BytesIO(_read(process.stdout)), allow_pickle=False
            )
        except (OSError, EOFError):
            waiting.put(number)
            return


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    """The next message; EOFError at the end of the stream."""
    header = stream.read(8)
    size = int.from_bytes(header, "little")
    message = stream.read(size) if len(header) == 8 else b""
    if len(header) < 8 or len(message) < size:
        raise EOFError
    return message


def main() -> None:
    """Serve the process that started this one, until it closes the pipe or ends."""
    jobs, pictures = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not reach the pictures.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    compile_umap()
    try:
        _write(pictures, b"")
        while True:
            with np.load(io.BytesIO(_read(jobs)), allow_pickle=False) as packed:
                job = Job(
                    packed["start"],
                    packed["neighbours"],
                    packed["distances"],
                    int(packed["seed"]),
                )
            made = io.BytesIO()
            np.save(made, job.compute())
            _write(pictures, made.getvalue())
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
