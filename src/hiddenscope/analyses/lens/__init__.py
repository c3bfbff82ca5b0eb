"""What would each layer say, if it were the last?

reading   what logits say, a few rows at a time
findings  what was read, as labelled arrays and as facts
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.analyses.lens.findings import Found, dataset, facts, following
from hiddenscope.analyses.lens.reading import Read, read
from hiddenscope.errors import PassError, SiteError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Encoded, Texts
from hiddenscope.passes.tail import Tail
from hiddenscope.results import Result
from hiddenscope.sites import Site
from hiddenscope.states import States, Tokens, join

NEXT = "next"
TOKENS = 2_048  # of a group of texts whose states are held at one time


def lens(
    model: Model,
    text: Texts,
    *,
    k: int = 5,
    target: str | int | None = None,
    lens: str = "logit",
    sites: Any = "layer.*",
    targets: Texts | None = None,
) -> Result:
    """What every layer would say at every token: the model's own tail, applied to its states.

    For each site and token the `k` best words with their probabilities, the entropy, and the KL divergence from the
    model's own answer to this one. `target` is one token, or "next" for the token that comes next in the text: its
    probability and its rank. Along the sites, how often the best word is the model's own, and the true next token.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.lens(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["word"].sizes), float(result.data["kl"].sel(site="layer.3").max())
    ({'site': 4, 'token': 3, 'rank': 5}, 0.0)
    """
    plan = _plan(model, sites)
    tails = [Tail(model, plan.last), *([Tail(model, plan.final)] if plan.final else [])]
    _countable(k, tails[0].words, model)
    aim = _aim(model, target, plan.causal)
    texts = _listed(model, text, targets)
    if aim == NEXT:
        _has_next(texts)
    reads: list[Read] = []
    captured: list[States] = []
    with progress.track("Reading", total=sum(texts.lengths) * len(plan.rows)) as advance:
        for some in texts.groups():
            states = _states(model, texts, some, plan)
            parts = [(tails[0], states.select(sites=list(plan.layers)).values)]
            parts += [(tails[1], states[plan.final][None])] if plan.final else []
            aims = _aims(aim, states.tokens)
            reads.append(read(parts, len(plan.layers) - 1, k=k, targets=aims, advance=advance))
            captured.append(_only_tokens(states))
    found = Found.of(reads, join(captured).tokens, plan.rows, plan.asked, causal=plan.causal)
    with model.lock:
        name = None if aim is None else "the next token" if aim == NEXT else repr(model.encoder.string(int(aim)))
        data = dataset(found, model.encoder.string, name)
    told = {"lens": "logit", "words": tails[0].words, "tail": tails[0].found.why}
    return Result(
        "lens", data, told | facts(found, data, aim if isinstance(aim, int) else None, name), captured[0].source
    )


@dataclass(frozen=True)
class _Texts:
    """Texts one by one, with the decoder's where there are any, and how many tokens the lens sees of each."""

    texts: list[Any]
    targets: list[Any] | None
    lengths: list[int]

    def groups(self) -> Iterator[slice]:
        """Runs of texts of a few thousand tokens together."""
        begin = held = 0
        for end, length in enumerate(self.lengths):
            if held and held + length > TOKENS:
                yield slice(begin, end)
                begin, held = end, 0
            held += length
        yield slice(begin, len(self.lengths))


@dataclass(frozen=True)
class _Plan:
    """Which states are read: whole layers of the stack that the head stands on, the last always, `final` if asked."""

    layers: tuple[Site, ...]
    final: Site | None
    asked: tuple[Site, ...]
    causal: bool

    @property
    def last(self) -> Site:
        return self.layers[-1]

    @property
    def rows(self) -> tuple[Site, ...]:
        return (*self.layers, *([self.final] if self.final else []))


