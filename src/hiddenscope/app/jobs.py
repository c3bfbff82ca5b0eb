"""Jobs: a bounded queue of questions, of which the worker answers one at a time.

A job is one question: an analysis with its arguments. (It has nothing to do with a job
of `extract`, which writes the states of a corpus.) A job is queued, running, then done,
failed or cancelled. A question that is asked again while its job is queued or running
joins that job. The worker is a process of its own, which is started on demand and again
after it was lost.
"""

import asyncio
import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import TypeAlias

from hiddenscope.app.cache import ResultCache, StoredResult
from hiddenscope.app.schemas import JobAnswer, JobState, Progress
from hiddenscope.app.settings import Settings
from hiddenscope.workers import Frame, Header, WorkerProcess

Listener: TypeAlias = Callable[[Header, bytes], None]

FINAL_MESSAGES = ("result", "error", "cancelled")
FINAL_STATES = ("done", "failed", "cancelled")
# Clients read how a job ended after it has. A finished job holds its request and no
# result, so remembering many costs little.
MAX_REMEMBERED = 500
# Well below the minute after which many proxies close a silent connection.
HEARTBEAT_SECONDS = 10.0
# How long a job outlives its page: reloading a page takes less.
GRACE_SECONDS = 10.0
# How long an interrupted worker may go on before it is killed.
SECONDS_TO_STOP = 3.0


class WorkerLost(Exception):
    """The worker ended before it had answered."""


class ModelWorker:
    """The process that has torch and the models. It answers a question at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._process: WorkerProcess | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hiddenscope-worker-")
        # Pipes block, so they are used in a thread of their own. asyncio's shared
        # threads may all be busy drawing figures.
        self._pipes = ThreadPoolExecutor(1, "hiddenscope-worker")

    @property
    def pid(self) -> int | None:
        """Return the process id while the worker runs, else None."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    async def ask(self, request: Header, listener: Listener) -> Frame:
        """Send a question; pass messages to the listener, and return the answer."""
        loop = asyncio.get_running_loop()
        if self._process is not None and self._process.poll() is not None:
            # It died between two questions.
            self._process.close()
            self._process = None
        if self._process is None:
            stderr = None if self.settings.debug else subprocess.DEVNULL
            self._process = WorkerProcess(
                ["-m", "hiddenscope.app.worker"],
                stderr=stderr,
                # An empty folder: no name that a page sends can be the path of a file.
                folder=self._folder.name,
                environment={"HIDDENSCOPE_APP_DEVICE": self.settings.device or ""},
                max_body=self.settings.result_bytes,
            )
        process = self._process
        try:
            await loop.run_in_executor(self._pipes, process.send, request)
            while True:
                frame = await loop.run_in_executor(self._pipes, process.receive)
                if frame is None:
                    raise EOFError("the pipe was closed")
                if frame.header.get("leaving"):
                    # The next question would otherwise go to a process that is ending.
                    await self.kill()
                if frame.header["type"] in FINAL_MESSAGES:
                    return frame
                listener(*frame)
        except (EOFError, ConnectionError, ValueError) as error:
            await self.kill()
            raise WorkerLost(self._explain_loss(process, error)) from error

    async def interrupt(self) -> None:
        """Ask the worker to stop what it is doing."""
        if self._process is not None:
            self._process.interrupt()

    async def kill(self) -> None:
        """End the worker at once, with the processes that it started."""
        process = self._process
        if process is None:
            return
        process.kill()
        await asyncio.to_thread(process.wait)
        # Another call may have ended it meanwhile.
        if self._process is process:
            self._process = None
            # In the thread that may still be reading from the pipe, so after that.
            self._pipes.submit(process.close)

    async def close(self) -> None:
        """End the worker for good, when the server ends."""
        await self.kill()
        self._pipes.shutdown(wait=False)
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _explain_loss(self, process: WorkerProcess, error: Exception) -> str:
        """Return a sentence for the page: why there is no answer, and what to do."""
        if isinstance(error, ValueError):
            return (
                f"The result is too large: at most {self.settings.result_bytes:,}"
                " bytes. Ask for fewer texts, tokens or sites."
            )
        code = process.poll()
        # Linux sends SIGKILL to a process when memory runs out.
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return (
                "The worker was killed, most likely because memory ran out. Ask for"
                " less, or use a smaller model."
            )
        ending = f"ended (exit code {code})"
        if code is not None and code < 0:
            ending = f"crashed ({signal.Signals(-code).name})"
        return f"The worker {ending}. The next question starts a new one."


