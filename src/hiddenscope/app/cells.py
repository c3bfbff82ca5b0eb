"""Cells: what the worker keeps between two questions, and answers to what only the page
asks, of a grid and of one state in it.

The norm of every state of a text, and what a token reads in each layer. What a state is
called elsewhere, what is near to it, what a lens reads there, and what the model
predicts or writes once it is changed. Of stored states, the norms of one text, and the
texts or the states that are nearest to a query.
"""

import errno
import json
import os
import re
from collections import OrderedDict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xarray
from torch import Tensor

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.analyses.features.compute import written_words
from hiddenscope.analyses.steer.continuations import (
    cannot_generate,
    check_new_tokens,
    continue_prompts,
)
from hiddenscope.analyses.steer.sweep import masked_model
from hiddenscope.app.answers import pack_result
from hiddenscope.app.cache import StoredResult
from hiddenscope.causes.encoding import encode_contrasts
from hiddenscope.errors import Error, FileError, SiteError, TextError, TooLarge
from hiddenscope.files import explained, identity, temporary_beside, to_disk
from hiddenscope.passes import Change
from hiddenscope.results import Result
from hiddenscope.results.dataset import Coordinates, Variables, to_dataset
from hiddenscope.results.sentences import model_name, quoted_token
from hiddenscope.sites import Site, to_alias
from hiddenscope.states import Pair, States, load_states
from hiddenscope.workers import Header

MAX_MODELS = 2
MAX_CAPTURES = 16
MAX_CAPTURED_BYTES = 256 * 2**20
NEAREST = 8
PREDICTIONS = 10
# Characters of a text in a list of search results.
MAX_CHARACTERS = 300
ONLY_LOADING = re.compile("Load it with task=.*")

StoredStates: TypeAlias = hs.Store | States | Pair


