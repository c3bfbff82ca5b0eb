"""Questions: what the worker answers. Every analysis, and what only the page asks.

This module imports torch. Only the worker imports it.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xarray

import hiddenscope as hs
from hiddenscope.app.answers import pack_result
from hiddenscope.app.cache import StoredResult
from hiddenscope.app.cells import (
    Models,
    StoredStates,
    continue_text,
    describe_state,
    find_states,
    find_texts,
    fit_dictionary,
    norms_of,
    reads_of,
    show_stored_text,
    suggest_answers,
)
from hiddenscope.app.code import protect_from_file_lookup
from hiddenscope.app.schemas import form_parameters
from hiddenscope.app.uploads import labelled_from
from hiddenscope.catalog import ANALYSIS
from hiddenscope.causes.contrast import interchanges
from hiddenscope.interface import Parameter, build_value, describe
from hiddenscope.measures.neighbours import mean_cosine, told_apart
from hiddenscope.results import Result
from hiddenscope.workers import Header

Preview: TypeAlias = Callable[[StoredResult], None]
StateSource: TypeAlias = hs.Model | StoredStates


def answer(request: Header, models: Models, preview: Preview) -> StoredResult:
    """Answer a request, as the server resolved it; partial results go to `preview`."""
    word = request["analysis"]
    if word in CELL_QUESTIONS:
        return StoredResult({word: CELL_QUESTIONS[word](models, request)})
    if word in PAGE_QUESTIONS:
        return PAGE_QUESTIONS[word](models, request)
    source: StateSource
    if "store" in request:
        source = models.stored_states(request["store"])
    else:
        source = models.get(request["model"])
    arguments = dict(request["arguments"])
    describe(word).require(source, arguments)
    for parameter in form_parameters(ANALYSIS[word]):
        if arguments.get(parameter.name) is not None:
            arguments[parameter.name] = _convert(models, source, parameter, arguments)
        elif parameter.explicit:
            arguments[parameter.name] = None
    if word == "project":
        preview_pictures(arguments, preview)
    if not ANALYSIS[word].result:
        return pack_result(embedded(source, arguments))
    return pack_result(getattr(hs, word)(source, **arguments))


def _convert(
    models: Models, source: StateSource, parameter: Parameter, arguments: Header
) -> Any:
    """Turn an argument of a request into what an analysis takes."""
    value = arguments[parameter.name]
    if parameter.kind == "model":
        return models.get(value)
    if parameter.kind == "dictionary" and os.path.isabs(value):
        model = source if isinstance(source, hs.Model) else None
        return models.dictionary(value, model, arguments.get("site", ""))
    if parameter.fields:
        return build_value(parameter, source, value)
    if parameter.kind == "pairs":
        return interchanges(value)
    if parameter.kind == "data":
        # A shipped dataset has a name. An upload comes with its texts.
        if isinstance(value, str):
            return hs.read(value)
        # Named as `hs.read` names the file, so that the results are the same.
        return replace(labelled_from(value), name=Path(value["file"]).stem)
    return protect_from_file_lookup(parameter.kind, value)


def preview_pictures(arguments: Header, preview: Preview) -> None:
    """Have `hs.project` show pictures by PCA while it computes those by the method."""
    defaults = {part.name: part.default for part in describe("project").parameters}
    method: Any = arguments.get("method", defaults["method"])
    if method != "pca":
        arguments["method"] = hs.Pictures(
            method, preview=lambda early: preview(pack_result(early))
        )


def embedded(model: StateSource, arguments: Header) -> Result:
    """Return the vectors of `hs.embed`, which are a bare array, as a result."""
    assert isinstance(model, hs.Model), "stored states are not embedded"
    texts = arguments["texts"]
    if isinstance(texts, str):
        texts = [texts]
    vectors = hs.embed(model, **{**arguments, "texts": texts})
    data = xarray.Dataset(
        {"vector": (("text", "width"), vectors)}, {"string": ("text", texts)}
    )
    facts = {
        "texts": len(vectors),
        "width": vectors.shape[1],
        "mean_cosine": mean_cosine(torch.from_numpy(vectors)),
        "told_apart": told_apart(torch.from_numpy(vectors)),
    }
    return Result("embed", data, facts, model.source())


def _show_grid(models: Models, request: Header) -> StoredResult:
    """Return the norm of every state of a text that is being typed."""
    model = models.get(request["model"])
    norms = norms_of(models.states(model, request["arguments"]["text"]))
    titles = (
        f"The norm of every state of {model.name}",
        f"The norm along the layers of {model.name}",
    )
    return pack_result(norms, titles)


def _show_reads(models: Models, request: Header) -> StoredResult:
    """Return which tokens the chosen token reads in each layer."""
    model = models.get(request["model"])
    arguments = request["arguments"]
    states = models.states(model, arguments["text"])
    # A text that is being typed may have become shorter than it was.
    last = len(states.tokens) - 1
    token = min(arguments.get("token", last), last)
    result = hs.attention(model, arguments["text"], queries=[token], draws=0)
    reads, title = reads_of(result, token)
    return pack_result(reads, (title,))


# Answers without views; the page shows them beside the grid.
CELL_QUESTIONS: dict[str, Callable[[Models, Header], Header]] = {
    "state": describe_state,
    "answers": suggest_answers,
    "continuation": continue_text,
}
PAGE_QUESTIONS: dict[str, Callable[[Models, Header], StoredResult]] = {
    "grid": _show_grid,
    "reads": _show_reads,
    "kept": show_stored_text,
    "store": find_texts,
    "nearest": find_states,
    "fit": fit_dictionary,
}