class QueueFull(Exception):
    """The queue holds as many jobs as it takes."""


@dataclass(eq=False)
class JobRecord:
    """One job: the request as the client sent it and as the worker takes it, and how
    the job stands.

    `cache_key` is where the cache keeps the result. It is also the id of the result in
    the API. `answered` says that the worker is done with the job, whose result may
    still have to be written to the cache.
    """

    cache_key: str
    client_request: Header
    worker_request: Header
    id: str = field(default_factory=lambda: token_urlsafe(12))
    state: JobState = "queued"
    cancelling: bool = False
    answered: bool = False
    progress: Progress | None = None
    latest_partial: bytes = b""
    partial_count: int = 0
    error: str | None = None
    note: str = ""
    subscribers: int = 0
    last_read: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended, in whatever way."""
        return self.state in FINAL_STATES

    def end(self, state: JobState, *, error: str | None = None, note: str = "") -> None:
        """Set how the job ended, and wake its followers."""
        self.state = state
        # A page needs no early picture of a job that is over, and jobs are remembered.
        self.latest_partial = b""
        self.error = error
        self.note = note
        self.notify()

    def notify(self) -> None:
        """Wake everyone who follows the job."""
        self.changed.set()
        self.changed = asyncio.Event()


class Jobs:
    """The queue, the worker behind it, and the cache that results go to."""

    def __init__(
        self, worker: ModelWorker, cache: ResultCache, max_queued: int
    ) -> None:
        self.worker = worker
        self.cache = cache
        self.max_queued = max_queued
        self._known: dict[str, JobRecord] = {}
        self._waiting: list[JobRecord] = []
        self._running: JobRecord | None = None
        self._work = asyncio.Event()
        # The event loop holds its tasks weakly: one that nobody else holds may vanish.
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self, cache_key: str, client_request: Header, worker_request: Header
    ) -> JobRecord:
        """Queue a question, or join the job that asks the same."""
        for job in filter(None, (*self._waiting, self._running)):
            if job.cache_key == cache_key and not job.is_over and not job.cancelling:
                job.last_read = time.monotonic()
                return job
        if len(self._waiting) >= self.max_queued:
            raise QueueFull
        job = JobRecord(cache_key, client_request, worker_request)
        self._remember(job)
        self._waiting.append(job)
        self._work.set()
        return job

    def record_cached(self, cache_key: str, client_request: Header) -> JobRecord:
        """Return a finished job for a question whose result is in the cache."""
        job = JobRecord(cache_key, client_request, {}, state="done")
        self._remember(job)
        return job

    def get(self, job_id: str) -> JobRecord | None:
        """Return a job by its id, and note that somebody still reads it."""
        job = self._known.get(job_id)
        if job is not None:
            job.last_read = time.monotonic()
        return job

    def status_of(self, job: JobRecord) -> JobAnswer:
        """Return how a job stands, as the API says it."""
        jobs_before = 0
        if job in self._waiting:
            jobs_before = self._waiting.index(job) + (self._running is not None)
        return JobAnswer(
            id=job.id,
            analysis=job.client_request["analysis"],
            state=job.state,
            waiting=jobs_before,
            progress=job.progress,
            partial=job.partial_count,
            result=job.cache_key if job.state == "done" else None,
            error=job.error,
            note=job.note,
        )

    async def follow(self, job: JobRecord) -> AsyncGenerator[JobAnswer | None, None]:
        """Yield how a job stands, after every change until it is over.

        If nothing happens for a while, yield None: a connection that carries nothing
        is taken for dead. A job that was followed, and that nobody follows or reads any
        more, is cancelled: its page was closed.
        """
        job.subscribers += 1
        try:
            while True:
                # Taken before the status is yielded: the job may change meanwhile.
                changed = job.changed
                status = self.status_of(job)
                yield status
                if status.state in FINAL_STATES:
                    return
                while not changed.is_set():
                    try:
                        await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS)
                    except TimeoutError:
                        yield None
        finally:
            job.subscribers -= 1
            job.last_read = time.monotonic()
            self._start_task(self._cancel_after_grace(job))

    async def cancel(self, job: JobRecord) -> None:
        """Cancel a job, for everyone who asked for it."""
        if job.cancelling or job.is_over:
            return
        job.cancelling = True
        if job in self._waiting:
            self._waiting.remove(job)
            job.end("cancelled")
            self._notify_waiting()
        elif job is self._running:
            await self.worker.interrupt()
            self._start_task(self._kill_unless_stopped(job))

    async def run(self) -> None:
        """Answer one job after another, for as long as the server runs."""
        while True:
            await self._work.wait()
            if not self._waiting:
                self._work.clear()
                continue
            job = self._waiting.pop(0)
            self._running = job
            self._notify_waiting()
            try:
                await self._answer(job)
            # A fault of the server itself must not stop the queue.
            except Exception as error:
                message = f"Unexpectedly, {type(error).__name__}: {str(error)[:500]}"
                job.end("failed", error=message)
            finally:
                self._running = None

    async def _answer(self, job: JobRecord) -> None:
        job.state = "running"
        job.notify()

        def listen(header: Header, body: bytes) -> None:
            if header["type"] == "progress":
                job.progress = Progress(**header)
            elif header["type"] == "partial":
                # The body is the payload, followed by the data, which a page does not
                # need.
                job.latest_partial = body[: header["payload_bytes"]]
                job.partial_count += 1
            job.notify()

        try:
            header, body = await self.worker.ask(job.worker_request, listen)
        except WorkerLost as lost:
            if job.cancelling:
                job.end("cancelled")
            else:
                job.end("failed", error=str(lost))
            return
        except OSError as error:
            reason = error.strerror or error
            job.end("failed", error=f"The worker could not be started: {reason}.")
            return
        finally:
            job.answered = True
        kind = header.pop("type")
        if kind == "cancelled":
            job.end("cancelled")
        elif kind == "error":
            job.end("failed", error=header["message"])
        else:
            header["request"] = job.client_request
            result = StoredResult.split(header, body)
            note = await asyncio.to_thread(self.cache.put, job.cache_key, result)
            job.end("done", note=note)

    def _notify_waiting(self) -> None:
        """Tell everyone who follows a queued job that the queue has moved."""
        for job in self._waiting:
            job.notify()

    async def _cancel_after_grace(self, job: JobRecord) -> None:
        """Cancel a job that nobody follows once nobody has read it for a while."""
        while not job.subscribers and not job.is_over:
            remaining = job.last_read + GRACE_SECONDS - time.monotonic()
            if remaining <= 0:
                await self.cancel(job)
                return
            await asyncio.sleep(remaining)

    async def _kill_unless_stopped(self, job: JobRecord) -> None:
        await asyncio.sleep(SECONDS_TO_STOP)
        # The worker may have stopped in the very step of the event loop in which its
        # time was up, and answer the next question by now. Or it is idle while the
        # result is written: killing it would only lose its loaded models.
        if self._running is job and not job.answered:
            await self.worker.kill()

    def _start_task(self, coroutine: Coroutine[object, None, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _remember(self, job: JobRecord) -> None:
        """Keep a job under its id, and forget the oldest finished ones."""
        self._known[job.id] = job
        excess = len(self._known) - MAX_REMEMBERED
        if excess <= 0:
            return
        finished = [known.id for known in self._known.values() if known.is_over]
        for job_id in finished[:excess]:
            del self._known[job_id]
