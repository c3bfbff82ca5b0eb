"""Routes: the API. Each route parses a request, asks the desk, and sends the answer.
The desk is what routes share; it turns a request into a question for the worker.

A job is submitted with `POST /api/jobs`, which says at once where the result is cached
already. Its progress is followed with server-sent events. Its result has an id of its
own, under which it can be read later.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse

from hiddenscope.app.cache import KEY, ResultCache, StoredResult, key_of
from hiddenscope.app.code import Named, as_command, as_python, store_of
from hiddenscope.app.jobs import JobRecord, Jobs, QueueFull
from hiddenscope.app.library import Library, read_texts, store_identity
from hiddenscope.app.schemas import (
    STORE_NAME,
    ColumnChoice,
    DatasetAnswer,
    JobAnswer,
    JobRequest,
    ModelChoice,
    Problem,
    ResultAnswer,
    StoreTextsAnswer,
    TableAnswer,
    analyses,
    form_parameters,
)
from hiddenscope.app.settings import Settings
from hiddenscope.app.uploads import preview_table
from hiddenscope.catalog import ANALYSIS
from hiddenscope.errors import Error
from hiddenscope.files import identity as files_identity
from hiddenscope.results import Result
from hiddenscope.workers import Header

Format: TypeAlias = Literal["html", "png", "svg", "pdf", "csv", "json", "nc"]
# What FastAPI takes as the documentation of answers, by status.
Responses: TypeAlias = dict[int | str, dict[str, Any]]

JobId = Annotated[str, InPath(min_length=1, max_length=40)]
ResultId = Annotated[str, InPath(pattern=f"^{KEY.pattern}$")]
StoreId = Annotated[str, InPath(pattern=STORE_NAME)]
FileName = Annotated[
    str,
    Query(
        min_length=1,
        max_length=200,
        description="The name of the file: its suffix counts.",
    ),
]

ColumnName = Annotated[
    str | None,
    Query(min_length=1, max_length=200, description="The column that holds these."),
]

PICTURES = ("png", "svg", "pdf")
MEDIA_TYPES: dict[Format, str] = {
    "html": "text/html",
    "png": "image/png",
    "svg": "image/svg+xml",
    "pdf": "application/pdf",
    "csv": "text/csv",
    "json": "application/json",
    "nc": "application/x-netcdf",
}


def problems(descriptions: Mapping[int, str]) -> Responses:
    """Return what the statuses of refusals mean, as FastAPI documents it."""
    return {
        status: {"model": Problem, "description": description}
        for status, description in descriptions.items()
    }


PROBLEMS = problems(
    {
        401: "No token.",
        403: "The request comes from another site.",
        404: "There is no such thing.",
        413: "The request is too large.",
        421: "The Host header names another machine.",
        422: "The request cannot be understood, or asks for what there is not.",
    }
)
BUSY = problems({429: "Too much is waiting already."})
NOT_JSON = problems({400: "The body is not JSON."})
EVENTS = {
    "content": {
        "text/event-stream": {
            "schema": {
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
        }
    },
    "description": (
        "Events, each with a job as JSON in its data, until the job is over."
    ),
}
UPLOAD = {
    "required": True,
    "content": {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    },
}
PAYLOAD = {
    "content": {"text/plain": {"schema": {"type": "string"}}},
    "description": "Views, packed as in the reports.",
}
FILE: dict[str, Any] = {
    "content": {
        media_type: {"schema": {"type": "string"}}
        for media_type in MEDIA_TYPES.values()
    },
    "description": "The file.",
}
FILE["content"]["application/json"] = {"schema": {"type": "object"}}

MAX_DRAWING = 2


class Desk:
    """The library, the cache and the queue of one server."""

    def __init__(
        self, settings: Settings, jobs: Jobs, cache: ResultCache, library: Library
    ) -> None:
        self.settings = settings
        self.jobs = jobs
        self.cache = cache
        self.library = library
        self.streams = 0
        self.drawing = asyncio.Semaphore(MAX_DRAWING)

    def resolve(self, client_request: Header) -> tuple[str, Header]:
        """Return the cache key of a request, and the request as the worker takes it.

        The worker gets paths in place of opaque names, and the texts of uploads.
        """
        identities = []
        if self.settings.device:
            identities.append(self.settings.device)
        arguments = dict(client_request["arguments"])
        request = {**client_request, "arguments": arguments}
        if "model" in request:
            request["model"] = self._resolve_model(request["model"], identities)
        for name, kind, value in _references(client_request):
            if kind == "model":
                arguments[name] = self._resolve_model(value, identities)
            elif kind == "dictionary":
                path = self.library.dictionary_path(value)
                identities.append(files_identity(sorted(path.iterdir())))
                arguments[name] = str(path)
            else:
                upload = self.library.dataset(value)
                if upload is not None:
                    arguments[name] = upload.as_argument()
        if "store" in request:
            request["store"] = self._resolve_store(request["store"], identities)
        if request["analysis"] == "fit":
            arguments["to"] = self.library.new_dictionary(arguments["to"])
            # The folder may be gone when the same is asked again.
            identities.append(secrets.token_hex(8))
        if "store" in arguments:
            arguments.update(self._resolve_store(arguments["store"], identities))
        return key_of(client_request, identities), request

    def _resolve_model(self, choice: Header, identities: list[str]) -> Header:
        identity = self.library.model_identity(ModelChoice(**choice))
        identities.append(identity)
        return {
            "path": self.library.model_path(choice["name"]),
            "dtype": choice.get("dtype"),
            "identity": identity,
        }

    def _resolve_store(self, name: str, identities: list[str]) -> Header:
        path = self.library.store_path(name)
        identity = store_identity(path)
        identities.append(identity)
        return {"path": str(path), "identity": identity}

    def names_in_code(self, client_request: Header) -> dict[str, Named]:
        """Return what each opaque name of a request stands for in code."""
        opaque_names = []
        if "model" in client_request:
            opaque_names.append(client_request["model"]["name"])
        for _, kind, value in _references(client_request):
            opaque_names.append(value["name"] if kind == "model" else value)
        names = {}
        for name in opaque_names:
            if name.startswith("folder:"):
                names[name] = Named(self.library.model_path(name))
            elif name.startswith("dictionary:"):
                names[name] = Named(str(self.library.dictionary_path(name)))
            elif name.startswith("upload:"):
                upload = self.library.dataset(name)
                if upload is not None:
                    file = upload.data.name
                    # A name that begins like an option, or like stdin, is written as
                    # a path.
                    if not file[:1].isalnum():
                        file = f"./{file}"
                    columns = upload.columns.model_dump(exclude_none=True)
                    names[name] = Named(file, columns)
        store = store_of(client_request)
        if store is not None:
            names[store] = Named(str(self.library.store_path(store)))
        return names

    def result(self, id: ResultId) -> StoredResult:  # noqa: A002
        """Return a result from the cache; without it, the answer is a 404."""
        result = self.cache.get(id)
        if result is None:
            raise HTTPException(
                404,
                "No such result: it was never computed here, or has been dropped. Ask"
                " again.",
            )
        return result

    async def job(self, id: JobId) -> JobRecord:  # noqa: A002
        """Return a job; without it, the answer is a 404."""
        job = self.jobs.get(id)
        if job is None:
            raise HTTPException(
                404,
                "No such job: the server was started anew, or it is long over. Ask"
                " again.",
            )
        return job


def _references(request: Header) -> Iterator[tuple[str, str, Any]]:
    """Yield the arguments that name models and datasets, with their kinds."""
    # What only the page asks names no other model and no dataset.
    if request["analysis"] not in ANALYSIS:
        if "dictionary" in request["arguments"]:
            yield "dictionary", "dictionary", request["arguments"]["dictionary"]
        return
    for parameter in form_parameters(ANALYSIS[request["analysis"]]):
        value = request["arguments"].get(parameter.name)
        is_named = parameter.kind in ("model", "data")
        # Other words than names are passed on as they are.
        if parameter.kind == "dictionary" and value not in parameter.choices:
            is_named = True
        if value is not None and is_named:
            yield parameter.name, parameter.kind, value


def api(desk: Desk) -> APIRouter:
    """Return the routes under /api."""
    router = APIRouter(prefix="/api", responses=PROBLEMS)
    Job: TypeAlias = Annotated[JobRecord, Depends(desk.job)]
    Stored: TypeAlias = Annotated[StoredResult, Depends(desk.result)]

    router.get("/analyses")(analyses)
    router.get("/models")(desk.library.models)
    router.get("/datasets")(desk.library.datasets)
    router.get("/dictionaries")(desk.library.dictionaries)
    router.get("/stores")(desk.library.stores)

    @router.post("/datasets", status_code=201, openapi_extra={"requestBody": UPLOAD})
    async def upload_dataset(
        request: Request,
        file: FileName,
        text: ColumnName = None,
        label: ColumnName = None,
        group: ColumnName = None,
    ) -> DatasetAnswer:
        """Upload labelled texts as .txt, .csv, .tsv or .jsonl."""
        content = await request.body()
        columns = ColumnChoice(text=text, label=label, group=group)
        return await asyncio.to_thread(desk.library.add_dataset, file, content, columns)

    @router.post("/tables", openapi_extra={"requestBody": UPLOAD})
    async def read_table(request: Request, file: FileName) -> TableAnswer:
        """Read the columns and the first rows of a file; nothing is kept."""
        content = await request.body()
        return await asyncio.to_thread(preview_table, file, content)

    @router.get("/stores/{name}/texts")
    def list_texts(
        name: StoreId,
        first: Annotated[
            int, Query(ge=0, le=10**12, description="Where the page begins.")
        ] = 0,
        count: Annotated[
            int, Query(ge=1, le=100, description="How many texts it has.")
        ] = 20,
    ) -> StoreTextsAnswer:
        """List the texts of stored states, a page at a time."""
        return read_texts(desk.library.store_path(name), first, count)

    @router.post(
        "/jobs",
        status_code=202,
        responses={200: {"model": JobAnswer}, **BUSY, **NOT_JSON},
    )
    async def submit_job(body: JobRequest, response: Response) -> JobAnswer:
        """Ask a question: 202 and a job to follow, or 200 if the result is cached."""
        client_request = body.model_dump(exclude_none=True, mode="json")
        key, request = await asyncio.to_thread(desk.resolve, client_request)
        if await asyncio.to_thread(desk.cache.get, key) is not None:
            response.status_code = 200
            return desk.jobs.status_of(desk.jobs.record_cached(key, client_request))
        try:
            job = desk.jobs.submit(key, client_request, request)
        except QueueFull:
            message = (
                f"{desk.jobs.max_queued} questions are waiting already. Wait for one,"
                " or cancel one."
            )
            raise HTTPException(429, message, headers={"Retry-After": "5"}) from None
        return desk.jobs.status_of(job)

    @router.get("/jobs/{id}")
    async def read_job(job: Job) -> JobAnswer:
        """Return how a job stands."""
        return desk.jobs.status_of(job)

    @router.delete("/jobs/{id}")
    async def cancel_job(job: Job) -> JobAnswer:
        """Cancel a job: it is taken from the queue, or stopped."""
        await desk.jobs.cancel(job)
        return desk.jobs.status_of(job)

    async def count_stream() -> AsyncIterator[None]:
        # As a dependency of the route, it also counts a stream that is never read.
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
        dependencies=[Depends(count_stream)],
    )
    async def follow_job(job: Job) -> StreamingResponse:
        """Follow a job: server-sent events, each a job as JSON, until it is over."""

        async def events() -> AsyncIterator[str]:
            async with aclosing(desk.jobs.follow(job)) as statuses:
                async for status in statuses:
                    if status is None:
                        # A line that begins with a colon is a comment, which browsers
                        # skip.
                        yield ": still there\n\n"
                    else:
                        yield f"data: {status.model_dump_json()}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @router.get(
        "/jobs/{id}/partial",
        response_class=Response,
        responses={200: PAYLOAD, 204: {"description": "The job is over."}},
    )
    async def read_partial(job: Job) -> Response:
        """Return the views of the last partial result, packed, while the job runs."""
        if not job.partial_count:
            raise HTTPException(404, "This job has given no partial result.")
        if job.is_over:
            # No error: a page may ask just as the job ends, and is about to be told.
            return Response(status_code=204)
        return Response(job.latest_partial, media_type="text/plain")

    @router.get("/results/{id}")
    def read_result(id: ResultId, stored: Stored) -> ResultAnswer:  # noqa: A002
        """Return the title, findings and views of a result, and the code behind it."""
        header = stored.header
        client_request = header["request"]
        word = client_request["analysis"]
        try:
            names = desk.names_in_code(client_request)
        # The model or the data may be gone, which must not hide the result.
        except Error:
            names = {}
        command = as_command(client_request, names)
        # Answers about one state have no views.
        content = {"title": word, "findings": [], "views": [], "sections": [], **header}
        return ResultAnswer(
            **content,
            id=id,
            analysis=word,
            model=client_request.get("model"),
            python=as_python(client_request, names),
            command=command.text,
            command_reason=command.reason,
        )

    @router.get(
        "/results/{id}/payload", response_class=Response, responses={200: PAYLOAD}
    )
    async def read_payload(stored: Stored) -> Response:
        """Return the views of a result, packed as in the reports."""
        return Response(stored.payload, media_type="text/plain")

    @router.get("/results/{id}/file", response_class=Response, responses={200: FILE})
    async def read_file(
        stored: Stored,
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
        """Return a result as a file."""
        if not stored.data:
            raise HTTPException(
                422,
                "One state cannot be saved as a result. Copy its Python code instead.",
            )
        async with desk.drawing:
            content = await asyncio.to_thread(_convert, stored, format, view, measure)
        name = f"{stored.header['request']['analysis']}.{format}"
        headers = {
            "content-disposition": f'attachment; filename="{name}"',
            # A report is a whole page with scripts: it must not run as this one.
            "content-security-policy": "sandbox",
        }
        return Response(content, media_type=MEDIA_TYPES[format], headers=headers)

    return router


def _convert(stored: StoredResult, format_: str, view: str, measure: str) -> bytes:
    """Return the bytes of a result in another format."""
    if stored.suffix == f".{format_}":
        return stored.data
    with TemporaryDirectory(prefix="hiddenscope-") as folder:
        source = Path(folder, f"stored{stored.suffix}")
        source.write_bytes(stored.data)
        result = Result.load(source)
        target = Path(folder, f"converted.{format_}")
        if format_ in PICTURES:
            result.save(target, view=view, measure=measure)
        else:
            result.save(target)
        return target.read_bytes()
