"""What would each layer say, if it were the last?

asked     which states of which texts a lens reads, and is fitted on
reading   what logits say, a few rows at a time
findings  what was read, as labelled arrays and as facts
maps      what a lens makes of a state before the tail reads it
tuned     the map that brings a layer nearest to the last
jacobian  the mean derivative of the last layer
fitted    a lens that was fitted, and its file
"""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.analyses.lens.asked import Asked, listed, plan_of, states_of
from hiddenscope.analyses.lens.findings import Found, dataset, facts, following
from hiddenscope.analyses.lens.fitted import Lens, lens_of
from hiddenscope.analyses.lens.maps import carried
from hiddenscope.analyses.lens.reading import Read, read
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Texts
from hiddenscope.passes.tail import Tail
from hiddenscope.results import Result
from hiddenscope.states import States, Tokens, join

NEXT = "next"


def lens(
    model: Model,
    text: Texts,
    *,
    k: int = 5,
    target: str | int | None = None,
    lens: str | os.PathLike[str] | Lens = "logit",
    sites: Any = "layer.*",
    targets: Texts | None = None,
) -> Result:
    """What every layer would say at every token: the model's own tail, applied to its states.

    For each site and token the `k` best words with their probabilities, the entropy, and the KL divergence from the
    model's own answer to this one. `target` is one token, or "next" for the token that comes next in the text: its
    probability and its rank. Along the sites, how often the best word is the model's own, and the true next token.
    `lens` is "logit", a lens that was fitted (`hs.Lens.fit`), which takes the states nearer to the last layer first,
    or the path of one that was saved.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.lens(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["word"].sizes), float(result.data["kl"].sel(site="layer.3").max())
    ({'site': 4, 'token': 3, 'rank': 5}, 0.0)
    """
    plan = plan_of(model, sites)
    fitted = lens_of(model, lens)
    tails = [Tail(model, plan.last), *([Tail(model, plan.final)] if plan.final else [])]
    _countable(k, tails[0].words, model)
    aim = _aim(model, target, plan.causal)
    texts = listed(model, text, targets)
    if aim == NEXT:
        _has_next(texts)
    reads: list[Read] = []
    captured: list[States] = []
    with progress.track("Reading", total=sum(texts.lengths) * len(plan.rows)) as advance:
        for some in texts.groups():
            states = states_of(model, texts, some, plan)
            layers = states.select(sites=list(plan.layers)).values
            parts = [(tails[0], layers if fitted is None else carried(layers, plan.layers, fitted.maps))]
            parts += [(tails[1], states[plan.final][None])] if plan.final else []
            aims = _aims(aim, states.tokens)
            reads.append(read(parts, len(plan.layers) - 1, k=k, targets=aims, advance=advance))
            captured.append(_only_tokens(states))
    found = Found.of(reads, join(captured).tokens, plan.rows, plan.asked, causal=plan.causal)
    with model.lock:
        name = None if aim is None else "the next token" if aim == NEXT else repr(model.encoder.string(int(aim)))
        data = dataset(found, model.encoder.string, name)
        shown = facts(found, data, aim if isinstance(aim, int) else None, name, model.encoder.string)
    told = {"lens": "logit" if fitted is None else fitted.kind, "words": tails[0].words, "tail": tails[0].found.why}
    return Result("lens", data, told | shown, captured[0].source)


def _countable(k: Any, words: int, model: Model) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= words:
        reason = f"{model.name} has {words:,} to choose from"
        raise PassError(f"The {k!r} best words", reason, f"Give a whole number from 1 to {words:,}.")


def _aim(model: Model, target: str | int | None, causal: bool) -> str | int | None:
    """The one token that is meant, or the next of each."""
    if target is None:
        return None
    if target == NEXT:
        if not causal:
            reason = f"{model.name} sees the whole text, and does not say what comes next"
            raise TextError("The next token as a target", reason, "Give a token.")
        return NEXT
    with model.lock:
        return model.encoder.one(target)


def _aims(aim: str | int | None, tokens: Tokens) -> NDArray[np.int64] | None:
    if aim is None or isinstance(aim, int):
        return None if aim is None else np.full(len(tokens), aim, dtype=np.int64)
    return following(tokens)


def _has_next(texts: Asked) -> None:
    short = next((number for number, length in enumerate(texts.lengths) if length < 2), None)
    if short is not None:
        raise TextError(f"Text {short}", "it has one token, and none comes next", "Give a longer one.")


def _only_tokens(states: States) -> States:
    return States(states.sites, states.values[..., :0], states.tokens, states.source)
