"""Tokens: which rows states have, and what each of them is."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hiddenscope.errors import StatesError

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of some texts, one row each, text after text; a list of numbers is taken where an array is kept.

    `text` says which text a row belongs to, `strings` holds the token as a reader knows it, `spans` its characters in
    the text (-1 where it has none). `texts` is None when only ids were given; `count` is how many texts there are.

    >>> tokens = Tokens(None, text=[0, 0, 1], positions=[0, 1, 0], ids=[5, 6, 7], strings=("a", "b", "c"))
    >>> len(tokens), tokens.count, tokens.lengths.tolist(), tokens.select([2]).strings
    (3, 2, [2, 1], ('c',))
    """

    texts: tuple[str, ...] | None
    text: Ints
    positions: Ints
    ids: Ints
    strings: tuple[str, ...]
    spans: Ints = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    count: int = -1

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("text", "positions", "ids"):
            put(self, name, _ints(getattr(self, name), name, len(self.strings)))
        put(self, "spans", _ints(self.spans if len(self.spans) else np.full((len(self), 2), -1), "spans", len(self), 2))
        put(self, "strings", tuple(self.strings))
        put(self, "texts", None if self.texts is None else tuple(self.texts))
        if self.count < 0:
            last = int(self.text[-1]) + 1 if len(self) else 0
            put(self, "count", last if self.texts is None else len(self.texts))
        if self.texts is not None and len(self.texts) != self.count:
            raise StatesError(f"Tokens of {self.count} texts", f"there are {len(self.texts)}", "Give one of them.")
        if len(self) and not (self.text[0] >= 0 and self.text[-1] < self.count and (np.diff(self.text) >= 0).all()):
            reason = f"the rows are not text after text, counted from 0 to {self.count - 1}"
            raise StatesError("Tokens of several texts", reason, "Put the rows of one text together, in order.")

    def __len__(self) -> int:
        return len(self.strings)

    def __repr__(self) -> str:
        return f"Tokens({len(self)} of {self.count} texts: {shown(self.strings)})"

    @property
    def lengths(self) -> Ints:
        """How many rows each text has."""
        return np.bincount(self.text, minlength=self.count)

    def rows(self, text: int) -> slice:
        """Where the rows of one text are; -1 is the last text.

        >>> Tokens(("a b", "c"), [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", " b", "c")).rows(-1)
        slice(2, 3, None)
        """
        index = operator.index(text)
        if not -self.count <= index < self.count:
            reason = f"there are {self.count}" if self.count else "there are none"
            raise StatesError(f"No text {index}", reason, f"Ask for 0 to {self.count - 1}, or -1 for the last.")
        ends = np.searchsorted(self.text, [index % self.count, index % self.count + 1])
        return slice(int(ends[0]), int(ends[1]))

    def select(self, rows: ArrayLike | slice) -> "Tokens":
        """Some rows, by mask, slice or numbers; they keep their order, and the texts their numbers."""
        kept = chosen_rows(rows, len(self))
        strings = tuple(self.strings[row] for row in kept)
        text, positions, ids = self.text[kept], self.positions[kept], self.ids[kept]
        return Tokens(self.texts, text, positions, ids, strings, self.spans[kept], self.count)

    def of(self, text: int) -> "Tokens":
        """The tokens of one text, which becomes text 0."""
        rows = self.rows(text)
        texts = None if self.texts is None else (self.texts[text],)
        zeros = np.zeros_like(self.text[rows])
        return Tokens(texts, zeros, self.positions[rows], self.ids[rows], self.strings[rows], self.spans[rows], 1)

    def equals(self, other: "Tokens") -> bool:
        """Whether every field is the same."""
        arrays = ((self.text, other.text), (self.positions, other.positions), (self.ids, other.ids))
        same = all(np.array_equal(mine, theirs) for mine, theirs in (*arrays, (self.spans, other.spans)))
        return same and (self.texts, self.strings, self.count) == (other.texts, other.strings, other.count)


def plain(text: str) -> str:
    """A name that is safe on a terminal."""
    return text if text.isprintable() and len(text) <= 100 else ascii(text[:100])


def shown(strings: Sequence[str], most: int = 8) -> str:
    """A few tokens, quoted and escaped, each and all of them short."""
    short = [repr(string if len(string) <= 20 else string[:19] + "…") for string in strings[:most]]
    return " ".join([*short, "…"] if len(strings) > most else short) or "none"


def _ints(given: ArrayLike, name: str, *shape: int) -> Ints:
    array = np.asarray(given)
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        reason = f"{name} is {array.dtype} {list(array.shape)}"
        raise StatesError(f"Tokens with {shape[0]} strings", reason, f"Give whole numbers {list(shape)}.")
    kept = array.astype(np.int64).view()
    kept.setflags(write=False)
    return kept


def chosen_rows(chosen: ArrayLike | slice, length: int) -> Ints:
    """The rows that a mask, a slice or numbers choose, in order and each once."""
    mask = np.zeros(length, dtype=bool)
    numbers = chosen if isinstance(chosen, slice) else np.atleast_1d(np.asarray(chosen))
    if isinstance(numbers, slice):
        mask[numbers] = True
    elif numbers.dtype.kind == "b" and numbers.shape == (length,):
        mask = numbers
    elif numbers.ndim == 1 and (numbers.dtype.kind in "iu" or not numbers.size):
        if numbers.size and not -length <= numbers.min() <= numbers.max() < length:
            reason = f"the numbers run from {numbers.min()} to {numbers.max()}"
            raise StatesError(f"Some of {length} tokens", reason, f"Ask for 0 to {length - 1}.")
        mask[numbers.astype(np.int64)] = True
    else:
        reason = f"{numbers.dtype} {list(numbers.shape)} chooses none"
        raise StatesError(f"Some of {length} tokens", reason, "Give a mask with one flag a token, a slice or numbers.")
    return np.flatnonzero(mask)
