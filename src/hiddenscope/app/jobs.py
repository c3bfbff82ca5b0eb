"""Jobs: a queue of bounded length, one job at a time, and what becomes of each.

A job is one question that the worker answers: one analysis with its arguments. It has
nothing to do with the job of `extract`, which writes the states of a corpus.

A job is queued, running, then done, failed or cancelled. A question that is asked again
while its job is queued or running joins that job.
"""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from hiddenscope.app.cache import ResultCache, StoredResult
from hiddenscope.app.frames import Header
from hiddenscope.app.process import SECONDS_TO_STOP, WorkerLost, WorkerProcess
from hiddenscope.app.schemas import JobAnswer, Progress

JobState: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled"]

FINAL_STATES = ("done", "failed", "cancelled")
MOST_REMEMBERED = 500
HEARTBEAT_SECONDS = 10.0
GRACE_SECONDS = 10.0  # a page that is loaded again comes back sooner


class QueueFull(Exception):
    """There are as many jobs as the queue takes."""


@dataclass(eq=False)
class JobRecord:
    """One job: the request as the client sent it and as the worker takes it, and how
    the job stands.

    `cache_key` is where the cache keeps the result; it is also the id of the result in
    the API.
    """

    cache_key: str
    client_request: Header
    worker_request: Header
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    state: JobState = "queued"
    cancelling: bool = False
    progress: Progress | None = None
    latest_partial: bytes = b""
    partial_count: int = 0
    error: str | None = None
    note: str = ""
    subscribers: int = 0
    last_read: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, **fields: Any) -> None:
        """Set fields, and wake everybody who follows the job."""
        for name, value in fields.items():
            setattr(self, name, value)
        self.changed.set()
        self.changed = asyncio.Event()


class Jobs:
    """The queue, the worker behind it, and the cache that results go to."""

    def __init__(
        self, worker: WorkerProcess, cache: ResultCache, max_queued: int
    ) -> None:
        self.worker, self.cache, self.max_queued = worker, cache, max_queued
        self._known: OrderedDict[str, JobRecord] = OrderedDict()
        self._waiting: list[JobRecord] = []
        self._running: JobRecord | None = None
        self._work = asyncio.Event()

    def submit(
        self, cache_key: str, client_request: Header, worker_request: Header
    ) -> JobRecord:
        """Queue a question, or join the job that asks the same."""
        for job in (*self._waiting, *([self._running] if self._running else [])):
            if (
                job.cache_key == cache_key
                and job.state not in FINAL_STATES
                and not job.cancelling
            ):
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
        """A job whose result was there already."""
        job = JobRecord(cache_key, client_request, {}, state="done")
        self._remember(job)
        return job

    def get(self, id_: str) -> JobRecord | None:
        """A job by its id."""
        job = self._known.get(id_)
        if job is not None:
            job.last_read = time.monotonic()
        return job

    def status_of(self, job: JobRecord) -> JobAnswer:
        """How a job stands, as the API says it."""
        before = (
            self._waiting.index(job) + (self._running is not None)
            if job in self._waiting
            else 0
        )
        return JobAnswer(
            id=job.id,
            analysis=job.client_request["analysis"],
            state=job.state,
            waiting=before,
            progress=job.progress,
            partial=job.partial_count,
            result=job.cache_key if job.state == "done" else None,
            error=job.error,
            note=job.note,
        )

    async def follow(self, job: JobRecord) -> AsyncGenerator[JobAnswer | None, None]:
        """How a job stands, again and again until it is over; None from time to time
        where nothing happens.

        A job that was followed, and that nobody follows or reads any more, is
        cancelled: its page was closed.
        """
        job.subscribers += 1
        try:
            while True:
                changed, status = job.changed, self.status_of(job)
                yield status
                if status.state in FINAL_STATES:
                    return
                while changed is job.changed:
                    try:
                        await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS)
                    except TimeoutError:
                        yield None
        finally:
            job.subscribers -= 1
            job.last_read = time.monotonic()
            self._cancel_after_grace(job)

    async def cancel(self, job: JobRecord) -> None:
        """Cancel a job, for everybody who asked for it."""
        if job.cancelling or job.state in FINAL_STATES:
            return
        job.cancelling = True
        if job in self._waiting:
            self._waiting.remove(job)
            job.update(state="cancelled")
            self._notify_waiting()
        elif job is self._running:
            await self.worker.interrupt()
            asyncio.get_running_loop().call_later(SECONDS_TO_STOP, self._kill_soon, job)

    async def run(self) -> None:
        """Answer one job after another, for as long as the server runs."""
        while True:
            await self._work.wait()
            if not self._waiting:
                self._work.clear()
                continue
            job = self._running = self._waiting.pop(0)
            self._notify_waiting()
            try:
                await self._run_one(job)
            except Exception as error:  # or no other job would ever be run
                job.update(
                    state="failed",
                    error=f"Unexpectedly, {type(error).__name__}: {str(error)[:500]}",
                )
            finally:
                self._running = None

    async def _run_one(self, job: JobRecord) -> None:
        job.update(state="running")
        try:
            header, body = await self.worker.ask(
                job.worker_request, lambda *message: self._on_message(job, *message)
            )
        except WorkerLost as lost:
            ended = (
                {"state": "cancelled"}
                if job.cancelling
                else {"state": "failed", "error": str(lost)}
            )
            job.update(**ended)
            return
        except OSError as error:
            job.update(
                state="failed",
                error=f"The worker could not be started: {error.strerror or error}.",
            )
            return
        kind = header.pop("type")
        if kind == "cancelled":
            job.update(state="cancelled")
        elif kind == "error":
            job.update(state="failed", error=header["message"])
        else:
            middle = header.pop("payload_bytes")
            stored = StoredResult(
                {**header, "request": job.client_request}, body[:middle], body[middle:]
            )
            note = await asyncio.to_thread(self.cache.put, job.cache_key, stored)
            job.update(state="done", note=note)

    def _on_message(self, job: JobRecord, header: Header, body: bytes) -> None:
        if header["type"] == "progress":
            progress = Progress(
                what=header["what"], done=header["done"], total=header["total"]
            )
            job.update(progress=progress)
        elif header["type"] == "partial":
            job.update(
                latest_partial=body[: header["payload_bytes"]],
                partial_count=job.partial_count + 1,
            )

    def _notify_waiting(self) -> None:
        """Tell everybody who follows a queued job that the queue has moved."""
        for job in self._waiting:
            job.update()

    def _cancel_after_grace(self, job: JobRecord) -> None:
        """Cancel a job that nobody follows once nobody has read it for the grace
        period; until then, check again.
        """
        if job.subscribers or job.state in FINAL_STATES:
            return
        remaining = job.last_read + GRACE_SECONDS - time.monotonic()
        if remaining > 0:
            asyncio.get_running_loop().call_later(
                remaining, self._cancel_after_grace, job
            )
        else:
            self._task = asyncio.ensure_future(self.cancel(job))

    async def _kill_if_running(self, job: JobRecord) -> None:
        # Now, and not when this was asked for.
        if self._running is job and job.state == "running":
            await self.worker.kill()

    def _kill_soon(self, job: JobRecord) -> None:
        self._task = asyncio.ensure_future(self._kill_if_running(job))

    def _remember(self, job: JobRecord) -> None:
        self._known[job.id] = job
        finished = [
            id_ for id_, one in self._known.items() if one.state in FINAL_STATES
        ]
        for id_ in finished[: max(0, len(self._known) - MOST_REMEMBERED)]:
            with contextlib.suppress(KeyError):
                del self._known[id_]
