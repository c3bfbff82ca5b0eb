"""Jobs in processes of their own: workers that are killed, a cluster that loses a node,
too little memory, a Ctrl-C.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hiddenscope as hs
from hiddenscope.extract import (
    Engine,
    ExtractJob,
    JobProgress,
    compute,
    engine,
    extract,
)
from hiddenscope.store import resume_store
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.workers import WorkerProcess
from labs.chaos import kills
from labs.chaos.kills import UNIT_BYTES, files_of, texts
from labs.chaos.nodes import NOT_STARTED
from tests.places import ROOT

TEXTS = texts()
TWO = Engine(workers=2, threads=1, unit_bytes=UNIT_BYTES)


@pytest.fixture(scope="module")
def gpt2() -> hs.Model:
    return hs.load((tiny_model("gpt2"), tiny_tokenizer()))


def test_workers_give_the_same_bytes_and_one_that_stands_still_or_dies_is_replaced(
    gpt2: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PATIENCE", 0.5)
    alone = Engine(unit_bytes=UNIT_BYTES, threads=1)
    extract(gpt2, TEXTS, tmp_path / "alone", engine=alone)
    killed, bystanders = list[int](), list[subprocess.Popen[bytes]]()

    def disturb(now: JobProgress) -> None:
        # Another child, as a browser may be.
        bystanders.append(subprocess.Popen(["sleep", "600"]))
        ours = kills.workers(besides=killed)
        if now.units_done in (1, 2) and ours:
            os.kill(ours[0], signal.SIGSTOP if now.units_done == 1 else signal.SIGKILL)
            killed.append(ours[0])

    ExtractJob.plan(gpt2, TEXTS, tmp_path / "store", engine=TWO).run(disturb)
    assert len(killed) == 2
    assert files_of(tmp_path / "store") == files_of(tmp_path / "alone")
    assert kills.workers() == []
    assert [bystander.poll() for bystander in bystanders] == [None] * len(bystanders)
    for bystander in bystanders:
        bystander.kill()
        bystander.wait()


def test_a_worker_that_is_started_while_the_job_ends_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = engine.Schedule(["000000"], lambda done: None)
    started = list[WorkerProcess]()

    def start_late(log: Any) -> WorkerProcess:
        # Another worker has committed the last unit meanwhile.
        planned.done(compute.Done("000000", True))
        started.append(WorkerProcess(["-c", "import sys; sys.stdin.read()"]))
        return started[-1]

    monkeypatch.setattr(engine, "start_process", start_late)
    served = engine.Supervisor(
        planned, lambda: engine.LocalWorker({}, lambda tokens: None)
    )
    served.start()
    served.join(60)
    try:
        assert not served.is_alive() and started[0].poll() is not None
    finally:
        started[0].kill()


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells what a process has, and limits it"
)
def test_too_few_descriptors_or_too_little_memory_is_an_error_of_ours() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "tests.starved"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ended: dict[str, list[str]] = {"descriptors": [], "memory": []}
    for line in done.stdout.splitlines():
        what, _, how = line.partition(": ")
        ended[what].append(how)
    for what, error, reason in (
        ("descriptors", "FileError True", "too many files are open"),
        ("memory", "TooLarge True", "memory ran out"),
    ):
        stopped = [line for line in ended[what] if line != "done"]
        assert stopped, ended
        for line in stopped:
            assert line.startswith(error) and reason in line, ended
    assert ended["descriptors"][-1] == "done"


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_node_of_a_ray_cluster_is_killed_and_the_store_is_the_same() -> None:
    command = [sys.executable, "-m", "labs.chaos", "nodes", "--count", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.stderr.rstrip().endswith(NOT_STARTED):
        pytest.skip(
            f"{NOT_STARTED}, and a busy one may be the reason: {done.stderr[-500:]}"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nodes: 1 nodes of a Ray cluster killed" in done.stdout


def test_what_an_interrupted_command_kept_is_not_computed_again(tmp_path: Path) -> None:
    """Ctrl-C to the real command, once a unit is kept; the store is then byte for byte
    that of an undisturbed job.
    """
    tiny_model("gpt2").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "corpus.txt").write_text("\n".join(texts(150)))

    def start(folder: str) -> subprocess.Popen[str]:
        words = ["extract", tmp_path / "corpus.txt", "--model", tmp_path / "model"]
        words += ["--threads", "1", "--unit-tokens", "100", "--to", tmp_path / folder]
        command = [sys.executable, "-m", "hiddenscope", *map(str, words)]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    commits = tmp_path / "stopped" / "commits"
    process = start("stopped")
    while not commits.is_dir() or len(list(commits.glob("0*.json"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    message = process.communicate()[1]
    assert process.returncode == 130
    kept = len(list(commits.glob("0*.json")))
    units = len(resume_store(tmp_path / "stopped").plan.units)
    assert 2 <= kept < units and f"{kept:,} of {units:,} units are kept" in message
    for folder in ("stopped", "whole"):
        process = start(folder)
        assert process.communicate() and process.returncode == 0
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")
