"""The routes of the API: thin. Parse, look in the cache, queue, and send what was
found.

A job is submitted with `POST /api/jobs`; when the answer is there already, that says so
at once. Its progress is followed with server-sent events; its result has an id of its
own, under which it is found again later.
"""

import asyncio
import json
import mimetypes
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse

from hiddenscope.app.cache import KEY, ResultCache, StoredResult, key_of
from hiddenscope.app.code import Named, as_command, as_python
from hiddenscope.app.frames import Header
from hiddenscope.app.jobs import JobRecord, Jobs, QueueFull
from hiddenscope.app.library import Library
from hiddenscope.app.schemas import (
    ASKED,
    STORE_NAME,
    AnalysisAnswer,
    ColumnChoice,
    DatasetAnswer,
    JobAnswer,
    JobRequest,
    ModelAnswer,
    ModelChoice,
    Problem,
    ResultAnswer,
    StoreAnswer,
    StoreTextsAnswer,
    TableAnswer,
    analyses,
    questions_of,
)
from hiddenscope.app.settings import Settings
from hiddenscope.app.stores import read_texts, store_identity
from hiddenscope.app.tables import first_rows
from hiddenscope.errors import Error
from hiddenscope.results import Result

PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No token."},
    403: {"model": Problem, "description": "The request comes from another site."},
    404: {"model": Problem, "description": "There is no such thing."},
    413: {"model": Problem, "description": "The request is too large."},
    421: {"model": Problem, "description": "The Host header names another machine."},
    422: {
        "model": Problem,
        "description": (
            "The request cannot be understood, or asks for what there is not."
        ),
    },
}
BUSY: dict[int | str, dict[str, Any]] = {
    429: {"model": Problem, "description": "Too much is waiting already."}
}
BAD: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body is not JSON."}
}

Format: TypeAlias = Literal["html", "png", "svg", "pdf", "csv", "json", "nc"]
JobId = Annotated[str, InPath(min_length=1, max_length=40)]
ResultId = Annotated[str, InPath(pattern=f"^{KEY.pattern}$")]
QUESTIONS = {analysis.word: questions_of(analysis) for analysis in ASKED}
_EVENT = {
    "type": "object",
    "properties": {
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/JobAnswer"},
        }
    },
    "required": ["data"],
}
EVENTS = {
    "content": {"text/event-stream": {"schema": _EVENT}},
    "description": (
        "Events, each with a job as JSON in its data, until the job is over."
    ),
}


class Desk:
    """What the routes share: the library, the cache, the queue."""

    def __init__(
        self, settings: Settings, jobs: Jobs, cache: ResultCache, library: Library
    ) -> None:
        self.settings, self.jobs, self.cache, self.library = (
            settings,
            jobs,
            cache,
            library,
        )
        self.streams = 0
        self.drawing = asyncio.Semaphore(2)

    def resolved(self, asked: Header) -> tuple[str, Header]:
        """The key of a question, and the question as the worker takes it: names in
        place of ids, texts of uploads.
        """
        identities = [self.settings.device] if self.settings.device else []
        request = {**asked, "arguments": dict(asked["arguments"])}
        if "model" in asked:
            request["model"] = self._model(asked["model"], identities)
        for question in QUESTIONS.get(asked["analysis"], ()):
            value = request["arguments"].get(question.name)
            if value is not None and question.kind == "model":
                request["arguments"][question.name] = self._model(value, identities)
            elif (
                value is not None
                and question.kind == "data"
                and (upload := self.library.dataset(value))
            ):
                request["arguments"][question.name] = upload.as_argument()
        if "store" in asked:
            request["store"] = self._store(asked["store"], identities)
        if "store" in asked["arguments"]:
            request["arguments"] |= self._store(asked["arguments"]["store"], identities)
        return key_of(asked, identities), request

    def _model(self, choice: Header, identities: list[str]) -> Header:
        identity = self.library.model_identity(ModelChoice(**choice))
        identities.append(identity)
        return {
            "path": self.library.model_path(choice["name"]),
            "dtype": choice.get("dtype"),
            "identity": identity,
        }

    def _store(self, name: str, identities: list[str]) -> Header:
        path = self.library.store_path(name)
        identity = store_identity(path)
        identities.append(identity)
        return {"path": str(path), "identity": identity}

    def names(self, asked: Header) -> dict[str, Named]:
        """What the opaque names of a question stand for, in code that a person runs."""
        given = [asked["model"]["name"]] if "model" in asked else []
        for question in QUESTIONS.get(asked["analysis"], ()):
            value = asked["arguments"].get(question.name)
            if value is not None and question.kind in ("model", "data"):
                given.append(value["name"] if question.kind == "model" else value)
        names = {}
        for name in given:
            if name.startswith("folder:"):
                names[name] = Named(self.library.model_path(name))
            elif name.startswith("upload:") and (upload := self.library.dataset(name)):
                names[name] = upload.named
        store = asked.get("store") or asked["arguments"].get("store")
        if store:
            names[store] = Named(str(self.library.store_path(store)))
        return names

    def result(self, id_: str) -> StoredResult:
        """A result that was kept."""
        found = self.cache.get(id_)
        if found is None:
            raise HTTPException(
                404,
                "No such result: it was never computed here, or has been dropped. Ask"
                " again.",
            )
        return found

    def job(self, id_: str) -> JobRecord:
        """A job that is known."""
        job = self.jobs.get(id_)
        if job is None:
            raise HTTPException(
                404,
                "No such job: the server was started anew, or it is long over. Ask"
                " again.",
            )
        return job