class Models:
    """Loaded models, states of the last texts, and the stored states that are open.

    A page asks many questions about one text. Only a new text is computed.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self._loaded: OrderedDict[str, hs.Model] = OrderedDict()
        self._captured: OrderedDict[tuple[int, str], States] = OrderedDict()
        self._opened: tuple[str, StoredStates] | None = None
        self._dictionary: tuple[Any, hs.Dictionary] | None = None

    def get(self, choice: Header) -> hs.Model:
        """Return the model of a choice, loading it from its path if needed."""
        path, dtype = choice["path"], choice.get("dtype")
        key = json.dumps([path, dtype, choice.get("identity")])
        if key not in self._loaded:
            while len(self._loaded) >= MAX_MODELS:
                self._loaded.popitem(last=False)
                # These are found by the id of their model, which Python may give to
                # the next one.
                self._captured.clear()
                self._dictionary = None
            with progress.status(f"Loading {Path(path).name}"):
                self._loaded[key] = hs.load(path, dtype=dtype, device=self.device)
        self._loaded.move_to_end(key)
        return self._loaded[key]

    def stored_states(self, choice: Header) -> StoredStates:
        """Return the states in a store or a file; the last ones stay open."""
        key = json.dumps([choice["path"], choice["identity"]])
        if self._opened is None or self._opened[0] != key:
            self._opened = None
            path = Path(choice["path"])
            states = hs.open(path) if path.is_dir() else load_states(path)
            self._opened = key, states
        return self._opened[1]

    def dictionary(
        self, path: str, model: hs.Model | None, site: str = ""
    ) -> hs.Dictionary:
        """Return a dictionary, proved on the model; the last one stays."""
        key = path, identity(sorted(Path(path).iterdir())), id(model), site
        if self._dictionary is None or self._dictionary[0] != key:
            self._dictionary = None
            self._dictionary = key, hs.Dictionary.read(path, model, site)
        return self._dictionary[1]

    def states(self, model: hs.Model, text: str) -> States:
        """Return the states of one text, at every layer and final."""
        key = id(model), text
        if key not in self._captured:
            captured = model.capture(text)
            if not isinstance(captured, States):
                raise TextError(
                    "No grid of one text",
                    f"{model.name} has an encoder and a decoder",
                    "Ask an analysis in its place: lens, profile, compare.",
                )
            self._captured[key] = captured
            # Drop the states that were not used for longest, down to the limits.
            total = sum(states.values.nbytes for states in self._captured.values())
            while len(self._captured) > 1:
                if len(self._captured) <= MAX_CAPTURES and total <= MAX_CAPTURED_BYTES:
                    break
                _, dropped = self._captured.popitem(last=False)
                total -= dropped.values.nbytes
        self._captured.move_to_end(key)
        return self._captured[key]


def in_page(error: Error) -> str:
    """Return what an error says, with a remedy that the page has.

    >>> in_page(Error("No logits", "it has no head", "Load it with task='causal-lm'."))
    'No logits: it has no head. Choose a model that predicts tokens.'
    """
    return ONLY_LOADING.sub("Choose a model that predicts tokens.", str(error))


def describe_state(models: Models, request: Header) -> Header:
    """Return what is known of one state, and what a change of it predicts."""
    model = models.get(request["model"])
    arguments = request["arguments"]
    text, token = arguments["text"], arguments["token"]
    site = Site.parse(arguments["site"])
    states = models.states(model, text)
    if site.part:
        inner = model.capture(text, site)
        assert isinstance(inner, States), "a model with one stack"
        states = inner
    if site not in states.sites or token >= len(states.tokens):
        reason = (
            f"it has {states.sites[0]} to {states.sites[-1]} and {len(states.tokens)}"
            " tokens"
        )
        raise SiteError(
            f"No state at {site}, token {token}", reason, "Choose a cell of the grid."
        )
    # What the layer would predict there, or why that cannot be said.
    lens: list[Header] | str
    try:
        result = hs.lens(model, text, k=PREDICTIONS, sites=site)
        cell = result.data.sel(site=str(site)).isel(token=token)
        lens = _word_list(
            cell["word"].values.tolist(), cell["probability"].values.tolist()
        )
    except Error as error:
        lens = in_page(error)
    described = {
        "site": str(site),
        "token": token,
        "string": states.tokens.strings[token],
        "id": int(states.tokens.ids[token]),
        "names": _names(model, site, token),
        "norm": float(states[site][token].to(torch.float64).norm()),
        "nearest": _nearest(states, site, token),
        "model": model.name,
        "lens": lens,
        "before": _predict(model, text),
    }
    if "dictionary" in arguments:
        described["features"] = _strongest_features(models, model, site, arguments)
    change = arguments.get("change")
    if change is not None:
        edit, used = _build_change(models, model, site, arguments)
        logits = hs.edit(model, [text], {site: edit}, (), logits=True).logits
        described["change"] = change["kind"]
        described["used"] = used
        described["after"] = _likeliest(model, logits)
    return described


def _strongest_features(
    models: Models, model: hs.Model, site: Site, arguments: Header
) -> list[Header] | str:
    """Return the features that write most in a state, or why there are none."""
    try:
        dictionary = models.dictionary(arguments["dictionary"], model)
        if str(site) not in (dictionary.reads, dictionary.writes):
            return f"The dictionary is of {dictionary.writes}."
        states: Any = model.capture(arguments["text"], dictionary.reads)
        state = states[dictionary.reads][[arguments["token"]]]
        (activations,) = dictionary.activations(state)
        sizes = activations.abs() * dictionary.directions.norm(dim=1)
        best = sizes.topk(min(NEAREST, int((sizes > 0).sum()))).indices
        words = written_words(model, dictionary, best)
    except Error as error:
        return in_page(error)
    names = "feature", "activation", "words"
    rows = zip(best.tolist(), activations[best].tolist(), words, strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _names(model: hs.Model, site: Site, token: int) -> dict[str, str]:
    """Return the state in the notations of other libraries."""
    source = model.source(site.stack)
    depth, final = source.depth, source.final
    assert depth is not None, "a loaded model knows its depth"
    assert final is not None, "a loaded model knows whether it has a final norm"
    names = {"hiddenscope": f'states["{site}"][{token}]'}
    if str(site) in source.reported:
        prefix = f"{site.stack}_" if site.stack else ""
        entry = f"{prefix}hidden_states[{source.reported.index(str(site))}]"
        names["Hugging Face"] = f"outputs.{entry}[0, {token}]"
    alias = to_alias(site, "transformer_lens", depth=depth, final=final)
    if alias:
        names["TransformerLens"] = f'cache["{alias}"][0, {token}]'
    return names


def _nearest(states: States, site: Site, token: int) -> list[Header]:
    """Return the states of the same text with the highest cosine."""
    values = states.values.to(torch.float32)
    # A state may be all zeros.
    lengths = values.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    directions = values / lengths
    row = states.sites.index(site)
    cosines = directions @ directions[row, token]
    cosines[row, token] = -torch.inf
    best = cosines.flatten().topk(min(NEAREST, cosines.numel() - 1))
    nearest = []
    for cosine, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        near_row, near_token = divmod(place, cosines.shape[1])
        nearest.append(
            {
                "site": str(states.sites[near_row]),
                "token": near_token,
                "string": states.tokens.strings[near_token],
                "cosine": cosine,
            }
        )
    return nearest


def _predict(model: hs.Model, text: str) -> list[Header] | str:
    """Return the likeliest next tokens after a text, or why there are none."""
    try:
        logits = hs.record(model, [text], (), logits=True).logits
    except TooLarge:
        raise
    except Error as error:
        return in_page(error)
    return _likeliest(model, logits)


def _likeliest(model: hs.Model, logits: object) -> list[Header]:
    """Return the likeliest tokens after the last position."""
    assert isinstance(logits, Tensor), "the pass was run with logits=True"
    probabilities = logits[-1].to(torch.float32).softmax(-1)
    best = probabilities.topk(min(PREDICTIONS, len(probabilities)))
    with model.lock:
        words = [model.text_encoder.string(token) for token in best.indices.tolist()]
    return _word_list(words, best.values.tolist())


def _word_list(words: list[str], probabilities: list[float]) -> list[Header]:
    pairs = zip(words, probabilities, strict=True)
    return [{"word": word, "probability": probability} for word, probability in pairs]


def suggest_answers(models: Models, request: Header) -> Header:
    """Choose two answers that tell two texts apart, among the likeliest next tokens."""
    model = models.get(request["model"])
    problem = "No answers were found for these texts"
    remedy = "Type the two answers, each with its leading space."
    if masked_model(model):
        reason = f"{model.name} predicts masked tokens, not the next one"
        raise TextError(problem, reason, remedy)
    a, b = request["arguments"]["a"], request["arguments"]["b"]
    likely_words = []
    for text in (a, b):
        predictions = _predict(model, text)
        if isinstance(predictions, str):
            raise TextError(
                problem, predictions, "Choose a model that predicts tokens."
            )
        likely_words.append([prediction["word"] for prediction in predictions])
    for answer, other in product(*likely_words):
        # A contrast refuses answers that are equal, or more than one token.
        try:
            encode_contrasts(model, [hs.Contrast(a, b, answer, other)])
        except TextError:
            continue
        return {"answer": answer, "other": other}
    raise TextError(problem, "no two likely tokens differ", remedy)


def continue_text(models: Models, request: Header) -> Header:
    """Return what the model writes after a text, with and without a change."""
    model = models.get(request["model"])
    arguments = request["arguments"]
    reason = cannot_generate(model)
    if reason:
        raise TextError(
            f"{model.name} cannot continue the text",
            reason,
            "Choose a model that writes text.",
        )
    new_tokens = arguments["new_tokens"]
    site = Site.parse(arguments["site"])
    inputs = model.encode(arguments["text"])
    check_new_tokens(model, inputs, new_tokens)
    with progress.status("Writing on"):
        before = continue_prompts(model, inputs, new_tokens)[0][0]
        continuation = {"before": before}
        if arguments.get("change") is not None:
            edit, _ = _build_change(models, model, site, arguments)
            with hs.editing(model, {site: edit}):
                after = continue_prompts(model, inputs, new_tokens)[0][0]
            continuation["after"] = after
    return continuation


def _build_change(
    models: Models, model: hs.Model, site: Site, arguments: Header
) -> tuple[Change, Header]:
    """Return a change as `hs.edit` takes it, and what the page shows of it."""
    token, change = arguments["token"], arguments["change"]
    strength = change.get("strength", 1.0)
    if change["kind"] == "ablate":
        return hs.Scale(0.0, tokens=token), {}
    if change["kind"] == "replace":
        donor_states = models.states(model, _required(change, "text"))
        # By default the same token of text B.
        donor_token = int(change.get("token", token))
        if donor_token >= len(donor_states.tokens):
            raise TextError(
                f"No state to put at token {token}",
                f"text B has {len(donor_states.tokens)} tokens",
                "Choose an earlier cell, or a longer text B.",
            )
        string = donor_states.tokens.strings[donor_token]
        replacement = hs.Replace(donor_states[site][donor_token], tokens=token)
        return replacement, {"token": donor_token, "string": string}
    if change["kind"] in ("add", "scale"):
        dictionary = models.dictionary(arguments["dictionary"], model)
        feature = dictionary.at(str(site))[change["feature"]]
        used = {"feature": change["feature"], "strength": strength}
        if change["kind"] == "add":
            return hs.Add(feature, tokens=token, scale=strength), used
        return hs.Scale(strength, tokens=token, along=feature), used
    toward, away = _required(change, "toward"), _required(change, "away")
    toward_state = models.states(model, toward)[site][-1]
    away_state = models.states(model, away)[site][-1]
    direction = (toward_state - away_state).to(torch.float32)
    addition = hs.Add(direction, tokens=token, scale=strength)
    return addition, {"toward": toward, "away": away, "strength": strength}


def _required(change: Header, name: str) -> str:
    if not change.get(name):
        raise TextError(
            f"Cannot {change['kind']} a state",
            f"no text was given for {name!r}",
            "Give one.",
        )
    return str(change[name])


def reads_of(result: Result, token: int) -> tuple[Result, str]:
    """Return what a token reads in each layer, from a result of `hs.attention`, and a
    title for it.

    A cell has the largest weight that any head puts on a token, and the mean over
    heads; both also value-weighted.
    """
    data = result.data
    queries = data["query_position"].to_numpy().tolist()
    if token not in queries:
        raise SiteError(
            f"No attention of token {token}",
            f"the result has the tokens {queries[0]} to {queries[-1]}",
            "Choose one of these.",
        )
    row = data.isel(query=queries.index(token))
    cells = ("site", "token")
    variables: Variables = {}
    kinds = {"pattern": ("weight", ""), "weighted": ("value-weighted weight", "L2")}
    for name, (words, unit) in kinds.items():
        weights = row[name].transpose("layer", "head", "key")
        variables[f"largest_{name}"] = (
            cells,
            weights.max("head").to_numpy(),
            {"long_name": f"largest {words} of any head", "units": unit},
        )
        variables[f"mean_{name}"] = (
            cells,
            weights.mean("head").to_numpy(),
            {"long_name": f"mean {words} of all heads", "units": unit},
        )
    coords: Coordinates = {
        # A row of the page's grid is the layer that a block makes.
        "site": [site.rpartition(".")[0] for site in data["site"].to_numpy().tolist()],
        "string": ("token", data["key_string"].to_numpy()),
        "position": ("token", data["key_position"].to_numpy()),
    }
    string = quoted_token(str(row["query_string"].item()))
    title = f"What {string}, token {token}, reads in each layer of {model_name(result)}"
    return Result("reads", to_dataset(variables, coords), {}, result.source), title


def show_stored_text(models: Models, request: Header) -> StoredResult:
    """Return the norm of every stored state of one text."""
    text = request["arguments"]["text"]
    states = _states_of_text(models.stored_states(request["arguments"]), text)
    titles = (
        f"The norm of every state of text {text}, of {states.source.model}",
        f"The norm along the layers of text {text}",
    )
    return pack_result(norms_of(states), titles)


def find_texts(models: Models, request: Header) -> StoredResult:
    """Return the stored texts that are nearest to a query."""
    arguments = request["arguments"]
    stored = models.stored_states(arguments)
    query = models.get(request["model"]), arguments["query"]
    result = hs.search(stored, query, arguments["k"], site=arguments.get("site"))
    return _pack_search(result, stored, None)


def find_states(models: Models, request: Header) -> StoredResult:
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


def fit_dictionary(models: Models, request: Header) -> StoredResult:
    """Train a dictionary on stored states, and keep it in a folder of its own."""
    arguments = request["arguments"]
    folder = Path(arguments["to"])
    stored = models.stored_states(request["store"])
    if isinstance(stored, Pair):
        reason = "they are of an encoder and a decoder"
        remedy = "Fit it in Python: hs.Pair.load(path).decoder."
        raise TextError("Cannot train on these states", reason, remedy)
    problem = f"Cannot keep {folder.parent.name}/{folder.name}"
    remedy = "Give another name."
    with explained(problem, remedy):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # An empty folder holds nothing that could be lost.
        is_free = not os.path.lexists(folder)
        if not is_free and folder.is_dir():
            is_free = not any(folder.iterdir())
        if not is_free:
            reason = "there is something of that name already"
            raise FileError(problem, reason, remedy)
    # Nobody else puts anything into a folder that does not have its name yet.
    with explained(problem, remedy), temporary_beside(folder, folder=True) as fresh:
        fitted = hs.Dictionary.fit(
            stored,
            arguments["site"],
            features=arguments["features"],
            k=arguments["k"],
            training=hs.Training(arguments["tokens"], device=models.device),
        )
        fitted.save(fresh / folder.name)
        folder = _publish(fresh / folder.name, folder)
    name = f"{folder.parent.name}/{folder.name}"
    left, dead = fitted.facts["unexplained"], fitted.facts["dead"]
    findings = (
        f"{fitted!r} is kept below the folder of --root, in {name}.",
        f"{left:.1%} of the variance was left in training; {dead:,} are dead.",
    )
    return StoredResult({"title": f"The dictionary {name}", "findings": findings})


def _publish(trained: Path, folder: Path) -> Path:
    """Give a folder its name, or the next that is free; return where it is."""
    name = folder.name
    taken = errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR
    number = 1
    while True:
        try:
            os.rename(trained, folder)
        except OSError as error:
            if error.errno not in taken:
                raise
            number += 1
            folder = folder.with_name(f"{name}-{number}")
        else:
            to_disk(folder.parent)
            return folder


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
) -> StoredResult:
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
        assert not isinstance(stored, Pair), "the states of a pair are not searched"
        texts = hits["text"].to_numpy().tolist()
        # Positions would not do: those of a window begin above 0.
        pairs = zip(hits["number"].to_numpy().tolist(), texts, strict=True)
        tokens = [row - stored.tokens.rows(text).start for row, text in pairs]
    strings = [""] * len(texts)
    if "string" in hits:
        strings = hits["string"].to_numpy().tolist()
    rows = []
    for text, token, string, score in zip(texts, tokens, strings, scores, strict=True):
        # A store may lack texts of its corpus, and counts those that it has.
        number = int(stored.texts[text]) if isinstance(stored, hs.Store) else text
        if (number, token) != query_state:
            shown = string[:MAX_CHARACTERS]
            rows.append(
                {"text": number, "token": token, "string": shown, "score": score}
            )
    packed = pack_result(result)
    return replace(packed, header={**packed.header, "nearest": rows})
