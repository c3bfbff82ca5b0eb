"""Poolings: the ways to make one vector of the states of a text's tokens.

Everything that checks, explains or computes a pooling reads `POOLINGS`: the functions,
the commands, the forms of the app and the pages. To add one, add it there; only the
docs name poolings themselves.
This module imports neither torch nor numpy, because `--help` lists the names.

>>> NAMES
('mean', 'mean:all', 'max', 'last', 'first', 'cls')
>>> parse_pooling("mean"), parse_pooling("-2"), meaning_of(3)
('mean', -2, 'token 3 of each text')
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from hiddenscope.errors import ArgumentError, Error, StatesError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Pooling: TypeAlias = str | int
"""The name of a pooling, or the position of a token (negative from the end)."""


@dataclass(frozen=True)
class NamedPooling:
    """What a pooling computes: the state at one position, or a reduction over tokens.

    `reduce` takes the states of one text `[site, token, width]` and the dtype that sums
    are computed in. With `requires_cls`, every text must begin with the tokenizer's
    classification token.
    """

    meaning: str
    position: int | None = None
    reduce: "Callable[[Tensor, torch.dtype], Tensor] | None" = None
    requires_cls: bool = False

    def __post_init__(self) -> None:
        assert (self.position is None) != (self.reduce is None), "it has one of the two"


def _mean(states: "Tensor", dtype: "torch.dtype") -> "Tensor":
    return states.mean(1, dtype=dtype)


SINKLESS = "mean:sinkless"
"""What analyses mean by "mean". In files "mean" is, as it always was, of all tokens."""

POOLINGS = {
    "mean": NamedPooling("the mean over the tokens of each text", reduce=_mean),
    "mean:all": NamedPooling("the mean over all tokens of each text", reduce=_mean),
    SINKLESS: NamedPooling(
        "the mean over the tokens of each text but sinks", reduce=_mean
    ),
    "max": NamedPooling(
        "the maximum over the tokens of each text",
        reduce=lambda states, dtype: states.amax(1),
    ),
    "last": NamedPooling("the last token of each text", position=-1),
    "first": NamedPooling("the first token of each text", position=0),
    "cls": NamedPooling(
        "the classification token of each text", position=0, requires_cls=True
    ),
}
NAMES = tuple(name for name in POOLINGS if name != SINKLESS)
CHOICES = f"{', '.join(NAMES)} or a position"
"""What a caller may give, for help texts and errors."""


@dataclass(frozen=True)
class ScorePooling:
    """One score for a text, of those that a probe gives its tokens.

    What it weighs depends on the probe, so it is learnt with one: no vector stands for
    a text. `reduce` takes scores `[..., text, token]`, which of them are `real` and no
    padding, the inputs of a softmax over tokens (where they are learnt) and the
    setting: "rolling:64" has windows of 64 tokens.
    """

    meaning: str
    reduce: "Callable[..., Tensor]"
    setting: float = 0.0


def _rolling(scores: "Tensor", real: "Tensor", _: object, window: float) -> "Tensor":
    """Return the highest mean of a window, which is no longer than the text."""
    from torch.nn.functional import pad

    longest = scores.shape[-1]
    size = max(1, int(min(window, longest)))
    sizes = real.sum(-1, keepdim=True).clamp(max=size)
    sums = (scores * real).cumsum(-1)
    means = (sums - pad(sums, (size, 0))[..., :longest]) / sizes
    is_whole = real & (real.cumsum(-1) >= sizes)
    return means.masked_fill(~is_whole, float("-inf")).amax(-1)


def _weighted(scores: "Tensor", real: "Tensor", logits: "Tensor") -> "Tensor":
    weights = logits.masked_fill(~real, float("-inf")).softmax(-1)
    return (weights * scores).sum(-1)


SCORE_POOLINGS = {
    "rolling": ScorePooling(
        "the highest mean score of {:g} tokens in a row of each text", _rolling, 16
    ),
    "softmax": ScorePooling(
        "the mean score of the tokens of each text, weighted by a softmax of the"
        " scores at temperature {:g}",
        lambda scores, real, _, temperature: _weighted(
            scores, real, scores / temperature
        ),
        1.0,
    ),
    "attention": ScorePooling(
        "the mean score of the tokens of each text, weighted by attention that is"
        " learnt with the probe",
        lambda scores, real, logits, _: _weighted(scores, real, logits),
    ),
}


def score_pooling(pool: Pooling | None) -> ScorePooling | None:
    """Return the pooling of scores that is named; None for one of states.

    >>> score_pooling("rolling:8").setting, score_pooling("mean")
    (8.0, None)
    """
    name, _, setting = str(pool).partition(":")
    entry = SCORE_POOLINGS.get(name)
    if entry is None or not setting:
        return entry
    try:
        value = float(setting)
    except ValueError:
        value = 0.0
    if not entry.setting or not 0 < value < float("inf"):
        raise ArgumentError(
            f"No pooling {str(pool)[:40]!r}",
            "a window is a number of tokens and a temperature a number above 0",
            "Give rolling:16 or softmax:0.5.",
        )
    return replace(entry, setting=value)


def parse_pooling(
    pool: object, error: type[Error] | None = None, *, scores: bool = False
) -> Pooling:
    """Return the name of a pooling, or a position as an integer; refuse all else.

    The refusal is an `error`, if one is given. A probe takes those of `scores`.
    """
    if isinstance(pool, str) and pool in POOLINGS:
        return pool
    if isinstance(pool, str) and score_pooling(pool):
        if scores:
            return pool
        refusal = error or ArgumentError
        raise refusal(
            f"Cannot pool states by {pool[:40]!r}",
            "it pools the scores that a probe gives to tokens",
            f"Use it in hs.probe; states are pooled by {CHOICES}.",
        )
    if isinstance(pool, str) and pool == "each":
        refusal = error or ArgumentError
        raise refusal(
            'Cannot pool by "each"',
            "it does not pool: every token is a row of its own",
            "Give hs.each_token(source) in place of the source, and no pooling.",
        )
    if isinstance(pool, str) and pool.removeprefix("-").isdecimal():
        return int(pool)
    try:
        # True and False are integers to Python, but nobody means a position by them.
        if not isinstance(pool, bool):
            return operator.index(pool)  # type: ignore[arg-type]
    except TypeError:
        pass
    refusal = error or StatesError
    of_scores = f", or, of scores, {', '.join(SCORE_POOLINGS)}" if scores else ""
    raise refusal(
        f"No pooling {str(pool)[:40]!r}",
        "it does not say how to make one vector of the tokens of a text",
        f"Choose {CHOICES}{of_scores}.",
    )


def vector_pooling(
    pool: object, error: type[Error] | None = None, *, scores: bool = False
) -> Pooling:
    """Return the pooling that a user of an analysis names, as `parse_pooling` does.

    >>> vector_pooling("mean"), vector_pooling("mean:all"), vector_pooling("last")
    ('mean:sinkless', 'mean:all', 'last')
    """
    parsed = parse_pooling(pool, error, scores=scores)
    return SINKLESS if parsed == "mean" else parsed


def refuse_pooled(states: object, problem: str) -> None:
    """Raise StatesError if the rows of a store stand for whole texts."""
    if getattr(states, "pooled", None) is not None:
        reason = "each row stands for a whole text"
        remedy = "Extract the states of every token: hs.extract without pool."
        raise StatesError(problem, reason, remedy)


def position_of(pool: Pooling) -> int | None:
    """Return the position that a pooling takes; None if it reduces over all tokens."""
    if isinstance(pool, int):
        return pool
    return POOLINGS[pool].position


def requires_cls(pool: Pooling) -> bool:
    """Return whether every text must begin with the classification token.

    >>> requires_cls("cls"), requires_cls("first"), requires_cls(0)
    (True, False, False)
    """
    return isinstance(pool, str) and POOLINGS[pool].requires_cls


def meaning_of(pool: Pooling) -> str:
    """Return what stands for a text, in words.

    >>> meaning_of("mean")
    'the mean over the tokens of each text'
    """
    if isinstance(pool, int):
        return f"token {pool} of each text"
    scored = score_pooling(pool)
    if scored is not None:
        return scored.meaning.format(scored.setting)
    return POOLINGS[pool].meaning
