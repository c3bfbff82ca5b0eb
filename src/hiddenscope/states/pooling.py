"""Poolings: the ways to make one vector of the states of a text's tokens.

Everything that checks, explains or computes a pooling reads `POOLINGS`: the functions,
the commands, the forms of the app and the pages. To add one, add it there; only the
docs name poolings themselves.
This module imports neither torch nor numpy, because `--help` lists the names.

>>> NAMES
('mean', 'max', 'last', 'first', 'cls')
>>> parse_pooling("mean"), parse_pooling("-2"), meaning_of(3)
('mean', -2, 'token 3 of each text')
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
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


POOLINGS = {
    "mean": NamedPooling(
        "the mean over the tokens of each text",
        reduce=lambda states, dtype: states.mean(1, dtype=dtype),
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
NAMES = tuple(POOLINGS)
CHOICES = f"{', '.join(NAMES)} or a position"
"""What a caller may give, for help texts and errors."""


def parse_pooling(pool: object, error: type[Error] | None = None) -> Pooling:
    """Return the name of a pooling, or a position as an integer; refuse all else.

    The refusal is an `error`, if one is given.
    """
    if isinstance(pool, str) and pool in POOLINGS:
        return pool
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
    raise refusal(
        f"No pooling {str(pool)[:40]!r}",
        "it does not say how to make one vector of the tokens of a text",
        f"Choose {CHOICES}.",
    )


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
    return POOLINGS[pool].meaning
