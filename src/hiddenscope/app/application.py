"""The application: its parts put together, and the server that runs it."""

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import hiddenscope as hs
from hiddenscope.app.cache import ResultCache
from hiddenscope.app.connections import Connections
from hiddenscope.app.desk import Desk
from hiddenscope.app.guard import Guard, problem_body
from hiddenscope.app.jobs import Jobs
from hiddenscope.app.library import Library
from hiddenscope.app.pages import add_pages
from hiddenscope.app.process import ModelWorker
from hiddenscope.app.refusals import explain
from hiddenscope.app.routes import api
from hiddenscope.app.settings import Settings
from hiddenscope.errors import Error

if TYPE_CHECKING:
    import uvicorn

SHIPPED = Path(__file__).parent / "example"


def create_app(settings: Settings) -> Guard:
    """Return the whole application, behind its guard."""
    # Texts and results are private to the user who started the server.
    with contextlib.suppress(OSError):
        settings.folder.mkdir(parents=True, exist_ok=True)
        settings.folder.chmod(0o700)
    worker = ModelWorker(settings)
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
        # FastAPI's pages of documentation load scripts from a CDN.
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    application.include_router(api(Desk(settings, jobs, cache, Library(settings))))
    add_pages(application)
    _add_error_handlers(application)
    return Guard(application, settings, worker)


def server(settings: Settings) -> "uvicorn.Server":
    """Return a server for the application; it runs when its `run` is called."""
    limit = _connection_limit(settings)
    with warnings.catch_warnings():
        # uvicorn imports a deprecated part of websockets, which is not used here.
        warnings.simplefilter("ignore", DeprecationWarning)
        import uvicorn

        config = uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            http=Connections(limit, settings.request_seconds),  # type: ignore[arg-type]
            # asyncio accepts that many at a time before any of them is counted.
            backlog=max(16, limit // 4),
            # Requests are not logged: the first one has the token in its link.
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=64 * 1024,
        )
    return uvicorn.Server(config)


def _connection_limit(settings: Settings) -> int:
    """Return how many connections may be open, leaving descriptors for files."""
    try:
        import resource
    # Windows has no such limit.
    except ModuleNotFoundError:
        return settings.connections
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return settings.connections
    return max(1, min(settings.connections, descriptors // 4))


def _add_error_handlers(application: FastAPI) -> None:
    """Turn every error into one sentence of bounded length."""

    @application.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _problem(422, explain(error.errors()))

    @application.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail), error.headers)

    @application.exception_handler(Error)
    async def impossible(request: Request, error: Error) -> Response:
        return _problem(422, str(error))


def _problem(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    # Half a surrogate pair, which JSON may hold, cannot be encoded.
    safe = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return Response(problem_body(safe), status, headers, media_type="application/json")
