"""Cells: questions about one state of one text, a cell of the grid.

What it is called elsewhere, what is near to it, what a lens reads there, and what the
model predicts or writes once the state is changed.
"""

from itertools import product

import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.analyses.patch.contrast import encode_contrasts
from hiddenscope.analyses.steer.continuations import (
    cannot_generate,
    check_new_tokens,
    continue_prompts,
)
from hiddenscope.analyses.steer.reads import masked_model
from hiddenscope.app.models import Models
from hiddenscope.app.refusals import in_page
from hiddenscope.app.stores import encodable
from hiddenscope.errors import Error, SiteError, TextError, TooLarge
from hiddenscope.passes import Change
from hiddenscope.sites import Site, to_alias
from hiddenscope.states import States
from hiddenscope.workers import Header

NEAREST = 8
PREDICTIONS = 10


def describe_state(models: Models, request: Header) -> Header:
    """Return what is known of one state, and what a change of it predicts."""
    model = models.get(request["model"])
    arguments = request["arguments"]
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
    described: Header = {
        "site": str(site),
        "token": token,
        "string": states.tokens.strings[token],
        "id": int(states.tokens.ids[token]),
        "names": _names(model, site, token),
        "norm": float(states[site][token].to(torch.float64).norm()),
        "nearest": _nearest(states, site, token),
        "model": model.name,
        "lens": _read_with_lens(model, text, site, token),
        "before": _predict(model, text),
    }
    change = arguments.get("change")
    if change is not None:
        edit, used = _build_change(models, model, site, token, change)
        logits = hs.edit(model, [text], {site: edit}, (), logits=True).logits
        described["change"] = change["kind"]
        described["used"] = used
        described["after"] = _likeliest(model, logits)
    return described


def _names(model: hs.Model, site: Site, token: int) -> dict[str, str]:
    """Return the state in the notations of other libraries."""
    source = model.source(site.stack)
    depth, final = source.depth, source.final
    assert depth is not None, "a loaded model knows its depth"
    assert final is not None, "a loaded model knows whether it has a final norm"
    names = {"hiddenscope": f'states["{site}"][{token}]'}
    alias = to_alias(site, "hidden_states", depth=depth, final=final)
    if alias:
        names["Hugging Face"] = f"outputs.{alias}[0, {token}]"
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


def _read_with_lens(
    model: hs.Model, text: str, site: Site, token: int
) -> list[Header] | str:
    """Return what the layer would predict there, or why that cannot be said."""
    try:
        result = hs.lens(model, text, k=PREDICTIONS, sites=site)
    except Error as error:
        return in_page(error)
    cell = result.data.sel(site=str(site)).isel(token=token)
    return _word_list(cell["word"].values.tolist(), cell["probability"].values.tolist())


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
    token, new_tokens = arguments["token"], arguments["new_tokens"]
    site = Site.parse(arguments["site"])
    inputs = model.encode(arguments["text"])
    check_new_tokens(model, inputs, new_tokens)
    with progress.status("Writing on"):
        before = continue_prompts(model, inputs, new_tokens, None)[0][0]
        continuation = {"before": encodable(before)}
        change = arguments.get("change")
        if change is not None:
            edit, _ = _build_change(models, model, site, token, change)
            with hs.editing(model, {site: edit}):
                after = continue_prompts(model, inputs, new_tokens, None)[0][0]
            continuation["after"] = encodable(after)
    return continuation


def _build_change(
    models: Models, model: hs.Model, site: Site, token: int, change: Header
) -> tuple[Change, Header]:
    """Return a change as `hs.edit` takes it, and what the page shows of it."""
    if change["kind"] == "ablate":
        return hs.Scale(0.0, tokens=token), {}
    if change["kind"] == "replace":
        donor_states = models.states(model, _required(change, "text"))
        donor_token = _donor_token(donor_states, token, change)
        string = donor_states.tokens.strings[donor_token]
        replacement = hs.Replace(donor_states[site][donor_token], tokens=token)
        return replacement, {"token": donor_token, "string": string}
    toward, away = _required(change, "toward"), _required(change, "away")
    strength = change.get("strength", 1.0)
    toward_state = models.states(model, toward)[site][-1]
    away_state = models.states(model, away)[site][-1]
    direction = (toward_state - away_state).to(torch.float32)
    addition = hs.Add(direction, tokens=token, scale=strength)
    return addition, {"toward": toward, "away": away, "strength": strength}


def _donor_token(donor_states: States, token: int, change: Header) -> int:
    """Return the token of text B whose state is put in, by default the same one."""
    donor_token = int(change.get("token", token))
    if donor_token >= len(donor_states.tokens):
        raise TextError(
            f"No state to put at token {token}",
            f"text B has {len(donor_states.tokens)} tokens",
            "Choose an earlier cell, or a longer text B.",
        )
    return donor_token


def _required(change: Header, name: str) -> str:
    if not change.get(name):
        raise TextError(
            f"Cannot {change['kind']} a state",
            f"no text was given for {name!r}",
            "Give one.",
        )
    return str(change[name])
