"""The worker process as the server sees it: started on demand, asked, interrupted,
started again.
"""

import asyncio
import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from hiddenscope.app.settings import Settings
from hiddenscope.workers import Frame, Header, WorkerProcess

# How long an interrupted worker may go on before it is killed.
SECONDS_TO_STOP = 3.0
FINAL_MESSAGES = ("result", "error", "cancelled")

Listener: TypeAlias = Callable[[Header, bytes], None]


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
        process = self._start_if_needed()
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

    def _start_if_needed(self) -> WorkerProcess:
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
        return self._process

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
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"The worker crashed ({name}). The next question starts a new one."
        return (
            f"The worker ended (exit code {code}). The next question starts a new one."
        )
