"""Questions over HTTP to a real worker process: progress, cancelling, and what happens
when things break.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

import hiddenscope as hs
from hiddenscope.app import jobs
from tests.workbench.asking import SLOW
from tests.workbench.serving import SECONDS, TOKEN, Bench, limited, linux

if sys.platform == "linux":
    import resource


def events(bench: Bench, job: str) -> Iterator[dict[str, Any]]:
    """The events of a job, as they come."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", bench.settings.port, timeout=SECONDS
    )
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    try:
        connection.request("GET", f"/api/jobs/{job}/events", headers=bearer)
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


def following(bench: Bench, job: str) -> socket.socket:
    """A connection that follows a job; its answer is yet to be read."""
    address = ("127.0.0.1", bench.settings.port)
    connection = socket.create_connection(address, timeout=SECONDS)
    asked = f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: {bench.netloc}\r\n"
    connection.sendall(f"{asked}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
    return connection


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
    bench.ask("DELETE", f"/api/jobs/{job['id']}")
    assert bench.wait(job["id"])["state"] == "cancelled"
    follower.join()
    assert told[-1]["state"] == "cancelled"
    assert bench.wait(behind["id"])["state"] == "done"


def test_a_cancelled_fit_leaves_what_others_put_there_and_nothing_of_its_own(
    bench: Bench, store: hs.Store, tiny_name: str
) -> None:
    assert bench.settings.root is not None
    folder = bench.settings.root / "dictionaries" / "cancelled"
    arguments = {"to": folder.name, "site": "layer.2", "tokens": 10_000_000}
    on = bench.store("corpora/states")
    job = bench.submit("fit", None, on=on, **arguments, features=1000).json["id"]
    while (bench.ask("GET", f"/api/jobs/{job}").json["progress"] or {}).get(
        "what"
    ) != "Training":
        time.sleep(0.02)
    folder.mkdir()
    (folder / "notes").write_text("somebody's")
    bench.ask("DELETE", f"/api/jobs/{job}")
    assert bench.wait(job)["state"] == "cancelled"
    assert [path.name for path in folder.parent.iterdir()] == ["cancelled"]
    assert (folder / "notes").read_text() == "somebody's"
    shutil.rmtree(folder)
    assert bench.answer("grid", tiny_name, text="after a fit")


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
        job = bench.over("profile", tiny_name, texts=texts)
        assert job["state"] == "failed" and "Out of memory" in job["error"]
        assert bench.answer("grid", tiny_name, text="after memory ran out")
    assert bench.worker.pid == pid


@linux
def test_a_disk_that_fills_while_a_result_is_written_is_said_and_the_next_one_is_kept(
    bench: Bench, tiny_name: str
) -> None:
    bench.answer("grid", tiny_name, text="warm")
    folder = bench.settings.folder / "results"
    before = set(folder.iterdir())
    # The file is cut there, as on a disk that is full.
    with limited(os.getpid(), resource.RLIMIT_FSIZE, 2_000):
        job = bench.over("grid", tiny_name, text="too much for the disk")
    assert job["state"] == "done"
    assert "could not be kept on disk (File too large)" in job["note"]
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
        job = bench.over("grid", tiny_name, text="no room to work in")
    assert job["state"] == "failed" and "The disk could not be" in job["error"]
    assert bench.answer("grid", tiny_name, text="room again")


def test_a_page_that_goes_away_ends_its_job_and_makes_room_for_the_next(
    bench: Bench, tiny_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.5)
    bench.answer("grid", tiny_name, text="warm")
    job = bench.submit("visibility", tiny_name, **SLOW, seed=5).json["id"]
    for _ in range(bench.settings.streams + 1):  # more than may follow at a time
        with following(bench, job) as stream:
            assert stream.recv(12).endswith(b"200")
    behind = bench.over("grid", tiny_name, text="behind a page that went away")
    assert behind["state"] == "done"
    assert bench.ask("GET", f"/api/jobs/{job}").json["state"] == "cancelled"


def test_no_more_pages_than_allowed_follow_jobs_and_no_worker_outlives_its_server(
    another: Callable[..., Any],
) -> None:
    with another(streams=3) as few:
        name = few.folder("models/tiny")
        job = few.submit("visibility", name, **SLOW, seed=6).json["id"]
        with ExitStack() as stack:
            pages = [stack.enter_context(following(few, job)) for _ in range(40)]
            statuses = [page.recv(12)[-3:] for page in pages]
            assert sorted(statuses) == [b"200"] * 3 + [b"429"] * 37
        until = time.monotonic() + SECONDS
        status = b"429"
        while status == b"429":  # until the server knows that the others are gone
            assert time.monotonic() < until
            with following(few, job) as page:
                status = page.recv(12)[-3:]
        assert status == b"200"
        few.wait(job, "running")
        pid = few.worker.pid
        assert pid is not None
    while psutil.pid_exists(pid):
        time.sleep(0.05)
