"""Questions answered by models, in the worker process: every analysis, and those that
only the page asks.

This module imports torch; only the worker imports it.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xarray
from torch import Tensor

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.analyses.embed.embed import mean_cosine
from hiddenscope.analyses.patch.contrast import encode
from hiddenscope.analyses.steer.logprobs import (
    cannot_generate,
    check_new_tokens,
    generate,
    masked_model,
)
from hiddenscope.app.frames import Header
from hiddenscope.app.schemas import Kind, never_a_path, questions_of
from hiddenscope.app.stores import plain
from hiddenscope.catalog import ANALYSIS
from hiddenscope.errors import Error, SiteError, TextError, TooLarge
from hiddenscope.results import FINDINGS, Result, to_bytes
from hiddenscope.sites import Site, to_alias
from hiddenscope.states import Pair, States, load_states
from hiddenscope.texts import Labelled
from hiddenscope.vectors.dataset import labels_of_states
from hiddenscope.views import pack, sections_of
from hiddenscope.views.drawing import MOST_TOKENS
from hiddenscope.views.render import named_views

MOST_MODELS = 2
MOST_CAPTURES = 16
MOST_CAPTURED_BYTES = 256 * 2**20
NEAREST = 8
PREDICTIONS = 10
# How a position says that a text has no token in a column.
GAP: dict[int, int | None] = {-1: None}
# Below that JSON is written faster than netCDF, which takes 20 ms or more.
MOST_BYTES_AS_JSON = 2**15

Kept: TypeAlias = "hs.Store | States | Pair"
Preview: TypeAlias = Callable[["AnswerBytes"], None]


@dataclass(frozen=True)
class AnswerBytes:
    """An answer as it travels: what the page reads, the payload of the views, the data
    as a .json or .nc file.
    """

    header: Header
    payload: bytes = b""
    data: bytes = b""


class Models:
    """The models that are loaded, two at most, and the states of the last texts: only a
    new text is computed.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self._loaded: OrderedDict[str, hs.Model] = OrderedDict()
        self._captured: OrderedDict[tuple[int, str], States] = OrderedDict()
        self._kept: dict[str, Kept] = {}

    def get(self, choice: Header) -> hs.Model:
        """The model of a choice, which has the path or the name that `hs.load` takes."""
        key = json.dumps([choice["path"], choice.get("dtype"), choice.get("identity")])
        if key not in self._loaded:
            while len(self._loaded) >= MOST_MODELS:
                self._loaded.popitem(last=False)
                self._captured.clear()
            with progress.status(f"Loading {Path(choice['path']).name}"):
                self._loaded[key] = hs.load(
                    choice["path"], dtype=choice.get("dtype"), device=self.device
                )
        self._loaded.move_to_end(key)
        return self._loaded[key]

    def kept(self, arguments: Header) -> "Kept":
        """Kept states by their path; the last ones stay open."""
        key = json.dumps([arguments["path"], arguments["identity"]])
        if key not in self._kept:
            self._kept.clear()
            path = Path(arguments["path"])
            self._kept[key] = hs.open(path) if path.is_dir() else load_states(path)
        return self._kept[key]

    def states(self, model: hs.Model, text: str) -> States:
        """The states of one text at every layer and final."""
        key = id(model), text
        if key not in self._captured:
            captured = model.capture(text)
            if not isinstance(captured, States):
                reason = f"{model.name} has an encoder and a decoder"
                raise TextError(
                    "No grid of one text",
                    reason,
                    "Ask an analysis in its place: lens, profile, compare.",
                )
            self._captured[key] = captured
            while len(self._captured) > 1 and (
                len(self._captured) > MOST_CAPTURES
                or sum(one.values.nbytes for one in self._captured.values())
                > MOST_CAPTURED_BYTES
            ):
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        return self._captured[key]


def answer(request: Header, models: Models, preview: Preview) -> AnswerBytes:
    """The answer to a request, as the server resolved it."""
    word, arguments = request["analysis"], request["arguments"]
    if word == "state":
        return AnswerBytes(
            {"state": _state(models, models.get(request["model"]), arguments)}
        )
    if word == "answers":
        return AnswerBytes(
            {"answers": _answers(models.get(request["model"]), arguments)}
        )
    if word == "continuation":
        return AnswerBytes(
            {
                "continuation": _continuation(
                    models, models.get(request["model"]), arguments
                )
            }
        )
    if word == "grid":
        model = models.get(request["model"])
        titles = (
            f"The norm of every state of {model.name}",
            f"The norm along the layers of {model.name}",
        )
        return packed(_grid(models, model, arguments["text"]), titles)
    if word == "store":
        return _store_texts(models, request)
    if word == "kept":
        return _kept_norms(models, arguments)
    if word == "nearest":
        return _store_states(models, arguments)
    return packed(_analysis(models, request, preview))


