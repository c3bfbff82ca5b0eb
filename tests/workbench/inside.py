"""A workbench inside the test's own process: no socket, and no worker process."""

import asyncio
import functools
import io
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch
from urllib.parse import unquote

from anyio.from_thread import BlockingPortal, start_blocking_portal

from hiddenscope.app import application, worker
from hiddenscope.app.cells import Models
from hiddenscope.app.jobs import Listener
from hiddenscope.app.settings import Settings
from hiddenscope.workers import Frame, Header, pack_frame, read_frame
from tests.workbench.serving import Answer, Bench, settings_in

T = TypeVar("T")


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run in a thread of its own: once a test has used a browser, Playwright's event
    loop runs in this one.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asyncio.wait_for(work, 60)).result()


def apart(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_apart(test(**fixtures))

    return run


class WorkerInside:
    """Answers a question as the worker does, in a thread of this process."""

    pid = None

    def __init__(self, settings: Settings) -> None:
        self.models = Models(settings.device)

    async def ask(self, request: Header, listener: Listener) -> Frame:
        frames: list[Frame] = []
        loop = asyncio.get_running_loop()

        def send(header: Header, body: bytes = b"") -> None:
            # Packed and read, since a pipe carries nothing but JSON and bytes.
            frame = read_frame(io.BytesIO(pack_frame(header, body)))
            assert frame is not None
            frames.append(frame)
            if header["type"] in ("progress", "partial"):
                loop.call_soon_threadsafe(listener, *frame)

        interrupts = SimpleNamespace(answering=False, writing=False, pending=False)
        server = worker._Server(SimpleNamespace(send=send), interrupts)  # type: ignore[arg-type]
        await asyncio.to_thread(worker._answer_question, request, self.models, server)
        return frames[-1]

    async def close(self) -> None:
        pass


@dataclass
class BenchInside(Bench):
    """A workbench whose application is called without a server."""

    portal: BlockingPortal

    def raw(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        pairs = list({"Host": self.netloc, **(headers or {})}.items())
        pieces = [] if body is None else [body]
        return self.portal.call(requested, self.guard, method, path, pairs, pieces)


async def requested(
    guard: Any,
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    pieces: list[bytes],
) -> Answer:
    """Send a request to an application; the body comes in these pieces."""
    bare, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(bare),
        "raw_path": bare.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), text.encode()) for name, text in headers],
    }
    waiting: list[dict[str, Any]] = []
    for piece in pieces:
        waiting.append({"type": "http.request", "body": piece, "more_body": True})
    waiting.append({"type": "http.request", "more_body": False})
    started: dict[str, Any] = {}
    body = bytearray()

    async def receive() -> dict[str, Any]:
        if not waiting:
            # The client stays until it is answered.
            await asyncio.Event().wait()
        return waiting.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        body.extend(message.get("body", b""))

    await guard(scope, receive, send)
    told = {name.decode(): value.decode() for name, value in started["headers"]}
    return Answer(started["status"], told, bytes(body))


@contextmanager
def inside(folder: Path, **options: Any) -> Iterator[BenchInside]:
    """Put a workbench together, and run its queue."""
    settings = settings_in(folder, **options)
    with patch.object(application, "ModelWorker", WorkerInside):
        guard = application.create_app(settings)
    served: Any = guard.application
    lifespan = served.router.lifespan_context(served)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(lifespan),
    ):
        yield BenchInside(settings, guard, None, portal)