def api(desk: Desk) -> APIRouter:
    """The routes under /api."""
    router = APIRouter(prefix="/api", responses=PROBLEMS)
    _lists(router, desk)
    _jobs(router, desk)
    _results(router, desk)
    return router


def _lists(router: APIRouter, desk: Desk) -> None:
    @router.get("/analyses")
    async def list_analyses() -> list[AnalysisAnswer]:
        """Every analysis, with its question and its parameters."""
        return analyses()

    @router.get("/models")
    def list_models() -> list[ModelAnswer]:
        """The models that can be had: of the zoo, of the local cache of the hub, and of
        folders below the root.
        """
        return desk.library.models()

    @router.get("/datasets")
    def list_datasets() -> list[DatasetAnswer]:
        """The shipped datasets, and those that were uploaded."""
        return desk.library.datasets()

    @router.post("/datasets", status_code=201, openapi_extra={"requestBody": _UPLOAD})
    async def upload_dataset(
        request: Request,
        file: Annotated[
            str,
            Query(
                min_length=1,
                max_length=200,
                description="The name of the file: its suffix counts.",
            ),
        ],
        text: Annotated[
            str | None,
            Query(min_length=1, max_length=200, description="The column of the texts."),
        ] = None,
        label: Annotated[
            str | None,
            Query(min_length=1, max_length=200, description="That of the labels."),
        ] = None,
        group: Annotated[
            str | None,
            Query(min_length=1, max_length=200, description="That of the groups."),
        ] = None,
    ) -> DatasetAnswer:
        """Upload labelled texts as .txt, .csv, .tsv or .jsonl."""
        content = await request.body()
        columns = ColumnChoice(text=text, label=label, group=group)
        return await asyncio.to_thread(desk.library.add_dataset, file, content, columns)

    @router.post("/tables", openapi_extra={"requestBody": _UPLOAD})
    async def read_table(
        request: Request,
        file: Annotated[
            str,
            Query(
                min_length=1,
                max_length=200,
                description="The name of the file: its suffix counts.",
            ),
        ],
    ) -> TableAnswer:
        """Read the columns and the first rows of a .csv, .tsv or .jsonl file; nothing
        is kept.
        """
        return await asyncio.to_thread(first_rows, file, await request.body())

    @router.get("/stores")
    def list_stores() -> list[StoreAnswer]:
        """States that were kept below the root, in files and in stores."""
        return desk.library.stores()

    @router.get("/stores/{name}/texts")
    def list_texts(
        name: Annotated[str, InPath(pattern=STORE_NAME)],
        first: Annotated[
            int, Query(ge=0, le=10**12, description="Where the page begins.")
        ] = 0,
        count: Annotated[
            int, Query(ge=1, le=100, description="How many texts it has.")
        ] = 20,
    ) -> StoreTextsAnswer:
        """The texts of kept states, a page at a time."""
        return read_texts(desk.library.store_path(name), first, count)