def packed(result: Result, titles: Sequence[str] = ()) -> AnswerBytes:
    """A result as it travels; its first views may get titles of their own."""
    views = dict(named_views(result))
    shown = [*views.values()]
    shown[: len(titles)] = [
        replace(view, title=title) for view, title in zip(shown, titles, strict=False)
    ]
    by_title = {view.title: place for place, view in enumerate(shown)}
    sections = []
    for section in () if titles else sections_of(result):
        for view in section.views:
            if view.title not in by_title:
                by_title[view.title] = len(shown)
                shown.append(view)
        sections.append(
            {
                "title": section.title,
                "prose": section.prose,
                "views": [by_title[view.title] for view in section.views],
            }
        )
    names = [*views, *[""] * (len(shown) - len(views))]
    findings = FINDINGS.get(result.kind)
    header: Header = {
        "title": result.title,
        "findings": (
            [str(sentence) for sentence in findings(result)] if findings else []
        ),
        "views": [
            {"name": name, "title": view.title, "kind": type(view).__name__.lower()}
            for name, view in zip(names, shown, strict=True)
        ],
        "sections": sections,
        "columns": _columns(result, "position"),
        "other_columns": _columns(result, "other_position"),
    }
    small = result.data.nbytes <= MOST_BYTES_AS_JSON
    return AnswerBytes(
        header,
        pack(shown).encode("ascii"),
        to_bytes(result, ".json" if small else ".nc"),
    )


def _columns(result: Result, position: str) -> list[int | None]:
    """The token of a text that each column of a grid stands for, None where the text
    has a gap.
    """
    coordinate = result.data.coords.get(position)
    if coordinate is None or coordinate.dims != ("token",):
        return []
    positions = coordinate.to_numpy()[:MOST_TOKENS].tolist()
    return [GAP.get(position, position) for position in positions]


def _analysis(models: Models, request: Header, preview: Preview) -> Result:
    word, arguments = request["analysis"], dict(request["arguments"])
    source = _source(models, request)
    for question in questions_of(ANALYSIS[word]):
        if (given := arguments.get(question.name)) is not None:
            arguments[question.name] = _value(models, source, question.kind, given)
    if word == "search":
        arguments["query"] = (source, arguments["query"])
    if word == "project" and arguments.get("method", "umap") != "pca":
        arguments["method"] = hs.Pictures(
            arguments.get("method", "umap"),
            preview=lambda early: preview(packed(early)),
        )
    if word == "drift":
        arguments.setdefault("texts", None)
    if word == "embed":
        return _vectors(source, arguments)
    result: Result = getattr(hs, word)(source, **arguments)
    return result


def _source(models: Models, request: Header) -> Any:
    """Open the kept states of a request, or load its model."""
    if "store" in request:
        return models.kept(request["store"])
    return models.get(request["model"])


def _vectors(model: hs.Model, arguments: Header) -> Result:
    """The vectors of `hs.embed`, each with its text."""
    listed = (
        [arguments["texts"]]
        if isinstance(arguments["texts"], str)
        else arguments["texts"]
    )
    found = hs.embed(model, **{**arguments, "texts": listed})
    coordinates = {"string": ("text", listed)}
    data = xarray.Dataset({"vector": (("text", "width"), found)}, coordinates)
    facts = {
        "texts": len(found),
        "width": found.shape[1],
        "mean_cosine": mean_cosine(torch.from_numpy(found)),
    }
    return Result("embed", data, facts, model.source())


def _value(models: Models, source: Any, kind: Kind, given: Any) -> Any:
    """Turn an argument of a request into what an analysis takes."""
    if kind == "model":
        return models.get(given)
    if kind == "contrast":
        return hs.Contrast(**given)
    if kind == "direction":
        return hs.Direction.between(
            source, **{name: _listed(name, value) for name, value in given.items()}
        )
    if kind == "data":
        data = _dataset(given)
        return data if isinstance(source, hs.Model) else labels_of_states(source, data)
    return never_a_path(kind, given)


