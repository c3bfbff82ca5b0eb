"""Tokens and Source: what each row of states is, and where the states come from."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError

Ints: TypeAlias = NDArray[np.int64]


@checked
@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of some texts, one row each, text after text. Lists of integers become
    arrays.

    `text` is the index of the text that a row belongs to, `strings` the token as it
    reads, `spans` its characters in the text (-1 where it has none). `texts` is None
    when only ids were given; `count` is the number of texts.

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
        put(
            self,
            "spans",
            _ints(
                self.spans if len(self.spans) else np.full((len(self), 2), -1),
                "spans",
                len(self),
                2,
            ),
        )
        put(self, "strings", tuple(self.strings))
        put(self, "texts", None if self.texts is None else tuple(self.texts))
        if self.count < 0:
            last = int(self.text[-1]) + 1 if len(self) else 0
            put(self, "count", last if self.texts is None else len(self.texts))
        if self.texts is not None and len(self.texts) != self.count:
            reason = f"count is {self.count} and there are {len(self.texts)} texts"
            raise StatesError(
                "Cannot make these tokens",
                reason,
                "Leave count out, or make them equal.",
            )
        if len(self) and not (
            self.text[0] >= 0
            and self.text[-1] < self.count
            and (np.diff(self.text) >= 0).all()
        ):
            reason = f"text must be sorted, with values from 0 to {self.count - 1}"
            raise StatesError(
                "Cannot make these tokens",
                reason,
                "Put the rows of one text together, in order.",
            )

    def __len__(self) -> int:
        return len(self.strings)

    def __repr__(self) -> str:
        return f"Tokens({len(self)} of {self.count} texts: {shown(self.strings)})"

    @property
    def lengths(self) -> Ints:
        """The number of rows of each text."""
        return np.bincount(self.text, minlength=self.count)

    def rows(self, text: int) -> slice:
        """The rows of one text; -1 is the last text.

        >>> Tokens(("a b", "c"), [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", " b", "c")).rows(-1)
        slice(2, 3, None)
        """
        index = operator.index(text)
        if not -self.count <= index < self.count:
            reason = f"there are {self.count}" if self.count else "there are none"
            raise StatesError(
                f"No text {index}",
                reason,
                f"Ask for 0 to {self.count - 1}, or -1 for the last.",
            )
        ends = np.searchsorted(self.text, [index % self.count, index % self.count + 1])
        return slice(int(ends[0]), int(ends[1]))

    def select(self, rows: ArrayLike | slice) -> "Tokens":
        """Some rows, by mask, slice or indices; they keep their order, and the texts
        their indices.
        """
        kept = chosen_rows(rows, len(self))
        strings = tuple(self.strings[row] for row in kept)
        text, positions, ids = self.text[kept], self.positions[kept], self.ids[kept]
        return Tokens(
            self.texts, text, positions, ids, strings, self.spans[kept], self.count
        )

    def of(self, text: int) -> "Tokens":
        """The tokens of one text, which becomes text 0."""
        rows = self.rows(text)
        texts = None if self.texts is None else (self.texts[text],)
        zeros = np.zeros_like(self.text[rows])
        return Tokens(
            texts,
            zeros,
            self.positions[rows],
            self.ids[rows],
            self.strings[rows],
            self.spans[rows],
            1,
        )

    def equals(self, other: "Tokens") -> bool:
        """Whether every field is the same."""
        arrays = (
            (self.text, other.text),
            (self.positions, other.positions),
            (self.ids, other.ids),
        )
        same = all(
            np.array_equal(mine, theirs)
            for mine, theirs in (*arrays, (self.spans, other.spans))
        )
        return same and (self.texts, self.strings, self.count) == (
            other.texts,
            other.strings,
            other.count,
        )


@checked
@dataclass(frozen=True)
class Source:
    """Where states come from: the model and everything that decides its numbers.

    `depth` and `final` (the number of blocks of the stack, and whether it has a final
    norm) let `layer.-1` and `hidden_states[k]` be understood when only some sites were
    kept; None means that all were. `cls` is the id of the tokenizer's classification
    token, `reported` the site that each entry of Hugging Face's `hidden_states` was
    proved to be ("" for none).

    >>> Source.from_json(Source("gpt2", dtype="float32").to_json()) == Source("gpt2", dtype="float32")
    True
    """

    model: str
    revision: str | None = None
    weights: str = ""
    dtype: str = ""
    device: str = ""
    attention: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    depth: int | None = None
    final: bool | None = None
    cls: int | None = None
    reported: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", dict(self.versions))
        object.__setattr__(self, "notes", tuple(self.notes))
        object.__setattr__(self, "reported", tuple(self.reported))

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can hold."""
        return asdict(self) | {
            "notes": list(self.notes),
            "reported": list(self.reported),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` was made from."""
        known = {own.name for own in fields(cls)}
        if not isinstance(data.get("model"), str) or not set(data) <= known:
            reason = (
                f"its fields are {', '.join(sorted(map(ascii, data)))[:200] or 'none'}"
            )
            raise StatesError(
                "Cannot read the source of states",
                reason,
                f"They must be {', '.join(sorted(known))}.",
            )
        return cls(**data)


def plain(text: str) -> str:
    """A name that is safe on a terminal."""
    return text if text.isprintable() and len(text) <= 100 else ascii(text[:100])


def shown(strings: Sequence[str], most: int = 8) -> str:
    """A few tokens, quoted and escaped, each and all of them short."""
    short = [
        repr(string if len(string) <= 20 else string[:19] + "…")
        for string in strings[:most]
    ]
    return " ".join([*short, "…"] if len(strings) > most else short) or "none"


def _ints(given: ArrayLike, name: str, *shape: int) -> Ints:
    array = np.asarray(given)
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        reason = f"{name} is {array.dtype} {list(array.shape)}"
        raise StatesError(
            f"Cannot make tokens with {shape[0]} strings",
            reason,
            f"Give integers {list(shape)}.",
        )
    kept = array.astype(np.int64).view()
    kept.setflags(write=False)
    return kept


def chosen_rows(chosen: ArrayLike | slice, length: int) -> Ints:
    """The rows that a mask, a slice or indices choose, in order and each once."""
    mask = np.zeros(length, dtype=bool)
    problem = f"Cannot select from {length} tokens"
    try:
        indices = (
            chosen if isinstance(chosen, slice) else np.atleast_1d(np.asarray(chosen))
        )
    except (
        TypeError,
        ValueError,
        RuntimeError,
        # A list whose lists differ in length, a meta tensor.
    ) as error:
        reason = f"the rows are not an array ({str(error)[:100]})"
        raise StatesError(
            problem, reason, "Give a mask, a slice or indices."
        ) from error
    if isinstance(indices, slice):
        mask[indices] = True
    elif indices.dtype.kind == "b" and indices.shape == (length,):
        mask = indices
    elif indices.ndim == 1 and (indices.dtype.kind in "iu" or not indices.size):
        if indices.size and not -length <= indices.min() <= indices.max() < length:
            reason = f"the indices run from {indices.min()} to {indices.max()}"
            raise StatesError(problem, reason, f"Give indices from 0 to {length - 1}.")
        mask[indices.astype(np.int64)] = True
    else:
        reason = f"{indices.dtype} {list(indices.shape)} is neither a mask nor indices"
        raise StatesError(
            problem,
            reason,
            "Give a boolean mask with one value per token, a slice or indices.",
        )
    return np.flatnonzero(mask)
