"""Tokens and Source: what each row of states is, and where the states come from."""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states.arrays import Ints

_MOST_SHOWN = 8


@checked
@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of some texts, one row each, text after text.

    Lists of integers become arrays. `text` is the index of the text that a row belongs
    to, `strings` the token as it reads, `spans` its characters in the text (-1 where it
    has none). `texts` is None when only ids were given; `count` is the number of texts.

    >>> tokens = Tokens(None, [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", "b", "c"))
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
        # The dataclass is frozen.
        put = object.__setattr__
        for name in ("text", "positions", "ids"):
            put(self, name, _ints(getattr(self, name), name, len(self.strings)))
        spans = self.spans if len(self.spans) else np.full((len(self), 2), -1)
        put(self, "spans", _ints(spans, "spans", len(self), 2))
        put(self, "strings", tuple(self.strings))
        if self.texts is not None:
            put(self, "texts", tuple(self.texts))
        if self.count < 0 and self.texts is not None:
            put(self, "count", len(self.texts))
        elif self.count < 0:
            put(self, "count", int(self.text[-1]) + 1 if len(self) else 0)
        problem = "Cannot make these tokens"
        if self.texts is not None and len(self.texts) != self.count:
            reason = f"count is {self.count} and there are {len(self.texts)} texts"
            raise StatesError(problem, reason, "Leave count out, or make them equal.")
        if not len(self):
            return
        in_range = self.text[0] >= 0 and self.text[-1] < self.count
        if not in_range or (np.diff(self.text) < 0).any():
            reason = f"text must be sorted, with values from 0 to {self.count - 1}"
            remedy = "Put the rows of one text together, in order."
            raise StatesError(problem, reason, remedy)

    def __len__(self) -> int:
        return len(self.strings)

    def __repr__(self) -> str:
        return f"Tokens({len(self)} of {self.count} texts: {show_tokens(self.strings)})"

    @property
    def lengths(self) -> Ints:
        """Return the number of rows of each text."""
        return np.bincount(self.text, minlength=self.count)

    @property
    def contents(self) -> Sequence[Any]:
        """Return each text as its string, or its ids where only these are known."""
        if self.texts:
            return self.texts
        ids = [self.ids[self.rows(text)].tolist() for text in range(self.count)]
        for text, row in enumerate(ids):
            # Pooled states have no ids: a number of its own keeps a text apart.
            if max(row, default=0) < 0:
                ids[text] = [-1 - text]
        return ids

    def rows(self, text: int) -> slice:
        """Return the rows of one text; -1 is the last text.

        >>> Tokens(None, [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", "b", "c")).rows(-1)
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
        number = index % self.count
        start, stop = np.searchsorted(self.text, [number, number + 1])
        return slice(int(start), int(stop))

    def select(self, rows: ArrayLike | slice) -> "Tokens":
        """Return some rows, by mask, slice or indices.

        The rows keep their order, and the texts their indices.
        """
        indices = row_indices(rows, len(self))
        return replace(
            self,
            text=self.text[indices],
            positions=self.positions[indices],
            ids=self.ids[indices],
            strings=tuple(self.strings[row] for row in indices),
            spans=self.spans[indices],
        )

    def of(self, text: int) -> "Tokens":
        """Return the tokens of one text, which becomes text 0."""
        part = self.select(self.rows(text))
        texts = None if self.texts is None else (self.texts[text],)
        return replace(part, texts=texts, text=np.zeros_like(part.text), count=1)

    def equals(self, other: "Tokens") -> bool:
        """Tell whether every field is the same."""
        for name in ("texts", "strings", "count"):
            if getattr(self, name) != getattr(other, name):
                return False
        arrays = ("text", "positions", "ids", "spans")
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in arrays
        )


@dataclass(frozen=True)
class AdapterSource:
    """One adapter on top of a model: its name, its kind and the hash of its weights.

    `kind` is as PEFT names it, such as "LORA". `weights` covers its configuration as
    well. `strength` multiplies what it adds, relative to how it was trained; 0 means
    that it is switched off, and where layers differ it is the largest. A `merged` one
    is part of the weights below.
    """

    name: str
    kind: str
    weights: str
    strength: float = 1.0
    merged: bool = False


@checked
@dataclass(frozen=True)
class Source:
    """Where states come from: the model and everything that decides its numbers.

    `depth` and `final` (the number of blocks of the stack, and whether it has a final
    norm) let `layer.-1` and `hidden_states[k]` be understood when only some sites were
    kept; None means that all were. `cls` is the id of the tokenizer's classification
    token, `reported` the site that each entry of Hugging Face's `hidden_states` was
    proved to be ("" for none). `quantisation` names the scheme of quantised weights. Of
    a model with `adapters`, `weights` is the hash of everything and `base_weights` that
    of the model below them. `causal` tells whether its tokens see earlier ones only;
    None where states were stored before this was kept.

    >>> source = Source("gpt2", dtype="float32")
    >>> Source.from_json(source.to_json()) == source
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
    quantisation: str = ""
    base_weights: str = ""
    adapters: tuple[AdapterSource, ...] = ()
    causal: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", dict(self.versions))
        object.__setattr__(self, "notes", tuple(self.notes))
        object.__setattr__(self, "reported", tuple(self.reported))

    def to_json(self) -> dict[str, Any]:
        """Return a dict that JSON can hold."""
        # Written and read once, so that tuples are lists.
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def select_sites(
        self, patterns: SitePatterns, sites: Sequence[Site], owner: str
    ) -> tuple[Site, ...]:
        """Return the sites that patterns select, of those that were stored."""
        reported = None
        if self.reported and sites:
            entries = []
            for name in self.reported:
                site = Site.parse(name) if name else None
                entries.append(site)
            reported = {sites[0].stack: entries}
        return select(
            patterns,
            sites,
            owner=owner,
            depth=self.depth,
            final=self.final,
            reported=reported,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the source that `to_json` described."""
        known = {source_field.name for source_field in fields(cls)}
        if not isinstance(data.get("model"), str) or not set(data) <= known:
            names = ", ".join(sorted(map(ascii, data)))[:200]
            raise StatesError(
                "Cannot read the source of states",
                f"its fields are {names or 'none'}",
                f"They must be {', '.join(sorted(known))}.",
            )
        adapters = (AdapterSource(**adapter) for adapter in data.get("adapters", ()))
        return cls(**dict(data) | {"adapters": tuple(adapters)})


def coordinates(sites: Sequence[Site], tokens: Tokens) -> dict[str, Any]:
    """Return the coordinates of states in xarray: site, text, position, id, string."""
    import xarray

    # An array of objects, also if all strings are equally long.
    strings = np.array([*tokens.strings, None], dtype=object)[:-1]
    return {
        "site": [str(site) for site in sites],
        "text": ("token", tokens.text),
        "position": ("token", tokens.positions),
        "id": ("token", tokens.ids),
        # fastpath, because with pyarrow installed pandas would refuse half of a
        # surrogate pair.
        "string": xarray.Variable("token", strings, fastpath=True),
    }


def terminal_safe(text: str) -> str:
    """Return a name that is safe and short on a terminal."""
    if text.isprintable() and len(text) <= 100:
        return text
    return ascii(text[:100])


def show_tokens(strings: Sequence[str]) -> str:
    """Show a few tokens, quoted and escaped, each of them and all together short."""
    if not strings:
        return "none"
    parts = []
    for string in strings[:_MOST_SHOWN]:
        if len(string) > 20:
            string = string[:19] + "…"
        parts.append(repr(string))
    if len(strings) > _MOST_SHOWN:
        parts.append("…")
    return " ".join(parts)


def _ints(values: ArrayLike, name: str, *shape: int) -> Ints:
    """Return a read-only array of integers of this shape."""
    array = np.asarray(values)
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        reason = f"{name} is {array.dtype} {list(array.shape)}"
        raise StatesError(
            f"Cannot make tokens with {shape[0]} strings",
            reason,
            f"Give integers {list(shape)}.",
        )
    integers = array.astype(np.int64).view()
    integers.setflags(write=False)
    return integers


def row_indices(rows: ArrayLike | slice, length: int) -> Ints:
    """Return the rows that a mask, a slice or indices select, in order, each once."""
    problem = f"Cannot select from {length} tokens"
    remedy = "Give a boolean mask with one value per token, a slice or indices."
    try:
        selector = rows if isinstance(rows, slice) else np.atleast_1d(np.asarray(rows))
        # numpy takes an empty list for floats.
        if isinstance(selector, np.ndarray) and not selector.size:
            selector = np.empty(0, dtype=np.int64)
        indices = np.arange(length)[selector]
    # Floats, words, flags or indices of other tokens, or a meta tensor.
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise StatesError(problem, str(error)[:150], remedy) from error
    if indices.ndim > 1:
        raise StatesError(problem, f"the rows are {list(indices.shape)}", remedy)
    return np.unique(indices)
