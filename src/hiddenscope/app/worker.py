"""The worker process: it has torch and the models, and answers one question after
another over pipes.

It ends when its stdin closes, so that no worker outlives its server. An interrupt
(SIGINT) cancels the question that it answers; while it writes a frame, or waits for a
question, an interrupt waits or is forgotten.
"""

import errno
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import IO, Any

from hiddenscope import progress
from hiddenscope.app.frames import Header, frame, read_frame
from hiddenscope.app.questions import AnswerBytes, Models, answer
from hiddenscope.errors import Error, is_out_of_memory

SECONDS_BETWEEN = 0.05  # of two notes of progress


class _Interrupts:
    """Turns SIGINT into KeyboardInterrupt while a question is answered, and at no other
    time.
    """

    def __init__(self) -> None:
        self.answering = self.writing = self.waiting = False
        signal.signal(signal.SIGINT, self._came)

    def _came(self, number: int, stack: Any) -> None:
        if self.answering and self.writing:
            self.waiting = True
        elif self.answering:
            raise KeyboardInterrupt


class _Pipe:
    """Writes whole frames."""

    def __init__(self, stream: IO[bytes], interrupts: _Interrupts) -> None:
        self.stream, self.interrupts, self.lock = stream, interrupts, threading.Lock()

    def send(self, header: Header, body: bytes = b"") -> None:
        self.interrupts.writing = True
        try:
            with self.lock:
                self.stream.write(frame(header, body))
                self.stream.flush()
        finally:
            self.interrupts.writing = False
        if (
            self.interrupts.waiting
            and threading.current_thread() is threading.main_thread()
        ):
            self.interrupts.waiting = False
            raise KeyboardInterrupt

    def send_answer(self, kind: str, given: AnswerBytes) -> None:
        self.send(
            {**given.header, "type": kind, "payload_bytes": len(given.payload)},
            given.payload + given.data,
        )


class _Sink:
    """Sends progress, but not more often than anybody can read."""

    def __init__(self, pipe: _Pipe) -> None:
        self.pipe, self.last, self.what = pipe, 0.0, ""

    def __call__(self, what: str, done: float, total: float | None) -> None:
        now = time.monotonic()
        if what != self.what or now - self.last > SECONDS_BETWEEN:
            self.what, self.last = what, now
            self.pipe.send(
                {"type": "progress", "what": what[:200], "done": done, "total": total}
            )


def main() -> None:
    """Answer questions until stdin closes."""
    interrupts = _Interrupts()
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between frames
    pipe = _Pipe(own, interrupts)
    questions: queue.Queue[Header] = queue.Queue()
    threading.Thread(target=_listen, args=(questions,), daemon=True).start()
    models = Models(os.environ.get("HIDDENSCOPE_APP_DEVICE") or None)
    while True:
        _answer_one(_next(questions), models, pipe, interrupts)


def _next(questions: "queue.Queue[Header]") -> Header:
    while True:
        try:
            return questions.get(timeout=3600)
        except queue.Empty:
            continue


def _listen(questions: "queue.Queue[Header]") -> None:
    while (read := read_frame(sys.stdin.buffer)) is not None:
        questions.put(read[0])
    os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(0)


def _answer_one(
    request: Header, models: Models, pipe: _Pipe, interrupts: _Interrupts
) -> None:
    modules = len(sys.modules)
    try:
        interrupts.answering = True
        try:
            with progress.sent_to(_Sink(pipe)):
                found = answer(
                    request, models, lambda early: pipe.send_answer("partial", early)
                )
        finally:
            interrupts.answering = interrupts.waiting = False
        pipe.send_answer("result", found)
    except KeyboardInterrupt:
        interrupts.answering = False
        # An interrupted import leaves modules in pieces.
        leaving = len(sys.modules) != modules
        pipe.send({"type": "cancelled", "leaving": leaving})
        if leaving:
            os._exit(0)
    except Error as error:
        pipe.send(
            {"type": "error", "message": str(error), "kind": type(error).__name__}
        )
    except Exception as error:
        traceback.print_exc()
        name, message, interrupted = (
            type(error).__name__,
            explained(error),
            _was_interrupted(error),
        )
        # The import of something was interrupted.
        cancelled = {
            "type": "cancelled",
            "leaving": True,
        }
        pipe.send(
            cancelled
            if interrupted
            else {"type": "error", "message": message, "kind": name}
        )
        if interrupted:
            os._exit(0)


NO_MEMORY = (
    "Out of memory: the model or the texts are too large for this machine. Ask for"
    " fewer texts or a smaller model."
)


NO_DISK = (
    "The disk could not be read or written ({}). Free some space on it, and ask again."
)


def explained(error: Exception) -> str:
    """Return what went wrong, as the page says it."""
    if is_out_of_memory(error):
        return NO_MEMORY
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EIO,
    ):
        return NO_DISK.format(os.strerror(error.errno))
    return f"Unexpectedly, {type(error).__name__}: {str(error)[:500]}"


def _was_interrupted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    main()
