"""The worker process: it has torch and the models, and answers questions over pipes.

It ends when its stdin closes, so that no worker outlives its server. A SIGINT cancels
the question that is being answered. While a frame is written, the interrupt waits;
between two questions it is ignored.
"""

import os
import queue
import signal
import sys
import threading
import time
import traceback
from types import FrameType

from hiddenscope import progress
from hiddenscope.app.cache import StoredResult
from hiddenscope.app.cells import Models, in_page
from hiddenscope.app.questions import answer
from hiddenscope.errors import Error, is_out_of_memory, was_interrupted
from hiddenscope.files import disk_remedy
from hiddenscope.workers import Channel, Header, parent_channel

# Between two reports of progress: a page cannot show more than that.
REPORT_SECONDS = 0.05

NO_MEMORY = (
    "Out of memory: the model or the texts are too large for this machine. Ask for"
    " fewer texts or a smaller model."
)


class _Interrupts:
    """Turns SIGINT into KeyboardInterrupt, but only while a question is answered."""

    def __init__(self) -> None:
        self.answering = False
        self.writing = False
        self.pending = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, stack: FrameType | None) -> None:
        if not self.answering:
            return
        # Half a frame would make everything after it unreadable.
        if self.writing:
            self.pending = True
        else:
            raise KeyboardInterrupt


class _Server:
    """Sends messages to the server, each of them whole."""

    def __init__(self, channel: Channel, interrupts: _Interrupts) -> None:
        self.channel = channel
        self.interrupts = interrupts
        self._last_report = 0.0
        self._last_task = ""

    def send(self, header: Header, body: bytes = b"") -> None:
        """Send a message, then raise an interrupt that came meanwhile."""
        self.interrupts.writing = True
        try:
            self.channel.send(header, body)
        finally:
            self.interrupts.writing = False
        # Signals are for the main thread, and so is the exception.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self.interrupts.pending and in_main_thread:
            self.interrupts.pending = False
            raise KeyboardInterrupt

    def send_answer(self, message: str, content: StoredResult) -> None:
        """Send a result, or a partial one."""
        header, body = content.joined()
        self.send({**header, "type": message}, body)

    def send_progress(self, task: str, done: float, total: float | None) -> None:
        """Send progress, unless the last report of this task was a moment ago."""
        now = time.monotonic()
        if task == self._last_task and now - self._last_report <= REPORT_SECONDS:
            return
        self._last_task = task
        self._last_report = now
        self.send(
            {"type": "progress", "what": task[:200], "done": done, "total": total}
        )


def main() -> None:
    """Answer questions until stdin closes."""
    interrupts = _Interrupts()
    channel = parent_channel()
    server = _Server(channel, interrupts)
    questions: queue.Queue[Header] = queue.Queue()
    threading.Thread(target=_listen, args=(channel, questions), daemon=True).start()
    models = Models(os.environ.get("HIDDENSCOPE_APP_DEVICE") or None)
    while True:
        _answer_question(questions.get(), models, server)


def _listen(channel: Channel, questions: "queue.Queue[Header]") -> None:
    """Queue questions; end this process when the server has ended."""
    while (frame := channel.receive()) is not None:
        questions.put(frame.header)
    # As the leader of its session, it ends its own subprocesses too.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _answer_question(request: Header, models: Models, server: _Server) -> None:
    interrupts = server.interrupts
    modules_before = len(sys.modules)
    try:
        interrupts.answering = True
        try:
            with progress.sent_to(server.send_progress):
                result = answer(
                    request, models, lambda early: server.send_answer("partial", early)
                )
        finally:
            interrupts.answering = False
            interrupts.pending = False
        server.send_answer("result", result)
    except KeyboardInterrupt:
        interrupts.answering = False
        # An interrupted import leaves a module in pieces, so start again without it.
        _cancel(server, leaving=len(sys.modules) != modules_before)
    except Error as error:
        server.send({"type": "error", "message": in_page(error)})
    except Exception as error:
        traceback.print_exc()
        if was_interrupted(error):
            _cancel(server, leaving=True)
        else:
            server.send({"type": "error", "message": explain_error(error)})


def _cancel(server: _Server, *, leaving: bool) -> None:
    """Say that the question was cancelled, and end where this process is damaged."""
    server.send({"type": "cancelled", "leaving": leaving})
    if leaving:
        os._exit(0)


def explain_error(error: Exception) -> str:
    """Return what went wrong, in a sentence for the page."""
    if is_out_of_memory(error):
        return NO_MEMORY
    if isinstance(error, OSError) and (remedy := disk_remedy(error)):
        reason = error.strerror or error
        return f"The disk could not be read or written: {reason}. {remedy}"
    return f"Unexpectedly, {type(error).__name__}: {str(error)[:500]}"


if __name__ == "__main__":
    main()