def _plan(model: Model, sites: Any) -> _Plan:
    stack = model.anatomy.stacks[-1]
    name = stack.name if len(model.anatomy.stacks) > 1 else None
    chosen = model.anatomy.select(sites)
    asked = tuple(site for site in chosen if site.stack == name)
    inside = [site for site in asked if site.part]
    if inside or not asked:
        what = f"{inside[0]} is inside a block" if inside else f"the head reads the {name}, and these are elsewhere"
        do = f"Ask for whole layers{f' of the {name}' if name else ''}, or `final`."
        raise SiteError(f"A lens of {model.name} at {sites}", what, do)
    last = Site(stack.depth, "", name)
    final = next((site for site in asked if site.layer is None), None)
    layers = sorted({*(site for site in asked if site.layer is not None), last})
    return _Plan(tuple(layers), final, asked, stack.causal)


def _states(model: Model, texts: _Texts, some: slice, plan: _Plan) -> States:
    targets = None if texts.targets is None else texts.targets[some]
    states = model.capture(texts.texts[some], list(plan.rows), targets=targets)
    assert isinstance(states, States), "the sites are in one stack"
    return states


def _countable(k: Any, words: int, model: Model) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= words:
        found = f"{model.name} has {words:,} to choose from"
        raise PassError(f"The {k!r} best words", found, f"Give a whole number from 1 to {words:,}.")


def _aim(model: Model, target: str | int | None, causal: bool) -> str | int | None:
    """The one token that is meant, or the next of each."""
    if target is None or isinstance(target, int):
        if isinstance(target, int) and not 0 <= target < model.encoder.vocabulary:
            found = f"the ids of {model.name} are 0 to {model.encoder.vocabulary - 1:,}"
            raise TextError(f"The target {target}", found, "Give one of these, or the token as text.")
        return target
    if target == NEXT:
        if not causal:
            found = f"{model.name} sees the whole text, and does not say what comes next"
            raise TextError("The next token as a target", found, "Give a token.")
        return NEXT
    return _one_token(model, target)


def _one_token(model: Model, target: str) -> int:
    if model.tokenizer is None:
        found = f"{model.name} was loaded without a tokenizer"
        raise TextError(f"The target {target[:40]!r}", found, "Give the token's id.")
    with model.lock:
        ids = model.tokenizer(target, add_special_tokens=False).input_ids
        bare = model.tokenizer(target.lstrip(" "), add_special_tokens=False).input_ids
        if len(ids) != 1 and len(bare) == 1 and model.encoder.string(bare[0]) == target:
            ids = bare  # tokenizers that begin every text with a space of their own
        pieces = [model.encoder.string(piece) for piece in ids]
    if len(ids) != 1:
        said = " ".join(map(repr, pieces)) or "none"
        found = f"it is {len(ids)} tokens: {said}" if ids else "it is no token at all"
        raise TextError(f"The target {target[:40]!r}", found, "Give one token, with the space before it if it has one.")
    return int(ids[0])


def _aims(aim: str | int | None, tokens: Tokens) -> NDArray[np.int64] | None:
    if aim is None or isinstance(aim, int):
        return None if aim is None else np.full(len(tokens), aim, dtype=np.int64)
    return following(tokens)


def _listed(model: Model, text: Texts, targets: Texts | None) -> _Texts:
    """The texts and the decoder's texts one by one: strings, or lists of ids."""
    two = len(model.anatomy.stacks) > 1
    if targets is not None and not two:
        raise PassError("Targets for a decoder", f"{model.name} has one stack", "Leave `targets` out.")
    with model.lock:
        encoded = model.encoder.encode(text)
        seen = model.encoder.targets(targets, len(encoded.ids)) if two else encoded
        given = None if targets is None else model.encoder.encode(targets)
    return _Texts(_items(encoded), None if given is None else _items(given), seen.lengths)


def _items(encoded: Encoded) -> list[Any]:
    return list(encoded.texts or map(list, encoded.ids))


def _has_next(texts: _Texts) -> None:
    short = next((number for number, length in enumerate(texts.lengths) if length < 2), None)
    if short is not None:
        raise TextError(f"Text {short}", "it has one token, and none comes next", "Give a longer one.")


def _only_tokens(states: States) -> States:
    return States(states.sites, states.values[..., :0], states.tokens, states.source)
