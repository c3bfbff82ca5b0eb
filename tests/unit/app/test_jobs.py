"""The queue: one question at a time, joined, followed, cancelled, and gone on with
after a fault.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hiddenscope.app import jobs
from hiddenscope.app.cache import ResultCache, StoredResult
from hiddenscope.app.jobs import JobRecord, Jobs, QueueFull, WorkerLost
from hiddenscope.workers import Frame
from tests.workbench.inside import apart

RESULT = Frame({"type": "result", "payload_bytes": 5}, b"whole data")
ERROR = Frame({"type": "error", "message": "answered"}, b"")
CANCELLED = Frame({"type": "cancelled"}, b"")


class Worker:
    """Gives these answers, one to a question: a message, an error to raise, or what a
    worker does that goes on until it is interrupted or killed.
    """

    def __init__(self, *answers: Frame | Exception | str) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.interrupts = 0
        self.killed: list[int] = []
        self.stopped = asyncio.Event()

    async def ask(self, request: Any, listener: Any) -> Frame:
        self.asked.append(request)
        self.stopped.clear()
        listener({"type": "progress", "what": "a task", "done": 1, "total": 4}, b"")
        listener({"type": "partial", "payload_bytes": 5}, b"early data")
        answer = self.answers.pop(0)
        if answer == "until interrupted":
            await self.stopped.wait()
            answer = CANCELLED
        while answer == "until killed":
            await asyncio.sleep(0.01)
            if self.killed:
                answer = WorkerLost("it was killed")
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Frame)
        await asyncio.sleep(0.02)
        return Frame(dict(answer.header), answer.body)

    async def interrupt(self) -> None:
        self.interrupts += 1
        asyncio.get_running_loop().call_soon(self.stopped.set)

    async def kill(self) -> None:
        self.killed.append(len(self.asked))


@asynccontextmanager
async def running(
    tmp_path: Path, worker: Worker, cache: ResultCache | None = None
) -> AsyncIterator[Jobs]:
    """A queue of two that is worked off."""
    queue = Jobs(worker, cache or ResultCache(tmp_path, 10**6), 2)  # type: ignore[arg-type]
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def submit(queue: Jobs, key: str) -> JobRecord:
    return queue.submit(key, {"analysis": "lens"}, {"key": key})


@apart
async def test_questions_wait_join_and_are_refused_where_too_many_wait(
    tmp_path: Path,
) -> None:
    worker, key = Worker("until interrupted", RESULT, ERROR), "0" * 64
    async with running(tmp_path, worker) as queue:
        first = submit(queue, "a")
        await until(lambda: first.state == "running")
        second, third = submit(queue, key), submit(queue, "c")
        waiting = [queue.status_of(job).waiting for job in (first, second, third)]
        assert waiting == [0, 1, 2]
        with pytest.raises(QueueFull):
            submit(queue, "d")
        # The same question joins its job, queued or running.
        assert submit(queue, "a") is first and submit(queue, "c") is third
        status = queue.status_of(first)
        assert status.progress is not None and status.progress.what == "a task"
        assert (status.partial, first.latest_partial) == (1, b"early")
        assert status.result is status.error is None
        await queue.cancel(first)
        # A job that is being cancelled is joined no more.
        with pytest.raises(QueueFull):
            submit(queue, "a")
        await until(lambda: third.is_over)
    states = [job.state for job in (first, second, third)]
    assert states == ["cancelled", "done", "failed"]
    assert [asked["key"] for asked in worker.asked] == ["a", key, "c"]
    assert (second.latest_partial, third.error) == (b"", "answered")
    assert queue.status_of(second).result == key and queue.get(second.id) is second
    assert queue.get("nothing") is None
    kept = StoredResult({"request": {"analysis": "lens"}}, b"whole", b" data")
    assert ResultCache(tmp_path, 10**6).get(key) == kept and second.note == ""


@apart
async def test_a_followed_job_is_told_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sign of life where nothing happens, and of every move of the queue."""
    monkeypatch.setattr(jobs, "HEARTBEAT_SECONDS", 0.05)
    worker = Worker("until interrupted", "until interrupted")
    told: list[Any] = []
    async with running(tmp_path, worker) as queue:
        before, job = submit(queue, "a"), submit(queue, "b")
        async with aclosing(queue.follow(job)) as statuses:
            async for status in statuses:
                told.append(status and (status.state, status.waiting))
                if status is None:
                    await queue.cancel(before)
                elif status.state == "running":
                    await queue.cancel(job)
    assert told[0] == ("queued", 1) and None in told
    assert told[-1] == ("cancelled", 0) and ("running", 0) in told


