"""The application: its parts put together, and the server that runs it."""

import asyncio
import contextlib
import mimetypes
import re
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

import hiddenscope as hs
from hiddenscope.app.cache import ResultCache
from hiddenscope.app.guard import Guard, problem
from hiddenscope.app.jobs import Jobs, ModelWorker
from hiddenscope.app.library import Library
from hiddenscope.app.routes import Desk, api
from hiddenscope.app.schemas import MODEL_NAME, SITES
from hiddenscope.app.settings import Settings
from hiddenscope.arguments import shown
from hiddenscope.errors import Error

if TYPE_CHECKING:
    import uvicorn

SHIPPED = Path(__file__).parent / "example"
# Requests at a time; beyond, uvicorn answers 503.
MAX_REQUESTS = 256

# Of a request that cannot be understood, this many problems are listed.
MAX_PROBLEMS = 5
TYPE = re.compile(r"\]$|^constrained-|^[0-9]+$")
# What the page calls these fields.
LABELS = {"a": "Text A", "b": "Text B", "name": "model"}
PREDICATES = {
    "string_too_short": "is empty",
    "too_short": "is empty",
    "string_too_long": "has more than {max_length:,} characters: shorten it, or ask in"
    " Python, which takes any length",
    "too_long": "has more than {max_length:,} entries",
    "greater_than_equal": "must be at least {ge:,.0f}, got {input}",
    "less_than_equal": "must be at most {le:,.0f}, got {input}",
    "finite_number": "must be a finite number, got {input}",
    "string_pattern_mismatch": "cannot be {input}",
    "literal_error": "must be {expected}, got {input}",
    "string_type": "must be text, got {input}",
    "int_type": "must be a whole number, got {input}",
    "int_parsing": "must be a whole number, got {input}",
    "float_type": "must be a number, got {input}",
    "bool_type": "must be true or false, got {input}",
    "missing": "is missing",
    "extra_forbidden": "is not asked for here",
    "value_error": "cannot be answered: {error}",
    "union_tag_invalid": "names an analysis that there is not",
}
PATTERNS = {
    MODEL_NAME: (
        "cannot be {input}: no model has such a name. Choose one of the list, or give a"
        " Hugging Face id such as org/name"
    ),
    SITES: "cannot be {input}: name sites such as layer.3, layer.* or final",
}


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
    _add_pages(application)

    # Every error becomes one sentence of bounded length.
    @application.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return problem(422, explain(error.errors()))

    @application.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        return problem(error.status_code, str(error.detail), error.headers)

    @application.exception_handler(Error)
    async def impossible(request: Request, error: Error) -> Response:
        return problem(422, str(error))

    return Guard(application, settings)


def server(settings: Settings) -> "uvicorn.Server":
    """Return a server for the application; it runs when its `run` is called."""
    with warnings.catch_warnings():
        # uvicorn imports a deprecated part of websockets, which is not used here.
        warnings.simplefilter("ignore", DeprecationWarning)
        import uvicorn

        config = uvicorn.Config(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            http="h11",
            # Requests are not logged: the first one has the token in its link.
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=2,
            limit_concurrency=MAX_REQUESTS,
            h11_max_incomplete_event_size=64 * 1024,
        )
    return uvicorn.Server(config)


def _add_pages(application: FastAPI) -> None:
    """Serve the page and its scripts."""
    # All files are read at the start and looked up by their whole path, so that no path
    # of a request ever reaches the disk.
    served = {}
    for room in ("app", "views"):
        for file in (files(f"hiddenscope.{room}") / "static").iterdir():
            if file.is_file():
                served[f"/{room}/static/{file.name}"] = file.read_bytes()

    @application.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(served["/app/static/index.html"], media_type="text/html")

    @application.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(b"", 204)

    @application.get("/{room}/static/{name}", include_in_schema=False)
    async def static(request: Request) -> Response:
        path = request.url.path
        if path not in served:
            raise HTTPException(404, "There is no such file.")
        media_type = mimetypes.guess_type(path)[0] or "text/plain"
        # Older systems say application/javascript.
        if media_type.endswith("javascript"):
            media_type = "text/javascript"
        return Response(served[path], media_type=media_type)


def explain(faults: Iterable[Mapping[str, Any]]) -> str:
    """Return the problems that pydantic found with a request, a sentence for each.

    >>> explain([{"type": "missing", "loc": ("body", "lens", "model"), "input": {}}])
    '“model” is missing.'
    """
    by_place: dict[str, Mapping[str, Any]] = {}
    # A value that may be of several types has a problem with each of them. A limit that
    # it exceeds says more than a type that it has not.
    for fault in sorted(faults, key=lambda fault: fault["type"].endswith("_type")):
        # Types, such as list[constrained-str], say which of several was tried.
        names = [str(part) for part in fault["loc"] if not TYPE.search(str(part))]
        # The first part says where in the request, the second which analysis.
        place = names[-1] if len(names) > 1 else ""
        by_place.setdefault(LABELS.get(place, place)[:60], fault)
    sentences = []
    for place, fault in list(by_place.items())[:MAX_PROBLEMS]:
        subject = f"“{place}”" if place else "The request"
        details = {**fault.get("ctx", {}), "input": shown(fault.get("input"))}
        words = PREDICATES.get(fault["type"], "cannot be understood")
        words = PATTERNS.get(details.get("pattern", ""), words)
        sentences.append(f"{subject} {words.format(**details)}.")
    return " ".join(sentences)
