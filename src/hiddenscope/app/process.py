"""The worker process as the server sees it: started when it is first needed, asked,
interrupted, and started again.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import TypeAlias

from hiddenscope.app.frames import LENGTHS, Header, frame, lengths
from hiddenscope.app.settings import Settings

SECONDS_TO_STOP = 3.0

Listener: TypeAlias = Callable[[Header, bytes], None]


class WorkerLost(Exception):
    """The worker ended before it had answered."""


class WorkerProcess:
    """One worker; a question at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hiddenscope-worker-")

    @property
    def pid(self) -> int | None:
        """Its process id, while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def ask(self, request: Header, listener: Listener) -> tuple[Header, bytes]:
        """Send a question and wait for the answer; what comes before it goes to the
        listener.
        """
        process = await self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(frame(request))
            await process.stdin.drain()
            while True:
                header, body = await self._next(process)
                if header.get("leaving"):
                    # Or the next question would go to a process that ends.
                    await self._kill()
                if header["type"] in ("result", "error", "cancelled"):
                    return header, body
                listener(header, body)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            await self._kill()
            raise WorkerLost(self._reason(process, error)) from error

    async def interrupt(self) -> None:
        """Stop what it does: by an interrupt, and where that does not help within
        seconds, by a kill.
        """
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)

    async def kill(self) -> None:
        """End it at once, with the processes that it started."""
        await self._kill()

    async def close(self) -> None:
        """End it when the server ends."""
        await self._kill()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            # It begins in an empty folder, so that no name from a page is ever the path
            # of a file; -P keeps that folder off the path of imports. A session of its
            # own lets a terminal's Ctrl-C end the server alone.
            self._process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-P", "-m", "hiddenscope.app.worker"],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if self.settings.debug else asyncio.subprocess.DEVNULL,
                cwd=self._folder.name,
                env=os.environ | {"HIDDENSCOPE_APP_DEVICE": self.settings.device or ""},
                start_new_session=True,
            )
        return self._process

    async def _next(self, process: asyncio.subprocess.Process) -> tuple[Header, bytes]:
        assert process.stdout is not None
        start = await process.stdout.readexactly(LENGTHS.size)
        header, body = lengths(start, self.settings.result_bytes)
        return json.loads(
            await process.stdout.readexactly(header)
        ), await process.stdout.readexactly(body)

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._process = None

    def _reason(self, process: asyncio.subprocess.Process, error: Exception) -> str:
        if isinstance(error, ValueError):
            most = self.settings.result_bytes
            return (
                f"The result is too large: at most {most:,} bytes. Ask for fewer texts,"
                " tokens or sites."
            )
        code = process.returncode
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return (
                "The worker was killed, most likely because memory ran out. Ask for"
                " less, or use a smaller model."
            )
        if code is not None and code < 0:
            return (
                f"The worker crashed ({signal.Signals(-code).name}). The next question"
                " starts a new one."
            )
        return (
            f"The worker ended (exit code {code}). The next question starts a new one."
        )
