"""The worker as it explains itself and heeds an interrupt, and the settings of a
server.
"""

import errno
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hiddenscope.app import worker
from hiddenscope.app.jobs import ModelWorker
from hiddenscope.app.settings import Settings
from hiddenscope.app.worker import NO_MEMORY, _Interrupts, _Server, explain_error
from hiddenscope.cli import main as cli
from hiddenscope.cli.machine import _listener
from tests.workbench.inside import run_apart


class Pipe:
    """Keeps what is sent; `meanwhile` happens while a message is on its way."""

    def __init__(self, meanwhile: Any = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.meanwhile = meanwhile

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        if self.meanwhile is not None:
            self.meanwhile()
        self.sent.append(header)


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> _Interrupts:
    """What heeds a SIGINT, which here is a call."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return _Interrupts()


def test_an_interrupt_cancels_a_question_and_waits_while_a_message_is_written(
    interrupts: _Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a message would make everything after it unreadable."""

    def interrupt() -> None:
        interrupts._handle(signal.SIGINT, None)

    interrupt()  # between two questions, nothing happens
    interrupts.answering = True
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    pipe = Pipe(interrupt)
    server = _Server(pipe, interrupts)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        server.send({"type": "progress"})
    assert pipe.sent == [{"type": "progress"}]
    assert not interrupts.pending and not interrupts.writing
    # Of one task, progress is not told more often than a page can show.
    pipe.meanwhile = None
    with monkeypatch.context() as patch:
        patch.setattr(worker.time, "monotonic", lambda: 10.0)
        for task in ("a" * 300, "a" * 300, "b"):
            server.send_progress(task, 1, None)
    assert [header["what"] for header in pipe.sent[1:]] == ["a" * 200, "b"]
    pipe.meanwhile = interrupt
    # In another thread the message goes, and the main one is told later.
    thread = threading.Thread(target=server.send, args=({"type": "partial"},))
    thread.start()
    thread.join()
    assert pipe.sent[-1] == {"type": "partial"} and interrupts.pending


def test_a_cancelled_question_is_said_and_a_damaged_worker_leaves(
    interrupts: _Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that was interrupted leaves a module in pieces, and libraries turn the
    interrupt into an error of their own.
    """
    left: list[int] = []
    monkeypatch.setattr(worker.os, "_exit", left.append)
    monkeypatch.setattr(worker.traceback, "print_exc", lambda: None)
    pipe = Pipe()

    def ask(error: BaseException) -> dict[str, Any]:
        def answer(*given: Any) -> Any:
            raise error

        monkeypatch.setattr(worker, "answer", answer)
        worker._answer_question({}, None, _Server(pipe, interrupts))  # type: ignore[arg-type]
        assert not interrupts.answering
        return pipe.sent[-1]

    assert ask(KeyboardInterrupt()) == {"type": "cancelled", "leaving": False}
    assert left == []
    in_an_import = ImportError("half a module")
    in_an_import.__cause__ = KeyboardInterrupt()
    assert ask(in_an_import) == {"type": "cancelled", "leaving": True}
    assert left == [0]
    assert ask(ImportError("no module"))["message"] == (
        "Unexpectedly, ImportError: no module"
    )


def test_what_goes_wrong_is_explained() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58)  # on a CPU that is a plain RuntimeError
    assert explain_error(raised.value) == NO_MEMORY
    full = explain_error(OSError(errno.ENOSPC, "full"))
    assert full.startswith("The disk could not be") and "is full: free" in full
    unknown = explain_error(ValueError("x" * 1_000))
    assert unknown == f"Unexpectedly, ValueError: {'x' * 500}"


def test_a_worker_that_is_lost_is_explained(tmp_path: Path) -> None:
    lost = ModelWorker(Settings(folder=tmp_path, result_bytes=1_000))

    def explain(code: int | None, error: Exception | None = None) -> str:
        process: Any = SimpleNamespace(poll=lambda: code)
        return lost._explain_loss(process, error or EOFError())

    assert "at most 1,000 bytes" in explain(None, ValueError("too large"))
    for code in (-signal.SIGKILL, -signal.SIGTERM):
        assert "most likely because memory ran out" in explain(code)
    assert "The worker crashed (SIGSEGV)" in explain(-signal.SIGSEGV)
    assert "The worker ended (exit code 3)" in explain(3)
    assert lost.pid is None
    run_apart(lost.close())


def test_a_server_listens_here_unless_it_is_told_otherwise() -> None:
    assert Settings(host="::1", port=1).address == "http://[::1]:1/"
    assert Settings().address == "http://127.0.0.1:8765/"
    first, second = Settings(), Settings()
    secrets = {first.token, first.ticket, second.token, second.ticket}
    assert len(secrets) == 4 and not any(secret in repr(first) for secret in secrets)
    done = CliRunner().invoke(cli.app, ["serve", "--host", "0.0.0.0", "--no-open"])
    assert done.exit_code == 2 and "--remote" in done.stderr
    # Two servers that start at once have two ports.
    with _listener("127.0.0.1", 8800) as one, _listener("127.0.0.1", 8800) as other:
        assert one.getsockname() != other.getsockname()
