"""The workbench: a local web app over every analysis. `hiddenscope serve` starts it.

settings    where it listens, its limits
guard       who may come in: Host, token, Origin, size
connections how many clients there may be, and how long one may keep the server waiting
schemas     requests and answers, generated from the signatures of the analyses
routes      the API, and the page
jobs        the queue, one model job at a time
process     the worker process, as the server sees it
worker      the worker process itself, which has torch
questions   what the worker answers
frames      how the two talk
cache       results once computed, on disk
library     the models, datasets and states to choose from
stores      what kept states hold, and their texts
code        a question as Python, and as a command

The server imports no torch.
"""

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import hiddenscope as hs
from hiddenscope.app.cache import ResultCache
from hiddenscope.app.connections import Connections
from hiddenscope.app.guard import Guard
from hiddenscope.app.jobs import Jobs
from hiddenscope.app.library import Library
from hiddenscope.app.process import WorkerProcess
from hiddenscope.app.routes import Desk, api, pages, said
from hiddenscope.app.settings import Settings
from hiddenscope.errors import Error
from hiddenscope.views import render

if TYPE_CHECKING:
    import uvicorn

__all__ = ["Settings", "create", "server"]

SHIPPED = Path(__file__).parent / "example"
assert render  # importing it lets results find their pages and figures


def create(settings: Settings) -> Guard:
    """The whole application, behind its guard."""
    with contextlib.suppress(OSError):
        settings.folder.mkdir(parents=True, exist_ok=True)
        settings.folder.chmod(0o700)  # texts and results are their owner's alone
    worker = WorkerProcess(settings)
    cache = ResultCache(settings.folder / "results", settings.cache_bytes, SHIPPED)
    jobs = Jobs(worker, cache, settings.queue_length)

    @contextlib.asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(jobs.run())
        try:
            yield
        finally:
            running.cancel()
            await worker.close()

    application = FastAPI(
        title="hiddenscope",
        version=hs.__version__,
        summary="Every question of hiddenscope, asked over HTTP.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # its pages come from a CDN
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    application.include_router(api(Desk(settings, jobs, cache, Library(settings))))
    pages(application)
    _problems(application)
    guard = Guard(application, settings)
    guard.worker = worker
    return guard


def server(settings: Settings) -> "uvicorn.Server":
    """The server that runs the application; it logs no requests, so that no token is
    ever in a log.
    """
    limit = _most_connections(settings)
    with warnings.catch_warnings():
        # Of a library for sockets that is not used.
        warnings.simplefilter("ignore", DeprecationWarning)
        import uvicorn

        config = uvicorn.Config(
            create(settings),
            host=settings.host,
            port=settings.port,
            http=Connections(limit, settings.request_seconds),  # type: ignore[arg-type]
            # asyncio accepts so many at a time before any of them is counted.
            backlog=max(16, limit // 4),
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=64 * 1024,
        )
    return uvicorn.Server(config)


def _most_connections(settings: Settings) -> int:
    """How many connections may be open, so that most descriptors are left for files and
    for the worker.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return settings.connections
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return settings.connections
    return max(1, min(settings.connections, descriptors // 4))


def _problems(application: FastAPI) -> None:
    """Every refusal is one sentence, and nothing that was sent comes back in it."""

    @application.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        parts = [_problem(one) for one in error.errors()[:5]]
        return _answer(
            422, "The request cannot be understood. " + "; ".join(parts) + "."
        )

    @application.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _answer(error.status_code, str(error.detail), dict(error.headers or {}))

    @application.exception_handler(Error)
    async def ours(request: Request, error: Error) -> Response:
        return _answer(422, str(error))


def _problem(error: Any) -> str:
    """What is wrong with one part of a request; both its name and what is said of it
    may hold what was sent.
    """
    place = ".".join(str(step) for step in error["loc"][1:])[:200] or "body"
    return f"{place}: {error['msg'][:300]}"


def _answer(
    status: int, problem: str, headers: dict[str, str] | None = None
) -> Response:
    safe = problem.encode("utf-8", "backslashreplace").decode("utf-8")
    return Response(said(safe), status, headers, media_type="application/json")