_UPLOAD = {
    "required": True,
    "content": {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    },
}


def _jobs(router: APIRouter, desk: Desk) -> None:
    @router.post(
        "/jobs", status_code=202, responses={200: {"model": JobAnswer}, **BUSY, **BAD}
    )
    async def submit_job(body: JobRequest, response: Response) -> JobAnswer:
        """Ask a question: 202 and a job to follow, or 200 where the result is there
        already.
        """
        asked = body.model_dump(exclude_none=True, mode="json")
        key, request = await asyncio.to_thread(desk.resolved, asked)
        if await asyncio.to_thread(desk.cache.get, key) is not None:
            response.status_code = 200
            return desk.jobs.status_of(desk.jobs.record_cached(key, asked))
        try:
            return desk.jobs.status_of(desk.jobs.submit(key, asked, request))
        except QueueFull:
            reason = (
                f"{desk.jobs.max_queued} questions are waiting already. Wait for one,"
                " or cancel one."
            )
            raise HTTPException(429, reason, headers={"Retry-After": "5"}) from None

    @router.get("/jobs/{id}")
    async def read_job(id: JobId) -> JobAnswer:  # noqa: A002
        """How a job stands."""
        return desk.jobs.status_of(desk.job(id))

    @router.delete("/jobs/{id}")
    async def cancel_job(id: JobId) -> JobAnswer:  # noqa: A002
        """Cancel a job: it is taken from the queue, or stopped."""
        job = desk.job(id)
        await desk.jobs.cancel(job)
        return desk.jobs.status_of(job)

    async def one_stream() -> AsyncIterator[None]:
        """Count a stream from the moment it is allowed until its answer has ended,
        whether or not it was read.
        """
        if desk.streams >= desk.settings.streams:
            raise HTTPException(
                429, f"{desk.streams} pages follow jobs already. Close one."
            )
        desk.streams += 1
        try:
            yield
        finally:
            desk.streams -= 1

    @router.get(
        "/jobs/{id}/events",
        response_class=StreamingResponse,
        responses={200: EVENTS, **BUSY},
        dependencies=[Depends(one_stream)],
    )
    async def follow_job(id: JobId) -> StreamingResponse:  # noqa: A002
        """Follow a job: server-sent events, each a job as JSON, until it is over."""
        return StreamingResponse(
            _events(desk, desk.job(id)), media_type="text/event-stream"
        )

    @router.get(
        "/jobs/{id}/partial", response_class=Response, responses={200: _PAYLOAD}
    )
    async def read_partial(id: JobId) -> Response:  # noqa: A002
        """The views of the last partial result, packed."""
        job = desk.job(id)
        if not job.partial_count:
            raise HTTPException(404, "This job has given no partial result.")
        return Response(job.latest_partial, media_type="text/plain")


_PAYLOAD = {
    "content": {"text/plain": {"schema": {"type": "string"}}},
    "description": "Views, packed as in the reports.",
}


async def _events(desk: Desk, job: JobRecord) -> AsyncIterator[str]:
    async with aclosing(desk.jobs.follow(job)) as statuses:
        async for status in statuses:
            yield (
                ": still there\n\n"
                if status is None
                else f"data: {status.model_dump_json()}\n\n"
            )


