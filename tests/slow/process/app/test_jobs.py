"""Questions over HTTP, on a tiny real model: answers, progress, cancelling, and what
happens when things break.
"""

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
import xarray

import hiddenscope as hs
from hiddenscope.app import jobs
from hiddenscope.app.answers import pack_result
from hiddenscope.app.cache import ResultCache, StoredResult
from hiddenscope.app.process import ModelWorker
from hiddenscope.app.schemas import ASKED
from hiddenscope.app.settings import Settings
from hiddenscope.app.worker import NO_MEMORY, explain_error
from hiddenscope.views import unpack
from tests.workbench.asking import MANY_TEXTS, QUESTIONS, SLOW, TEXT, named
from tests.workbench.serving import SECONDS, TOKEN, Bench, limited, linux

if sys.platform == "linux":
    import resource


def run_apart(work: Coroutine[Any, Any, Any]) -> Any:
    """Run in a thread of its own: once a test has used a browser, Playwright's event
    loop runs in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def test_every_analysis_is_asked_here() -> None:
    assert {analysis.word for analysis in ASKED} == set(QUESTIONS)


@pytest.mark.parametrize("word", QUESTIONS)
def test_every_analysis_answers(bench: Bench, tiny_name: str, word: str) -> None:
    result = bench.answer(word, tiny_name, **named(bench, QUESTIONS[word]))
    assert result["analysis"] == word and result["title"]
    assert f"hs.{word}(" in result["python"]
    views = unpack(
        bench.ask("GET", f"/api/results/{result['id']}/payload").body.decode()
    )
    assert [view.title for view in views] == [view["title"] for view in result["views"]]
    assert all(
        place < len(views)
        for section in result["sections"]
        for place in section["views"]
    )


def test_many_texts_are_drawn_from_as_the_form_says(
    bench: Bench, tiny_name: str
) -> None:
    result = bench.answer("visibility", tiny_name, **MANY_TEXTS)
    assert "hs.Sampling(" in result["python"]
    titles = " ".join(view["title"] for view in result["views"])
    assert "Influence by the distance in tokens" in titles


def test_an_answer_is_that_of_the_library_bit_for_bit(
    bench: Bench, tiny_name: str, root: Any, tmp_path: Any
) -> None:
    result = bench.answer("lens", tiny_name, texts=TEXT, k=2)
    kept = tmp_path / "lens.nc"
    kept.write_bytes(
        bench.ask("GET", f"/api/results/{result['id']}/file?format=nc").body
    )
    assert hs.Result.load(kept).data.identical(
        hs.lens(root / "models" / "tiny", TEXT, k=2).data
    )


def test_small_results_are_kept_as_json_and_large_ones_as_netcdf() -> None:
    """JSON is written sooner while it is short; both come back exactly."""
    for tokens, suffix in ((5, ".json"), (50_000, ".nc")):
        data = xarray.Dataset(
            {"norm": (("site", "token"), numpy.arange(tokens, dtype="float32")[None])}
        )
        answered = pack_result(
            hs.Result("norms", data.assign_coords(site=["layer.0"]), {}, {})
        )
        assert (
            StoredResult(answered.header, answered.payload, answered.data).suffix
            == suffix
        )


def test_a_question_asked_again_is_answered_at_once(
    bench: Bench, tiny_name: str
) -> None:
    first = bench.answer("grid", tiny_name, text="Once more.")
    again = bench.submit("grid", tiny_name, text="Once more.")
    assert again.status == 200
    assert again.json["state"] == "done" and again.json["result"] == first["id"]
    assert bench.submit("grid", tiny_name, text="Once more").status == 202


def test_the_grid_has_the_norms_of_the_states(
    bench: Bench, tiny_name: str, root: Any
) -> None:
    result = bench.answer("grid", tiny_name, text=TEXT)
    grid, *_ = unpack(
        bench.ask("GET", f"/api/results/{result['id']}/payload").body.decode()
    )
    states = hs.load(root / "models" / "tiny").capture(TEXT)
    assert isinstance(states, hs.States)
    assert grid.tokens == states.tokens.strings  # type: ignore[union-attr]
    norms = states.values.double().norm(dim=-1).float().numpy()
    assert (grid.measures[0].values == norms).all()  # type: ignore[union-attr]


def test_one_state_with_its_names_and_what_changes_do(
    bench: Bench, tiny_name: str
) -> None:
    cell = {"text": TEXT, "site": "layer.2", "token": 1}
    plain = bench.answer("state", tiny_name, **cell)["state"]
    assert plain["names"]["Hugging Face"] == "outputs.hidden_states[2][0, 1]"
    assert (
        plain["names"]["TransformerLens"] == 'cache["blocks.1.hook_resid_post"][0, 1]'
    )
    assert len(plain["nearest"]) == 8 and all(
        -1.001 <= one["cosine"] <= 1.001 for one in plain["nearest"]
    )
    assert {"site": "layer.2", "token": 1} not in [
        {k: one[k] for k in ("site", "token")} for one in plain["nearest"]
    ]
    assert len(plain["lens"]) == 10 and "after" not in plain
    gone = bench.answer("state", tiny_name, **cell, change={"kind": "ablate"})["state"]
    assert gone["before"] == plain["before"] != gone["after"]
    same = bench.answer(
        "state", tiny_name, **cell, change={"kind": "replace", "text": TEXT}
    )["state"]
    assert same["after"] == same["before"]  # its own state in its own place
    moved = {"kind": "steer", "toward": "a b", "away": "c d", "strength": 4.0}
    assert (
        bench.answer("state", tiny_name, **cell, change=moved)["state"]["after"]
        != plain["before"]
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"text": TEXT, "site": "layer.9", "token": 0}, "No state at layer.9"),
        ({"text": TEXT, "site": "layer.1", "token": 999}, "token 999"),
        (
            {
                "text": TEXT,
                "site": "layer.1",
                "token": 1,
                "change": {"kind": "replace"},
            },
            "no text was given",
        ),
    ],
)
def test_a_failed_job_says_why(
    bench: Bench, tiny_name: str, arguments: dict[str, Any], said: str
) -> None:
    job = bench.wait(bench.submit("state", tiny_name, **arguments).json["id"])
    assert job["state"] == "failed" and said in job["error"]


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        (
            {"analysis": "nothing", "model": {"name": "x"}, "arguments": {}},
            422,
            "analysis",
        ),
        (
            {
                "analysis": "lens",
                "model": {"name": "../x"},
                "arguments": {"texts": "x"},
            },
            422,
            "model.name",
        ),
        (
            {
                "analysis": "lens",
                "model": {"name": "/etc"},
                "arguments": {"texts": "x"},
            },
            422,
            "model.name",
        ),
        (
            {
                "analysis": "lens",
                "model": {"name": "folder:0123456789abcdef"},
                "arguments": {"texts": "x"},
            },
            422,
            "below",
        ),
        (
            {
                "analysis": "lens",
                "model": {"name": "x"},
                "arguments": {"texts": "x", "lens": "/etc/passwd"},
            },
            422,
            "lens",
        ),
        (
            {
                "analysis": "lens",
                "model": {"name": "x"},
                "arguments": {"texts": "x" * 20_001},
            },
            422,
            "20000",
        ),
        (
            {"analysis": "lens", "model": {"name": "x"}, "arguments": {"texts": ""}},
            422,
            "texts",
        ),
        (
            {
                "analysis": "lens",
                "model": {"name": "x"},
                "arguments": {"texts": "x", "k": "5"},
            },
            422,
            "k",
        ),
        (
            {
                "analysis": "probe",
                "model": {"name": "x"},
                "arguments": {"data": "nothing"},
            },
            422,
            "No dataset",
        ),
        (
            {
                "analysis": "probe",
                "model": {"name": "x"},
                "arguments": {"data": "../x.csv"},
            },
            422,
            "data",
        ),
        ([], 422, "understood"),
    ],
)
def test_a_bad_request_is_refused_in_a_sentence(
    bench: Bench, request_: Any, status: int, said: str
) -> None:
    answer = bench.ask("POST", "/api/jobs", request_)
    assert answer.status == status and said in answer.json["detail"]
    assert bench.ask("POST", "/api/jobs", b'{"x": "\\ud800"').status in (400, 422)


def test_a_model_that_cannot_be_loaded_fails_and_the_next_question_works(
    bench: Bench, tiny_name: str
) -> None:
    job = bench.wait(bench.submit("lens", "no-such/model", texts="x").json["id"])
    assert job["state"] == "failed" and "no-such/model" in job["error"]
    assert bench.answer("lens", tiny_name, texts="after that", k=1)


def test_events_follow_a_job_until_it_is_cancelled_and_the_next_question_works(
    bench: Bench, tiny_name: str
) -> None:
    bench.answer("grid", tiny_name, text="warm")
    job = bench.submit("visibility", tiny_name, **SLOW).json
    told: list[dict[str, Any]] = []
    follower = threading.Thread(
        target=lambda: [told.append(one) for one in events(bench, job["id"])]
    )
    follower.start()
    while not any(one["state"] == "running" for one in told):
        time.sleep(0.02)
    behind = bench.submit("grid", tiny_name, text="behind").json
    assert behind["state"] == "queued" and behind["waiting"] == 1
    # What is known is answered meanwhile.
    assert bench.submit("grid", tiny_name, text="warm").status == 200
    # A page that asks the same, and goes.
    assert bench.submit("visibility", tiny_name, **SLOW).json["id"] == job["id"]
    bench.ask("DELETE", f"/api/jobs/{job['id']}")
    assert bench.wait(job["id"])["state"] == "cancelled"
    follower.join()
    assert told[-1]["state"] == "cancelled"
    assert bench.wait(behind["id"])["state"] == "done"


def test_a_model_that_is_loaded_is_named_meanwhile(
    bench: Bench, tiny_name: str
) -> None:
    """In a dtype that no other test asks for, so that it is loaded now: after it is
    followed, behind another job.
    """
    before = bench.submit("visibility", tiny_name, **SLOW, seed=8).json["id"]
    request = {
        "analysis": "grid",
        "model": {"name": tiny_name, "dtype": "float16"},
        "arguments": {"text": "x"},
    }
    told = []
    for event in events(bench, bench.ask("POST", "/api/jobs", request).json["id"]):
        if not told:
            bench.ask("DELETE", f"/api/jobs/{before}")
        told.append(event)
    assert "Loading tiny" in [
        one["progress"]["what"] for one in told if one["progress"]
    ]


def events(bench: Bench, job: str) -> Iterator[dict[str, Any]]:
    """The events of a job, as they come."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", bench.settings.port, timeout=SECONDS
    )
    try:
        connection.request(
            "GET",
            f"/api/jobs/{job}/events",
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


def test_a_queued_job_is_cancelled_without_being_run(
    bench: Bench, tiny_name: str
) -> None:
    first = bench.submit("visibility", tiny_name, **SLOW, seed=1).json["id"]
    second = bench.submit("visibility", tiny_name, **SLOW, seed=2).json["id"]
    assert bench.ask("DELETE", f"/api/jobs/{second}").json["state"] == "cancelled"
    bench.ask("DELETE", f"/api/jobs/{first}")
    assert bench.wait(first)["state"] == "cancelled"


def test_a_killed_worker_fails_its_job_and_the_next_question_works(
    bench: Bench, tiny_name: str
) -> None:
    job = bench.submit("visibility", tiny_name, **SLOW, seed=3).json["id"]
    bench.wait(job, "running")
    while bench.worker.pid is None:
        time.sleep(0.02)
    os.kill(bench.worker.pid, signal.SIGKILL)
    said = bench.wait(job)
    assert said["state"] == "failed" and "killed" in said["error"]
    assert bench.answer("grid", tiny_name, text="after the kill")


@linux
def test_memory_that_runs_out_in_a_pass_is_said_and_the_same_worker_answers_next(
    bench: Bench, tiny_name: str
) -> None:
    texts = [f"{number} {'a b c d e f g h i j ' * 6}" for number in range(1_000)]
    bench.answer("profile", tiny_name, texts="warm up")
    pid = bench.worker.pid
    held = psutil.Process(pid).memory_info().vms
    # The states of the texts take twice as much.
    with limited(pid, resource.RLIMIT_AS, held + 64 * 2**20):
        job = bench.wait(bench.submit("profile", tiny_name, texts=texts).json["id"])
        assert job["state"] == "failed" and "Out of memory" in job["error"]
        assert bench.answer("grid", tiny_name, text="after memory ran out")
    assert bench.worker.pid == pid


def test_what_torch_raises_without_memory_is_explained() -> None:
    """On a CPU that is a plain RuntimeError; a GPU's has a class of its own."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58)
    assert explain_error(raised.value) == NO_MEMORY


@linux
def test_a_disk_that_fills_while_a_result_is_written_is_said_and_the_next_one_is_kept(
    bench: Bench, tiny_name: str
) -> None:
    bench.answer("grid", tiny_name, text="warm")
    folder = bench.settings.folder / "results"
    before = set(folder.iterdir())
    # The file is cut there, as on a disk that is full.
    with limited(os.getpid(), resource.RLIMIT_FSIZE, 2_000):
        job = bench.wait(
            bench.submit("grid", tiny_name, text="too much for the disk").json["id"]
        )
    assert (
        job["state"] == "done"
        and "could not be kept on disk (File too large)" in job["note"]
    )
    assert bench.ask("GET", f"/api/results/{job['result']}").status == 200
    assert set(folder.iterdir()) == before  # nothing is left of it
    kept = bench.answer("grid", tiny_name, text="after that")["id"]
    assert (folder / f"{kept}.result").exists()


@linux
def test_a_disk_that_is_full_for_the_worker_is_said_and_the_next_question_works(
    bench: Bench, tiny_name: str
) -> None:
    bench.answer("grid", tiny_name, text="warm")
    with limited(bench.worker.pid, resource.RLIMIT_FSIZE, 100):
        job = bench.wait(
            bench.submit("grid", tiny_name, text="no room to work in").json["id"]
        )
    assert job["state"] == "failed" and "The disk could not be" in job["error"]
    assert bench.answer("grid", tiny_name, text="room again")


def test_a_page_that_goes_away_ends_its_job_and_makes_room_for_the_next(
    bench: Bench, tiny_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.5)
    bench.answer("grid", tiny_name, text="warm")
    job = bench.submit("visibility", tiny_name, **SLOW, seed=5).json["id"]
    for _ in range(bench.settings.streams + 1):  # more than may follow at a time
        with socket.create_connection(("127.0.0.1", bench.settings.port)) as stream:
            head = (
                f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost:"
                f" {bench.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            )
            stream.sendall(head.encode())
            assert stream.recv(12).endswith(b"200")
    behind = bench.submit("grid", tiny_name, text="behind a page that went away").json[
        "id"
    ]
    assert bench.wait(behind)["state"] == "done"
    assert bench.ask("GET", f"/api/jobs/{job}").json["state"] == "cancelled"


def test_no_more_pages_than_allowed_follow_jobs_even_if_they_come_at_once(
    another: Callable[..., Any],
) -> None:
    with another(streams=3) as few, ExitStack() as followers:
        job = few.submit("visibility", few.folder("models/tiny"), **SLOW, seed=6).json[
            "id"
        ]
        bearer = f"Authorization: Bearer {TOKEN}\r\n\r\n"
        head = f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: {few.netloc}\r\n{bearer}".encode()
        connections = []
        for _ in range(40):
            connection = socket.create_connection(
                ("127.0.0.1", few.settings.port), timeout=SECONDS
            )
            connections.append(followers.enter_context(connection))
        for connection in connections:
            connection.sendall(head)
        statuses = [connection.recv(12)[-3:] for connection in connections]
        assert sorted(statuses) == [b"200"] * 3 + [b"429"] * 37
        followers.close()
        until = time.monotonic() + SECONDS
        status = b"429"
        while status == b"429":  # until the server knows that the others are gone
            assert time.monotonic() < until
            with socket.create_connection(
                ("127.0.0.1", few.settings.port), timeout=SECONDS
            ) as connection:
                connection.sendall(head)
                status = connection.recv(12)[-3:]
        assert status == b"200"


def test_a_job_that_is_read_once_after_its_page_went_away_is_cancelled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.2)

    async def read_once() -> jobs.JobRecord:
        worker = ModelWorker(Settings(folder=tmp_path))
        # Nothing runs the queue: the job stays in it.
        queue = jobs.Jobs(worker, ResultCache(tmp_path, 10**6), 4)
        job = queue.submit("a", {"analysis": "lens"}, {})
        async with aclosing(queue.follow(job)) as statuses:
            await anext(statuses)
        await asyncio.sleep(0.1)
        queue.get(job.id)
        while job.state == "queued":
            await asyncio.sleep(0.02)  # without reading it
        await worker.close()
        return job

    assert run_apart(read_once()).state == "cancelled"


def test_a_full_queue_a_full_disk_and_the_end_of_the_server(
    another: Callable[..., Any], tmp_path: Any
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with another(queue_length=1) as small:
        name = small.folder("models/tiny")
        first = small.submit("visibility", name, **SLOW).json["id"]
        small.wait(first, "running")
        queued = small.submit("grid", name, text="one")
        assert queued.status == 202
        full = small.submit("grid", name, text="two")
        assert full.status == 429 and "waiting already" in full.json["detail"]
        # The same question joins its job.
        assert small.submit("grid", name, text="one").json["id"] == queued.json["id"]
        small.ask("DELETE", f"/api/jobs/{first}")
        job = small.wait(queued.json["id"])
        assert job["state"] == "done" and "could not be kept" in job["note"]
        assert small.ask("GET", f"/api/results/{job['result']}").status == 200
        assert small.submit("grid", name, text="one").status == 200
        pid = small.worker.pid
    while psutil.pid_exists(pid):  # the worker does not outlive its server
        time.sleep(0.05)


def test_a_fault_of_the_server_itself_fails_one_job_and_the_queue_goes_on(
    tmp_path: Path,
) -> None:
    class Faulty:
        async def ask(self, request: Any, listener: Any) -> Any:
            raise RuntimeError("something that nobody thought of")

    async def ask_twice() -> list[jobs.JobRecord]:
        queue = jobs.Jobs(Faulty(), ResultCache(tmp_path, 10**6), 4)  # type: ignore[arg-type]
        running = asyncio.create_task(queue.run())
        asked = [queue.submit(key, {"analysis": "lens"}, {}) for key in ("a", "b")]
        for job in asked:
            async for _ in queue.follow(job):
                pass
        running.cancel()
        return asked

    for job in run_apart(ask_twice()):
        assert job.state == "failed" and "nobody thought of" in (job.error or "")


def test_a_worker_that_stops_at_the_last_moment_is_not_killed_while_it_answers_the_next_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker stops the cancelled job in the very step of the event loop in which
    its time is up.
    """
    monkeypatch.setattr(jobs, "SECONDS_TO_STOP", 0.0)

    class Slow:
        asked, killed = list[Any](), list[Any]()

        async def ask(self, request: Any, listener: Any) -> Any:
            self.asked.append(request)
            if len(self.asked) == 1:
                self.stopped = asyncio.Event()
                await self.stopped.wait()
                return {"type": "cancelled"}, b""
            await asyncio.sleep(0.05)
            return {"type": "error", "message": "answered"}, b""

        async def interrupt(self) -> None:
            asyncio.get_running_loop().call_soon(self.stopped.set)

        async def kill(self) -> None:
            self.killed.append(len(self.asked))

    async def cancel_one() -> list[jobs.JobRecord]:
        queue = jobs.Jobs(worker, ResultCache(tmp_path, 10**6), 4)  # type: ignore[arg-type]
        running = asyncio.create_task(queue.run())
        asked = [queue.submit(key, {"analysis": "lens"}, {}) for key in ("a", "b")]
        while asked[0].state != "running":
            await asyncio.sleep(0)
        await queue.cancel(asked[0])
        while asked[1].state != "failed":
            await asyncio.sleep(0.01)
        running.cancel()
        return asked

    worker = Slow()
    first, second = run_apart(cancel_one())
    assert (first.state, second.error) == ("cancelled", "answered")
    assert 2 not in worker.killed, "the second question was answered by then"


def test_a_worker_that_has_answered_is_not_killed_while_its_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SECONDS_TO_STOP", 0.0)
    is_writing = threading.Event()

    class SlowCache(ResultCache):
        def put(self, key: str, result: StoredResult) -> str:
            is_writing.set()
            time.sleep(0.3)
            return ""

    class Ready:
        killed = False

        async def ask(self, request: Any, listener: Any) -> Any:
            listener({"type": "partial", "payload_bytes": 5}, b"early data")
            return {"type": "result", "payload_bytes": 5}, b"whole data"

        async def interrupt(self) -> None:
            pass

        async def kill(self) -> None:
            self.killed = True

    async def cancel_late() -> jobs.JobRecord:
        queue = jobs.Jobs(worker, SlowCache(tmp_path, 10**6), 4)  # type: ignore[arg-type]
        running = asyncio.create_task(queue.run())
        job = queue.submit("a", {"analysis": "lens"}, {})
        while not is_writing.is_set():
            await asyncio.sleep(0.01)
        assert job.latest_partial == b"early"
        await queue.cancel(job)
        while not job.is_over:
            await asyncio.sleep(0.01)
        running.cancel()
        return job

    worker = Ready()
    job = run_apart(cancel_late())
    assert job.state == "done" and not worker.killed
    assert not job.latest_partial, "a job that is over holds no payload"


def test_the_cache_drops_what_was_not_used_for_longest(tmp_path: Any) -> None:
    cache = ResultCache(tmp_path, 3_500)
    keys = [f"{number:064x}" for number in range(4)]
    for place, key in enumerate(keys[:3]):
        assert cache.put(key, StoredResult({"request": {}}, b"p" * 1000, b"")) == ""
        os.utime(tmp_path / f"{key}.result", (place, place))
    ResultCache(tmp_path, 3_500).get(keys[0])  # used last now
    cache.put(keys[3], StoredResult({"request": {}}, b"p" * 1000, b""))
    fresh = ResultCache(tmp_path, 3_500)
    assert [fresh.get(key) is not None for key in keys] == [True, False, True, True]


def test_a_damaged_entry_counts_as_missing(tmp_path: Any) -> None:
    cache, key = ResultCache(tmp_path, 10**6), "0" * 64
    cache.put(key, StoredResult({"request": {}}, b"payload", b"data"))
    path = tmp_path / f"{key}.result"
    whole = path.read_bytes()
    assert ResultCache(tmp_path, 10**6).get(key) == StoredResult(
        {"request": {}}, b"payload", b"data"
    )
    for damaged in (whole[:-1], b"", whole.replace(b"payload", b"paXload"), b"x" * 100):
        path.write_bytes(damaged)
        assert ResultCache(tmp_path, 10**6).get(key) is None


@pytest.mark.parametrize(
    ("format_", "start"),
    [
        ("html", b"<!doctype html>"),
        ("png", b"\x89PNG"),
        ("svg", b"<?xml"),
        ("pdf", b"%PDF"),
        ("csv", b""),
        ("json", b"{"),
        ("nc", b"\x89HDF"),
    ],
)
def test_a_result_is_saved_in_every_format(
    bench: Bench, tiny_name: str, format_: str, start: bytes
) -> None:
    result = bench.answer("lens", tiny_name, texts=TEXT, k=2)
    file = bench.ask("GET", f"/api/results/{result['id']}/file?format={format_}")
    assert file.status == 200 and file.body.startswith(start) and len(file.body) > 500
    assert (
        file.headers["content-disposition"] == f'attachment; filename="lens.{format_}"'
    )


def test_a_view_and_a_measure_are_chosen_and_a_wrong_one_is_named(
    bench: Bench, tiny_name: str
) -> None:
    id_ = bench.answer("lens", tiny_name, texts=TEXT, k=2)["id"]
    pictures = {
        bench.ask("GET", f"/api/results/{id_}/file?format=png{more}").body
        for more in ("", "&measure=entropy", "&view=lines")
    }
    assert len(pictures) == 3
    wrong = bench.ask("GET", f"/api/results/{id_}/file?format=png&view=nothing")
    assert wrong.status == 422 and "there are grid" in wrong.json["detail"]
    assert bench.ask("GET", f"/api/results/{'0' * 64}/file?format=png").status == 404
    assert bench.ask("GET", f"/api/results/{id_}/file?format=exe").status == 422


def test_uploads_are_parsed_under_limits(bench: Bench) -> None:
    good = bench.ask(
        "POST",
        "/api/datasets?file=a.jsonl",
        b'{"text": "one", "label": 1}\n{"text": "two", "label": 2}\n',
    )
    assert (
        good.status == 201
        and good.json["texts"] == 2
        and good.json["labels"] == {"1": 1, "2": 1}
    )
    assert good.json["name"] in [
        one["name"] for one in bench.ask("GET", "/api/datasets").json
    ]
    for name, content, said in (
        ("a.exe", b"x", "not a known format"),
        ("a.parquet", b"PAR1", "not a known format"),
        ("a.csv", b"", "empty"),
        ("a.txt", b"x" * 20_001, "too large"),
        ("a.txt", b"x\n" * 20_001, "too large"),
        ("a.csv", b"text\n\xff\xfe\n", "a.csv"),
    ):
        answer = bench.ask("POST", f"/api/datasets?file={name}", content)
        assert answer.status == 422, (name, answer.body)
        assert said in answer.json["detail"] or name == "a.csv"


def test_states_below_the_root_are_found_and_searched(
    bench: Bench, tiny_name: str, root: Any
) -> None:
    model = hs.load(root / "models" / "tiny")
    model.capture(["The rest.", "Another one.", "The test."]).save(
        root / "kept.safetensors"
    )
    store = next(
        one
        for one in bench.ask("GET", "/api/stores").json
        if one["label"] == "kept.safetensors"
    )
    assert store["texts"] == 3 and "layer.1" in store["sites"]
    found = bench.answer(
        "store", tiny_name, store=store["name"], query="The rest.", site="layer.2", k=2
    )
    assert found["findings"]


def test_a_link_out_of_the_root_is_not_followed(
    bench: Bench, root: Any, tmp_path: Any
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (outside / "model.safetensors").write_bytes(b"")
    (root / "way-out").symlink_to(outside)
    labels = [one["label"] for one in bench.ask("GET", "/api/models").json]
    assert "models/tiny" in labels and "way-out" not in labels
