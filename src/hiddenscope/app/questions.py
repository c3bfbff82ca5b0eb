"""Questions: what the worker answers. Every analysis, and what only the page asks.

This module imports torch. Only the worker imports it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import xarray

import hiddenscope as hs
from hiddenscope.analyses.embed.embed import mean_cosine
from hiddenscope.app.answers import AnswerBytes, pack_result
from hiddenscope.app.cells import continue_text, describe_state, suggest_answers
from hiddenscope.app.models import Models, StoredStates
from hiddenscope.app.schemas import Kind, never_a_path, questions_of
from hiddenscope.app.stores import plain
from hiddenscope.app.uploads import labelled_from
from hiddenscope.catalog import ANALYSIS
from hiddenscope.errors import SiteError, TextError
from hiddenscope.results import Result
from hiddenscope.states import Pair, States
from hiddenscope.vectors.labelled import labels_of_states
from hiddenscope.workers import Header

# Characters of a text in a list of search results.
MAX_CHARACTERS = 300

Preview: TypeAlias = Callable[[AnswerBytes], None]
Source: TypeAlias = hs.Model | StoredStates


def answer(request: Header, models: Models, preview: Preview) -> AnswerBytes:
    """Answer a request, as the server resolved it; partial results go to `preview`."""
    word = request["analysis"]
    if word in CELL_QUESTIONS:
        return AnswerBytes({word: CELL_QUESTIONS[word](models, request)})
    if word in PAGE_QUESTIONS:
        return PAGE_QUESTIONS[word](models, request)
    return pack_result(_analyse(models, request, preview))


# --- Analyses ---


def _analyse(models: Models, request: Header, preview: Preview) -> Result:
    """Run an analysis on a model, or on stored states."""
    word = request["analysis"]
    source: Source
    if "store" in request:
        source = models.stored_states(request["store"])
    else:
        source = models.get(request["model"])
    arguments = dict(request["arguments"])
    for question in questions_of(ANALYSIS[word]):
        value = arguments.get(question.name)
        if value is not None:
            arguments[question.name] = _convert(models, source, question.kind, value)
    if word in PREPARATIONS:
        PREPARATIONS[word](source, arguments, preview)
    if word == "embed":
        return _embed(source, arguments)
    result: Result = getattr(hs, word)(source, **arguments)
    return result


def _convert(models: Models, source: Source, kind: Kind, value: Any) -> Any:
    """Turn an argument of a request into what an analysis takes."""
    if kind == "model":
        return models.get(value)
    if kind == "contrast":
        return hs.Contrast(**value)
    if kind == "direction":
        options = dict(value)
        for name in ("toward", "away"):
            if isinstance(options.get(name), str):
                options[name] = [options[name]]
        return hs.Direction.between(source, **options)
    if kind == "data":
        # A shipped dataset has a name. An upload comes with its texts.
        data = hs.read(value) if isinstance(value, str) else labelled_from(value)
        if isinstance(source, hs.Model):
            return data
        return labels_of_states(source, data)
    return never_a_path(kind, value)


def _prepare_search(source: Source, arguments: Header, preview: Preview) -> None:
    # A query that is text needs the model that makes a vector of it.
    arguments["query"] = (source, arguments["query"])


def _prepare_project(source: Source, arguments: Header, preview: Preview) -> None:
    method = arguments.get("method", "umap")
    # PCA is drawn at once. The others show PCA while they are computed.
    if method != "pca":
        arguments["method"] = hs.Pictures(
            method, preview=lambda early: preview(pack_result(early))
        )


def _prepare_drift(source: Source, arguments: Header, preview: Preview) -> None:
    arguments.setdefault("texts", None)


# What some analyses take besides the fields of their form.
PREPARATIONS: dict[str, Callable[[Source, Header, Preview], None]] = {
    "search": _prepare_search,
    "project": _prepare_project,
    "drift": _prepare_drift,
}


def _embed(model: Source, arguments: Header) -> Result:
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
    }
    return Result("embed", data, facts, model.source())


# --- Questions that only the page asks ---


def _answer_grid(models: Models, request: Header) -> AnswerBytes:
    """Return the norm of every state of a text that is being typed."""
    model = models.get(request["model"])
    norms = _norms(models.states(model, request["arguments"]["text"]))
    titles = (
        f"The norm of every state of {model.name}",
        f"The norm along the layers of {model.name}",
    )
    return pack_result(norms, titles)


def _answer_stored_grid(models: Models, request: Header) -> AnswerBytes:
    """Return the norm of every stored state of one text."""
    text = request["arguments"]["text"]
    states = _states_of_text(models.stored_states(request["arguments"]), text)
    titles = (
        f"The norm of every state of text {text}, of {states.source.model}",
        f"The norm along the layers of text {text}",
    )
    return pack_result(_norms(states), titles)


def _answer_nearest_texts(models: Models, request: Header) -> AnswerBytes:
    """Return the stored texts that are nearest to a query."""
    arguments = request["arguments"]
    stored = models.stored_states(arguments)
    query = models.get(request["model"]), arguments["query"]
    result = hs.search(stored, query, arguments["k"], site=arguments.get("site"))
    return _pack_search(result, stored, None)


def _answer_nearest_states(models: Models, request: Header) -> AnswerBytes:
    """Return the stored states of a site that are nearest to one of them."""
    arguments = request["arguments"]
    site, text, token = arguments["site"], arguments["text"], arguments["token"]
    stored = models.stored_states(arguments)
    states = _states_of_text(stored, text)
    if token >= len(states.tokens):
        raise SiteError(
            f"No state at token {token}",
            f"text {text} has {len(states.tokens)} tokens",
            "Choose a cell of the grid.",
        )
    # One more than was asked for: the nearest state is the queried one itself.
    result = hs.search(
        stored, states[site][token], arguments["k"] + 1, site=site, pool="each"
    )
    return _pack_search(result, stored, (text, token))


# Their answers have no views: the page shows them beside the grid.
CELL_QUESTIONS: dict[str, Callable[[Models, Header], Header]] = {
    "state": describe_state,
    "answers": suggest_answers,
    "continuation": continue_text,
}
PAGE_QUESTIONS: dict[str, Callable[[Models, Header], AnswerBytes]] = {
    "grid": _answer_grid,
    "kept": _answer_stored_grid,
    "store": _answer_nearest_texts,
    "nearest": _answer_nearest_states,
}


def _states_of_text(stored: StoredStates, text: int) -> States:
    """Return the states of one text, in memory."""
    if isinstance(stored, Pair):
        raise TextError(
            "No grid of these states",
            "they are of an encoder and a decoder",
            "Read them in Python: hs.Pair.load(path).",
        )
    part = stored.of(text)
    if not len(part.tokens):
        raise TextError(
            f"No grid of text {text}", "no token of it was kept", "Choose another text."
        )
    return part if isinstance(part, States) else part.to_states()


def _norms(states: States) -> Result:
    """Return the norm of every state of one text, as a grid and along the layers."""
    # Site by site: all of them in float64 at once would take too much memory.
    by_site = [values.to(torch.float64).norm(dim=-1) for values in states.values]
    norms = torch.stack(by_site).to(torch.float32).numpy()
    look = {"long_name": "norm", "units": "L2", "scale": "log"}
    variables = {
        "norm": (("site", "token"), norms, look),
        "norm_first": ("site", norms[:, 0], {**look, "long_name": "first token"}),
        "norm_last": ("site", norms[:, -1], {**look, "long_name": "last token"}),
    }
    coordinates = {
        "site": [str(site) for site in states.sites],
        "string": ("token", list(states.tokens.strings)),
        "id": ("token", states.tokens.ids),
    }
    data = xarray.Dataset(variables, coordinates)
    if states.tokens.texts is not None:
        data.attrs["texts"] = list(states.tokens.texts)
    return Result("norms", data, {}, states.source)


def _pack_search(
    result: Result, stored: StoredStates, query_state: tuple[int, int] | None
) -> AnswerBytes:
    """Pack a search of texts, or of states, with its hits as rows for the page.

    `query_state` is the text and the token of the state that was searched for. It is
    left out of its own hits.
    """
    hits = result.data.isel(query=0)
    scores = hits["score"].to_numpy().tolist()
    if query_state is None:
        texts = hits["number"].to_numpy().tolist()
        tokens: list[int | None] = [None] * len(texts)
    else:
        texts = hits["text"].to_numpy().tolist()
        tokens = _tokens_in_text(stored, hits["number"].to_numpy().tolist(), texts)
    strings = [""] * len(texts)
    if "string" in hits:
        strings = hits["string"].to_numpy().tolist()
    rows = []
    for text, token, string, score in zip(texts, tokens, strings, scores, strict=True):
        # A store may lack texts of its corpus, and counts those that it has.
        number = int(stored.texts[text]) if isinstance(stored, hs.Store) else text
        if (number, token) != query_state:
            shown = plain(string[:MAX_CHARACTERS])
            rows.append(
                {"text": number, "token": token, "string": shown, "score": score}
            )
    packed = pack_result(result)
    return replace(packed, header={**packed.header, "nearest": rows})


def _tokens_in_text(
    stored: StoredStates, rows: list[int], texts: list[int]
) -> list[int | None]:
    """Return which token of its text each row is.

    Positions would not do: those of a window begin above 0.
    """
    assert not isinstance(stored, Pair), "the states of a pair are not searched"
    pairs = zip(rows, texts, strict=True)
    return [row - stored.tokens.rows(text).start for row, text in pairs]
