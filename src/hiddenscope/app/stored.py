"""Stored: questions about stored states, which need no model but for a query.

The norms of one text, and the texts or the states that are nearest to a query.
"""

from dataclasses import replace

import torch
import xarray

import hiddenscope as hs
from hiddenscope.app.answers import AnswerBytes, pack_result
from hiddenscope.app.models import Models, StoredStates
from hiddenscope.app.stores import encodable
from hiddenscope.errors import SiteError, TextError
from hiddenscope.results import Result
from hiddenscope.states import Pair, States
from hiddenscope.workers import Header

# Characters of a text in a list of search results.
MAX_CHARACTERS = 300


def show_stored_text(models: Models, request: Header) -> AnswerBytes:
    """Return the norm of every stored state of one text."""
    text = request["arguments"]["text"]
    states = _states_of_text(models.stored_states(request["arguments"]), text)
    titles = (
        f"The norm of every state of text {text}, of {states.source.model}",
        f"The norm along the layers of text {text}",
    )
    return pack_result(norms_of(states), titles)


def find_texts(models: Models, request: Header) -> AnswerBytes:
    """Return the stored texts that are nearest to a query."""
    arguments = request["arguments"]
    stored = models.stored_states(arguments)
    query = models.get(request["model"]), arguments["query"]
    result = hs.search(stored, query, arguments["k"], site=arguments.get("site"))
    return _pack_search(result, stored, None)


def find_states(models: Models, request: Header) -> AnswerBytes:
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
        hs.each_token(stored), states[site][token], arguments["k"] + 1, site=site
    )
    return _pack_search(result, stored, (text, token))


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


def norms_of(states: States) -> Result:
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
            shown = encodable(string[:MAX_CHARACTERS])
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
