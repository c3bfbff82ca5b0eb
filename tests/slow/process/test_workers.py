"""Worker processes: they answer, they end, and nothing is left behind."""

import os

import psutil
import pytest

from hiddenscope.workers import WorkerProcess

ECHO = """
import os
from hiddenscope.workers import parent_channel
channel = parent_channel()
print("a line that a library prints")
while (frame := channel.receive()) is not None:
    channel.send({**frame.header, "pid": os.getpid()}, frame.body)
"""
PARENT = """
import subprocess, time
from hiddenscope.workers import parent_channel
channel = parent_channel()
channel.send({"child": subprocess.Popen(["sleep", "600"]).pid})
time.sleep(600)
"""


def test_a_worker_answers_and_ends_when_its_pipe_is_closed() -> None:
    worker = WorkerProcess(["-c", ECHO])
    worker.send({"number": 1}, b"body")
    frame = worker.receive()
    assert frame == ({"number": 1, "pid": worker.pid}, b"body")
    worker.close_outgoing()
    assert worker.receive() is None
    assert worker.wait(60) == 0
    worker.close()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups")
def test_killing_a_worker_ends_what_it_has_started() -> None:
    worker = WorkerProcess(["-c", PARENT])
    frame = worker.receive()
    assert frame is not None
    child = psutil.Process(frame.header["child"])
    worker.kill()
    assert worker.wait(60) == -9
    assert worker.receive() is None
    # The exit code has been collected: another process may have the id by now.
    worker.kill()
    worker.close()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive
