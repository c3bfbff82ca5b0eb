"""Desk: what the routes share, and how a request becomes a question for the worker."""

import asyncio
from collections.abc import Iterator
from typing import Any

from fastapi import HTTPException

from hiddenscope.app.cache import ResultCache, StoredResult, key_of
from hiddenscope.app.code import Named
from hiddenscope.app.jobs import JobRecord, Jobs
from hiddenscope.app.library import Library
from hiddenscope.app.schemas import ASKED, ModelChoice, form_parameters
from hiddenscope.app.settings import Settings
from hiddenscope.app.stores import store_identity
from hiddenscope.workers import Header

# The parameters of each analysis, by its word.
FORM_PARAMETERS = {analysis.word: form_parameters(analysis) for analysis in ASKED}
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
            else:
                upload = self.library.dataset(value)
                if upload is not None:
                    arguments[name] = upload.as_argument()
        if "store" in request:
            request["store"] = self._resolve_store(request["store"], identities)
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
            elif name.startswith("upload:"):
                upload = self.library.dataset(name)
                if upload is not None:
                    names[name] = upload.named
        store = client_request.get("store") or client_request["arguments"].get("store")
        if store:
            names[store] = Named(str(self.library.store_path(store)))
        return names

    def result(self, result_id: str) -> StoredResult:
        """Return a result from the cache; without it, the answer is a 404."""
        result = self.cache.get(result_id)
        if result is None:
            raise HTTPException(
                404,
                "No such result: it was never computed here, or has been dropped. Ask"
                " again.",
            )
        return result

    def job(self, job_id: str) -> JobRecord:
        """Return a job; without it, the answer is a 404."""
        job = self.jobs.get(job_id)
        if job is None:
            raise HTTPException(
                404,
                "No such job: the server was started anew, or it is long over. Ask"
                " again.",
            )
        return job


def _references(request: Header) -> Iterator[tuple[str, str, Any]]:
    """Yield the arguments that name models and datasets, with their kinds."""
    for parameter in FORM_PARAMETERS.get(request["analysis"], ()):
        value = request["arguments"].get(parameter.name)
        if value is not None and parameter.kind in ("model", "data"):
            yield parameter.name, parameter.kind, value