def _dataset(given: Any) -> Labelled:
    """Read a shipped dataset, or take the rows of an upload."""
    if isinstance(given, str):
        return hs.read(given)
    labels, groups = given["labels"], given["groups"]
    return Labelled(
        tuple(given["texts"]),
        labels and tuple(labels),
        given["file"],
        groups and tuple(groups),
    )


def _listed(name: str, value: Any) -> Any:
    return [value] if name in ("toward", "away") and isinstance(value, str) else value


def _store_texts(models: Models, request: Header) -> AnswerBytes:
    """The texts of kept states that are nearest to a query."""
    arguments = request["arguments"]
    kept = models.kept(arguments)
    query = models.get(request["model"]), arguments["query"]
    result = hs.search(kept, query, arguments["k"], site=arguments.get("site"))
    return _with_nearest(result, kept, None)


def _kept_norms(models: Models, arguments: Header) -> AnswerBytes:
    """The norm of every kept state of one text."""
    states = _kept_text(models.kept(arguments), arguments["text"])
    name = f"every state of text {arguments['text']}, of {states.source.model}"
    return packed(
        _norms(states),
        (
            f"The norm of {name}",
            f"The norm along the layers of text {arguments['text']}",
        ),
    )


def _store_states(models: Models, arguments: Header) -> AnswerBytes:
    """The states of a site that are nearest to one of them."""
    kept, site, text = models.kept(arguments), arguments["site"], arguments["text"]
    states = _kept_text(kept, text)
    if arguments["token"] >= len(states.tokens):
        reason = f"text {text} has {len(states.tokens)} tokens"
        raise SiteError(
            f"No state at token {arguments['token']}",
            reason,
            "Choose a cell of the grid.",
        )
    result = hs.search(
        hs.each_token(kept),
        states[site][arguments["token"]],
        arguments["k"] + 1,
        site=site,
    )
    return _with_nearest(result, kept, (text, arguments["token"]))


def _kept_text(kept: Kept, text: int) -> States:
    """The states of one text, in memory."""
    if isinstance(kept, Pair):
        reason = "they are of an encoder and a decoder"
        raise TextError(
            "No grid of these states",
            reason,
            "Read them in Python: hs.Pair.load(path).",
        )
    part = kept.of(text)
    if not len(part.tokens):
        raise TextError(
            f"No grid of text {text}", "no token of it was kept", "Choose another text."
        )
    return part if isinstance(part, States) else part.to_states()


def _with_nearest(
    result: Result, kept: Kept, itself: tuple[int, int] | None
) -> AnswerBytes:
    """A search, with what was found as rows that name texts by their numbers; a state
    is not near to itself.
    """
    numbers = kept.texts if isinstance(kept, hs.Store) else None
    data = result.data.isel(query=0)
    texts = data["text" if itself else "number"].to_numpy().tolist()
    tokens = _tokens_within(kept, data) if itself else [None] * len(texts)
    strings = (
        data["string"].to_numpy().tolist() if "string" in data else [""] * len(texts)
    )
    rows = [
        {
            "text": number if numbers is None else int(numbers[number]),
            "token": token,
            "string": plain(string[:300]),
        }
        for number, token, string in zip(texts, tokens, strings, strict=True)
    ]
    scored = [
        {**row, "score": score}
        for row, score in zip(rows, data["score"].to_numpy().tolist(), strict=True)
    ]
    found = packed(result)
    nearest = [row for row in scored if (row["text"], row["token"]) != itself]
    return replace(found, header={**found.header, "nearest": nearest})


def _tokens_within(kept: Kept, data: xarray.Dataset) -> list[int]:
    """Which token of its text each row is: a position may begin above 0, in a window."""
    assert not isinstance(kept, Pair), "no state of a pair is asked for"
    rows = data["number"].to_numpy()
    return [
        int(row - kept.tokens.rows(text).start)
        for row, text in zip(rows, data["text"].to_numpy(), strict=True)
    ]


def _grid(models: Models, model: hs.Model, text: str) -> Result:
    """The norm of every state of a text."""
    return _norms(models.states(model, text))