@apart
async def test_a_queued_job_is_cancelled_without_being_run_and_the_oldest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_REMEMBERED", 3)
    worker = Worker()
    queue = Jobs(worker, ResultCache(tmp_path, 10**6), 2)  # type: ignore[arg-type]
    first, second = submit(queue, "a"), submit(queue, "b")
    await queue.cancel(first)
    assert first.state == "cancelled" and worker.interrupts == 0
    assert queue.status_of(second).waiting == 0 and worker.asked == []
    cached = [queue.record_cached(key, {"analysis": "lens"}) for key in "cde"]
    remembered = [queue.get(job.id) for job in (first, second, *cached)]
    assert remembered == [None, second, None, *cached[1:]]
    assert queue.status_of(cached[2]).result == "e"


@apart
async def test_a_worker_that_does_not_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SECONDS_TO_STOP", 0.05)
    worker = Worker("until killed")
    async with running(tmp_path, worker) as queue:
        job = submit(queue, "a")
        await until(lambda: job.state == "running")
        await queue.cancel(job)
        await until(lambda: job.is_over)
    assert job.state == "cancelled" and job.error is None
    assert (worker.interrupts, worker.killed) == (1, [1])


@apart
async def test_a_fault_fails_one_job_and_the_queue_goes_on(tmp_path: Path) -> None:
    faults = {
        "Unexpectedly, RuntimeError: who knows": RuntimeError("who knows"),
        "The worker could not be started: No room.": OSError(28, "No room"),
        "it was killed": WorkerLost("it was killed"),
    }
    async with running(tmp_path, Worker(*faults.values())) as queue:
        for said in faults:
            job = submit(queue, said)
            await until(lambda job=job: job.is_over)  # type: ignore[misc]
            assert (job.state, job.error) == ("failed", said)


@apart
async def test_a_worker_that_stops_at_the_last_moment_is_not_killed_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops the cancelled job in the very step of the event loop in which its time
    is up.
    """
    monkeypatch.setattr(jobs, "SECONDS_TO_STOP", 0.0)
    worker = Worker("until interrupted", ERROR)
    async with running(tmp_path, worker) as queue:
        first, second = submit(queue, "a"), submit(queue, "b")
        await until(lambda: first.state == "running")
        await queue.cancel(first)
        await until(lambda: second.is_over)
    assert (first.state, second.error) == ("cancelled", "answered")
    assert 2 not in worker.killed, "the second question was answered by then"


@apart
async def test_a_worker_that_has_answered_is_not_killed_while_its_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SECONDS_TO_STOP", 0.0)
    is_writing = threading.Event()

    class SlowCache(ResultCache):
        def put(self, key: str, result: StoredResult) -> str:
            is_writing.set()
            time.sleep(0.1)
            return "a note"

    worker = Worker(RESULT)
    async with running(tmp_path, worker, SlowCache(tmp_path, 10**6)) as queue:
        job = submit(queue, "a")
        await until(is_writing.is_set)
        await queue.cancel(job)
        await until(lambda: job.is_over)
    assert (job.state, job.note, worker.killed) == ("done", "a note", [])


@apart
async def test_a_job_that_nobody_follows_or_reads_any_more_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page was closed: one read later does not keep it, and a second page does."""
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.1)
    # Nothing runs the queue: the jobs stay in it.
    queue = Jobs(Worker(), ResultCache(tmp_path, 10**6), 4)  # type: ignore[arg-type]
    left, held = submit(queue, "a"), submit(queue, "b")
    async with aclosing(queue.follow(held)) as second:
        await anext(second)
        for job in (left, held):
            async with aclosing(queue.follow(job)) as first:
                await anext(first)
        await asyncio.sleep(0.05)
        queue.get(left.id)
        await until(lambda: left.is_over)  # without reading it
        assert left.state == "cancelled" and held.state == "queued"