def _results(router: APIRouter, desk: Desk) -> None:
    @router.get("/results/{id}")
    def read_result(id: ResultId) -> ResultAnswer:  # noqa: A002
        """A result: its title, findings, views, sections, and the code that makes it."""
        header = desk.result(id).header
        asked = header["request"]
        try:
            names = desk.names(asked)
        except Error:  # what it was made of is gone
            names = {}
        command = as_command(asked, names)
        return ResultAnswer(
            id=id,
            analysis=asked["analysis"],
            model=ModelChoice(**asked["model"]) if "model" in asked else None,
            title=header.get("title", asked["analysis"]),
            findings=header.get("findings", []),
            views=header.get("views", []),
            sections=header.get("sections", []),
            python=as_python(asked, names),
            command=command.text,
            command_reason=command.reason,
            state=header.get("state"),
            continuation=header.get("continuation"),
            answers=header.get("answers"),
            columns=header.get("columns", []),
            other_columns=header.get("other_columns", []),
            nearest=header.get("nearest", []),
        )

    @router.get(
        "/results/{id}/payload", response_class=Response, responses={200: _PAYLOAD}
    )
    def read_payload(id: ResultId) -> Response:  # noqa: A002
        """The views of a result, packed as in the reports."""
        return Response(desk.result(id).payload, media_type="text/plain")

    @router.get("/results/{id}/file", response_class=Response, responses={200: _FILE})
    async def read_file(
        id: ResultId,  # noqa: A002
        format: Format,  # noqa: A002
        view: Annotated[
            str,
            Query(
                max_length=60, description="For png, svg and pdf: which view, or all."
            ),
        ] = "",
        measure: Annotated[
            str,
            Query(
                max_length=200, description="For png, svg and pdf: a measure of a grid."
            ),
        ] = "",
    ) -> Response:
        """A result as a file."""
        stored = await asyncio.to_thread(desk.result, id)
        if not stored.data:
            raise HTTPException(
                422,
                "One state cannot be saved as a result. Copy its Python code instead.",
            )
        async with desk.drawing:
            content = await asyncio.to_thread(_file, stored, format, view, measure)
        name = f"{stored.header['request']['analysis']}.{format}"
        headers = {
            "content-disposition": f'attachment; filename="{name}"',
            "content-security-policy": "sandbox",
        }
        return Response(content, media_type=MEDIA_TYPES[format], headers=headers)


MEDIA_TYPES: dict[Format, str] = {
    "html": "text/html",
    "png": "image/png",
    "svg": "image/svg+xml",
    "pdf": "application/pdf",
    "csv": "text/csv",
    "json": "application/json",
    "nc": "application/x-netcdf",
}
_FILE = {
    "content": {
        media_type: {
            "schema": (
                {"type": "object"}
                if media_type.endswith("json")
                else {"type": "string"}
            )
        }
        for media_type in MEDIA_TYPES.values()
    },
    "description": "The file.",
}


def _file(stored: StoredResult, format_: str, view: str, measure: str) -> bytes:
    with TemporaryDirectory(prefix="hiddenscope-") as folder:
        kept, made = (
            Path(folder, f"kept{stored.suffix}"),
            Path(folder, f"made.{format_}"),
        )
        if made.suffix == kept.suffix:
            return stored.data
        kept.write_bytes(stored.data)
        look = (
            {"view": view, "measure": measure}
            if format_ in ("png", "svg", "pdf")
            else {}
        )
        Result.load(kept).save(made, **look)  # type: ignore[arg-type]
        return made.read_bytes()


def pages(application: FastAPI) -> None:
    """The page and its scripts: every file is read when the server starts, and nothing
    else is ever served.
    """
    served = {
        f"/{room}/static/{name}": content
        for room in ("app", "views")
        for name, content in _static(room)
    }
    index = served["/app/static/index.html"]

    @application.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(index, media_type="text/html")

    @application.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(b"", 204)

    @application.get("/{room}/static/{name}", include_in_schema=False)
    async def static(request: Request) -> Response:
        content = served.get(request.url.path)
        if content is None:
            raise HTTPException(404, "There is no such file.")
        kind = mimetypes.guess_type(request.url.path)[0] or "text/plain"
        return Response(
            content,
            media_type="text/javascript" if kind.endswith("javascript") else kind,
        )


def _static(room: str) -> list[tuple[str, bytes]]:
    folder = files(f"hiddenscope.{room}") / "static"
    return [
        (file.name, file.read_bytes()) for file in folder.iterdir() if file.is_file()
    ]


def said(problem: str) -> bytes:
    """A problem as the body of an answer."""
    return json.dumps({"detail": problem}).encode()