def _norms(states: States) -> Result:
    """The norm of every state of one text, and along the layers those of its first and
    its last token.
    """
    norms = (
        torch.stack([values.to(torch.float64).norm(dim=-1) for values in states.values])
        .to(torch.float32)
        .numpy()
    )
    look = {"long_name": "norm", "units": "L2", "scale": "log"}
    coordinates = {
        "site": [str(site) for site in states.sites],
        "string": ("token", list(states.tokens.strings)),
        "id": ("token", states.tokens.ids),
    }
    along = {
        "norm_first": ("site", norms[:, 0], {**look, "long_name": "first token"}),
        "norm_last": ("site", norms[:, -1], {**look, "long_name": "last token"}),
    }
    data = xarray.Dataset(
        {"norm": (("site", "token"), norms, look), **along}, coordinates
    )
    if states.tokens.texts is not None:
        data.attrs["texts"] = list(states.tokens.texts)
    return Result("norms", data, {}, states.source)


def _state(models: Models, model: hs.Model, arguments: Header) -> Header:
    """One state: its names, its norm, the nearest others, what a lens reads there;
    predictions before and after.
    """
    text, token = arguments["text"], arguments["token"]
    states = models.states(model, text)
    site = Site.parse(arguments["site"])
    if site not in states.sites or token >= len(states.tokens):
        reason = (
            f"it has {states.sites[0]} to {states.sites[-1]} and {len(states.tokens)}"
            " tokens"
        )
        raise SiteError(
            f"No state at {site}, token {token}", reason, "Choose a cell of the grid."
        )
    row = states[site][token].to(torch.float64)
    found: Header = {
        "site": str(site),
        "token": token,
        "string": states.tokens.strings[token],
        "id": int(states.tokens.ids[token]),
        "names": _names(model, site, token),
        "norm": float(row.norm()),
        "nearest": _nearest(states, site, token),
        "model": model.name,
        "lens": _lens(model, text, site, token),
    }
    change = arguments.get("change")
    found["before"] = _predictions(model, text, None)
    if change is not None:
        found["change"] = change["kind"]
        found["used"] = _used(models, model, token, change)
        found["after"] = _predictions(
            model, text, {site: _change(models, model, site, token, change)}
        )
    return found


def _names(model: hs.Model, site: Site, token: int) -> dict[str, str]:
    """The state in all notations."""
    source = model.source(site.stack)
    marks: dict[str, Any] = {"depth": source.depth, "final": source.final}
    huggingface = to_alias(site, "hidden_states", **marks)
    lens = to_alias(site, "transformer_lens", **marks)
    names = {"hiddenscope": f'states["{site}"][{token}]'}
    if huggingface:
        names["Hugging Face"] = f"outputs.{huggingface}[0, {token}]"
    if lens:
        names["TransformerLens"] = f'cache["{lens}"][0, {token}]'
    return names


