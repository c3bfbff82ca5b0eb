"""UMAP of many sets of points, in this process and, where it pays, in others.

The other processes run this file as a script. Importing it through its package would
import torch, which takes longer than many a picture.

The processes and the compilation of UMAP's code (some seconds) start before the states
are captured, and go on meanwhile.
"""

import io
import queue
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.workers import (
    Frame,
    WorkerProcess,
    available_cores,
    parent_channel,
)

Floats32: TypeAlias = NDArray[np.float32]

# Floats32 over all pictures: with fewer, a process takes longer to start than it saves.
WORTH_A_PROCESS = 30_000


class Job(NamedTuple):
    """A picture to compute: initial positions, and the neighbours of each point."""

    start: Floats32
    neighbours: NDArray[np.int64]
    distances: Floats32
    seed: int

    def compute(self) -> Floats32:
        """Return the picture that umap-learn computes."""
        neighbours = self.neighbours.astype(np.int32)
        with warnings.catch_warnings():
            # It warns that TensorFlow is missing, and that a picture with precomputed
            # neighbours cannot take new points.
            warnings.simplefilter("ignore")
            import umap

            reducer = umap.UMAP(
                n_neighbors=neighbours.shape[1],
                random_state=self.seed,
                n_jobs=1,
                init=self.start.astype(np.float32),
                precomputed_knn=(neighbours, self.distances.astype(np.float32), None),
            )
            return np.asarray(reducer.fit_transform(self.start), dtype=np.float32)

    def to_bytes(self) -> bytes:
        """Return the job as the bytes of an .npz file."""
        packed = io.BytesIO()
        np.savez(packed, **self._asdict())
        return packed.getvalue()

    @classmethod
    def from_bytes(cls, packed: bytes) -> Self:
        """Read what `to_bytes` wrote."""
        with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
            return cls(
                arrays["start"],
                arrays["neighbours"],
                arrays["distances"],
                int(arrays["seed"]),
            )


class UmapPool:
    """This process, and as many others as pay off; a context manager for one use."""

    def __init__(self, points: int) -> None:
        idle_cores = available_cores() - 1
        self.others = max(0, min(idle_cores, points // WORTH_A_PROCESS))
        self._processes: list[WorkerProcess] = []
        # Each process is awaited in a thread, then served in another.
        self._threads = ThreadPoolExecutor(1 + 2 * self.others, "umap")

    def __enter__(self) -> Self:
        for _ in range(self.others):
            # In the session of this process, which may be a worker itself: whoever
            # kills it kills these too.
            self._processes.append(WorkerProcess([__file__], new_session=False))
        self._compiled = self._threads.submit(compile_umap)
        # The first message of a process says that it is ready; None, that it ended.
        self._ready = []
        for process in self._processes:
            self._ready.append(self._threads.submit(process.receive))
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        # The threads that read from the processes end with them.
        self._threads.shutdown()
        for process in self._processes:
            process.close()

    def wait_until_ready(self) -> None:
        """Return once everything is compiled, here and in the other processes."""
        self._compiled.result()
        wait(self._ready)

    def compute(
        self, jobs: Sequence[Job], advance: Callable[[float], None]
    ) -> list[Floats32]:
        """Return the picture of each job; `advance` is told how many more are done."""
        self._compiled.result()
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(jobs)):
            waiting.put(number)
        pictures = {}
        reported = 0

        def serve(process: WorkerProcess, ready: Future[Frame | None]) -> None:
            """Hand job after job to a process; put the job of one that ended back."""
            if ready.result() is None:
                return
            while (number := _take(waiting)) is not None:
                frame = None
                try:
                    process.send({}, jobs[number].to_bytes())
                    frame = process.receive()
                # It ended before it had read the job.
                except OSError:
                    pass
                if frame is None:
                    waiting.put(number)
                    return
                pictures[number] = np.load(io.BytesIO(frame.body), allow_pickle=False)

        serving = []
        for process, ready in zip(self._processes, self._ready, strict=True):
            serving.append(self._threads.submit(serve, process, ready))
        while len(pictures) < len(jobs):
            next_job = _take(waiting)
            if next_job is not None:
                pictures[next_job] = jobs[next_job].compute()
            else:
                # Other processes compute the rest. One that dies puts its job back.
                for future in wait(serving, timeout=0.1).done:
                    future.result()
            # Other threads add pictures meanwhile.
            count = len(pictures)
            advance(count - reported)
            reported = count
        return [pictures[number] for number in range(len(jobs))]


def compile_umap() -> None:
    """Compile everything that a picture needs, by computing one of a few points."""
    points = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    neighbours = np.argsort(distances, axis=1)[:, :5]
    nearest = np.take_along_axis(distances, neighbours, 1).astype(np.float32)
    Job(points, neighbours, nearest, 0).compute()


def _take(waiting: "queue.SimpleQueue[int]") -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def main() -> None:
    """Compute pictures until the parent closes the pipe, or ends."""
    channel = parent_channel()
    compile_umap()
    # The parent may be gone, or stopped by the Ctrl-C that reaches this process too.
    try:
        channel.send({"type": "ready"})
        while (frame := channel.receive()) is not None:
            picture = io.BytesIO()
            np.save(picture, Job.from_bytes(frame.body).compute())
            channel.send({"type": "picture"}, picture.getvalue())
    except (BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