def _nearest(states: States, site: Site, token: int) -> list[Header]:
    """The states of the same text that point the same way most."""
    values = states.values.to(torch.float32)
    units = values / values.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    place = states.sites.index(site)
    cosines = units @ units[place, token]
    cosines[place, token] = -torch.inf
    best = cosines.flatten().topk(min(NEAREST, cosines.numel() - 1))
    columns = cosines.shape[1]
    return [
        {
            "site": str(states.sites[at // columns]),
            "token": at % columns,
            "string": states.tokens.strings[at % columns],
            "cosine": value,
        }
        for value, at in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _lens(model: hs.Model, text: str, site: Site, token: int) -> list[Header] | str:
    """What the layer would predict there, or why that cannot be said."""
    try:
        data = (
            hs.lens(model, text, k=PREDICTIONS, sites=site)
            .data.sel(site=str(site))
            .isel(token=token)
        )
    except Error as error:
        return str(error)
    pairs = zip(
        data["word"].values.tolist(), data["probability"].values.tolist(), strict=True
    )
    return [{"word": word, "probability": probability} for word, probability in pairs]


def _predictions(
    model: hs.Model, text: str, changes: dict[str | Site, Any] | None
) -> list[Header] | str:
    """The likeliest next tokens after the text, or why there are none."""
    try:
        if changes is None:
            logits = hs.record(model, [text], (), logits=True).logits
        else:
            logits = hs.edit(model, [text], changes, (), logits=True).logits
    except TooLarge:
        raise
    except Error as error:
        if changes is not None:
            raise
        return str(error)
    assert isinstance(logits, Tensor), "logits were asked for"
    best = (
        logits[-1]
        .to(torch.float32)
        .softmax(-1)
        .topk(min(PREDICTIONS, logits.shape[-1]))
    )
    with model.lock:
        words = [model.text_encoder.string(int(one)) for one in best.indices]
    return [
        {"word": word, "probability": p}
        for word, p in zip(words, best.values.tolist(), strict=True)
    ]


def _answers(model: hs.Model, arguments: Header) -> Header:
    """Choose two answers that tell two texts apart: of the likeliest next tokens, the
    first that differ.
    """
    problem, remedy = (
        "No answers were found for these texts",
        "Type the two answers, each with its leading space.",
    )
    if masked_model(model):
        raise TextError(
            problem, f"{model.name} predicts masked tokens, not the next one", remedy
        )
    sides = [_predictions(model, arguments[name], None) for name in ("a", "b")]
    for side in sides:
        if isinstance(side, str):
            raise TextError(problem, side, "Choose a model that predicts tokens.")
    for answer, other in product(*sides):
        words = answer["word"], other["word"]  # type: ignore[index]
        if _tells_apart(model, arguments, *words):
            return dict(zip(("answer", "other"), words, strict=True))
    raise TextError(problem, "no two likely tokens differ", remedy)


def _tells_apart(model: hs.Model, arguments: Header, answer: str, other: str) -> bool:
    """Whether two answers are a token each, and not the same."""
    try:
        encode(model, [hs.Contrast(arguments["a"], arguments["b"], answer, other)])
    except TextError:
        return False
    return True


def _change(
    models: Models, model: hs.Model, site: Site, token: int, change: Header
) -> Any:
    """A change as `hs.edit` takes it."""
    if change["kind"] == "ablate":
        return hs.Scale(0.0, tokens=token)
    if change["kind"] == "replace":
        other = models.states(model, _needed(change, "text"))
        donor = _donor(other, token, change)
        return hs.Replace(other[site][donor], tokens=token)
    toward, away = (
        models.states(model, _needed(change, name))[site][-1]
        for name in ("toward", "away")
    )
    return hs.Add(
        (toward - away).to(torch.float32),
        tokens=token,
        scale=change.get("strength", 1.0),
    )


def _donor(other: States, token: int, change: Header) -> int:
    """Find the token of text B whose state is put in: the one that was named, or the
    one at the same position.
    """
    donor = int(change.get("token", token))
    if donor >= len(other.tokens):
        reason = f"text B has {len(other.tokens)} tokens"
        raise TextError(
            f"No state to put at token {token}",
            reason,
            "Choose an earlier cell, or a longer text B.",
        )
    return donor


def _used(models: Models, model: hs.Model, token: int, change: Header) -> Header:
    """Describe what a state was changed with: the state of text B, or the direction and
    its strength.
    """
    if change["kind"] == "replace":
        other = models.states(model, _needed(change, "text"))
        donor = _donor(other, token, change)
        return {"token": donor, "string": other.tokens.strings[donor]}
    if change["kind"] == "steer":
        return {
            "toward": change["toward"],
            "away": change["away"],
            "strength": change.get("strength", 1.0),
        }
    return {}


def _continuation(models: Models, model: hs.Model, arguments: Header) -> Header:
    """What the model writes after a text, and what it writes when one state of the text
    is changed.
    """
    reason = cannot_generate(model)
    if reason:
        raise TextError(
            f"{model.name} cannot continue the text",
            reason,
            "Choose a model that writes text.",
        )
    text, token, site = (
        arguments["text"],
        arguments["token"],
        Site.parse(arguments["site"]),
    )
    inputs = model.encode(text)
    check_new_tokens(model, inputs, arguments["new_tokens"])
    with progress.status("Writing on"):
        written = {
            "before": generate(model, inputs, arguments["new_tokens"], None)[0][0]
        }
        change = arguments.get("change")
        if change is not None:
            with hs.editing(model, {site: _change(models, model, site, token, change)}):
                written["after"] = generate(
                    model, inputs, arguments["new_tokens"], None
                )[0][0]
    return {name: plain(words) for name, words in written.items()}


def _needed(change: Header, name: str) -> str:
    if not change.get(name):
        raise TextError(
            f"Cannot {change['kind']} a state",
            f"no text was given for {name!r}",
            "Give one.",
        )
    return str(change[name])
