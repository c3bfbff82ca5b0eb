"""Collections: what a caller may give as texts, as labelled texts, and as rows to
search or cluster.

>>> collection_of(np.eye(3), ["a", "b", "c"]).pick(np.array([0, 2])).tolist()
[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope import texts as reader
from hiddenscope.arguments import shown
from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.encodings import conversations
from hiddenscope.sites import Site, select
from hiddenscope.states import Pair, Readable, Source, Tokens
from hiddenscope.vectors import Token, blocks, vectors
from hiddenscope.vectors.pooling import pooled_as

Ints: TypeAlias = NDArray[np.int64]

ROWS, BYTES = 32_768, 2**26  # of an array that are read at a time, the fewer of both


def texts_of(given: Any) -> Any:
    """Strings, ids and Inputs as they are; a path of a file, an open file, a frame or a
    Hugging Face dataset is read.

    >>> texts_of(["a cat", "a dog"])
    ['a cat', 'a dog']
    """
    if isinstance(given, reader.Labelled):
        return list(given.texts)
    if isinstance(given, Inputs):
        return given
    named = (
        isinstance(given, str) and reader.names_a_file(given) and reader.is_file(given)
    )
    tabular = named or isinstance(given, os.PathLike)
    tabular = tabular or any(
        hasattr(given, name) for name in ("read", "columns", "column_names")
    )
    return list(reader.read(given).texts) if tabular else given


@dataclass(frozen=True)
class Dataset:
    """Texts (strings, ids or Inputs), their labels and groups if they have any, and a
    name.
    """

    texts: Any
    labels: Any
    name: str
    groups: tuple[Any, ...] | None = None


def dataset_of(data: Any) -> Dataset:
    """What `hs.read` gave, anything that it reads, or `(texts, labels)` with texts as
    ids or Inputs.

    >>> dataset_of(([[5, 6], [7]], ["a", "b"])).labels
    ['a', 'b']
    """
    if isinstance(data, tuple) and len(data) == 2:
        texts, labels = data
        if isinstance(texts, Inputs):
            return Dataset(texts, labels, "the texts")
        if isinstance(texts, range) or (len(texts) and not isinstance(texts[0], str)):
            return Dataset(reader.listed(texts), labels, "the texts")
    labelled = data if isinstance(data, reader.Labelled) else reader.read(data)
    return Dataset(
        list(labelled.texts), labelled.labels, labelled.name, labelled.groups
    )


def as_trained(
    model: Model, texts: Any, pool: Token | None, truncate: bool | int
) -> tuple[Any, Token, bool | int]:
    """The texts, how their states are pooled, and where they are cut: as the model's
    folder says where it says so.

    A folder of sentence-transformers names a longest text, a pooling, and perhaps what
    is put before a text. Lists of ids and Inputs are not touched; nor are texts of
    which every token is a row.
    """
    trained = model.sentences
    if trained is None or pool == "each":
        return texts, "mean" if pool is None else pool, truncate
    if pool is None and trained.missing:
        reason = (
            f"in sentence-transformers it {trained.missing}, and hiddenscope does not"
            " do that"
        )
        raise StatesError(
            f"Cannot make the vectors of {model.name}",
            reason,
            'Choose another pooling, such as pool="mean".',
        )
    pool = trained.pool if pool is None else pool
    if isinstance(texts, Inputs | bytes | Mapping) or not isinstance(texts, Iterable):
        return texts, pool, truncate
    listed = [texts] if isinstance(texts, str) else reader.listed(texts)
    if not all(isinstance(text, str) for text in listed):
        return listed, pool, truncate
    if trained.prompts:
        names = ", ".join(trained.prompts)
        progress.note(
            f"{model.name} has prompts ({names}) to put before a text; hs.embed uses"
            " none of them"
        )
    if trained.prompt or trained.lower:
        listed = [
            trained.prompt + (text.lower() if trained.lower else text)
            for text in listed
        ]
    return listed, pool, True if trained.longest is None else trained.longest


def copies_among(texts: Any) -> list[str]:
    """A key for each text, the same for copies: of strings, ids, Inputs, or the texts
    of `Tokens`.
    """
    return [reader.copy_key(text) for text in strings_of(texts)]


def strings_of(texts: Any) -> Sequence[Any]:
    """Each text as it can be compared: the strings, or ids where there are none."""
    if isinstance(texts, Tokens):
        return texts.texts or [_ids_of(texts, text) for text in range(texts.count)]
    if isinstance(texts, Inputs):
        return texts.texts or texts.ids
    return list(texts)


def _ids_of(tokens: Tokens, text: int) -> list[int]:
    """The ids of a text; where pooled states have none, its number, which no other text
    has.
    """
    ids: list[int] = tokens.ids[tokens.rows(text)].tolist()
    return ids if max(ids, default=0) >= 0 else [-1 - text]


def integer(value: Any, name: str, least: int) -> int:
    """A parameter that must be an integer of at least this size.

    >>> integer(np.int64(3), "k", 1)
    3
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or value < least
    ):
        problem = f"{name} must be an integer >= {least}, got {str(value)[:40]}"
        raise StatesError(
            problem,
            f"it is of type {type(value).__name__}",
            f"Give a number such as {max(least, 5)}.",
        )
    return int(value)


def last_site(source: Model | Readable | Pair) -> Site:
    """The last state there is: `final`, or the last layer; of two stacks, the
    encoder's.
    """
    sites = (
        source.anatomy.select("layer.*,final")
        if isinstance(source, Model)
        else source.sites
    )
    stack = sites[0].stack
    return max(site for site in sites if site.stack == stack)


@dataclass(frozen=True)
class Collection:
    """Rows to search or cluster, in order: how many, how they are read, and what is
    known of them.

    `token` is None for an array, if nobody says what stands for a text there.
    """

    count: int
    blocks: Callable[[], Iterator[Tensor]]
    pick: Callable[[Ints], Tensor]
    texts: Sequence[str] | None
    tokens: Tokens | None  # where a row is a token
    site: Site | None
    token: Token | None
    source: Source | dict[str, Any]
    of_states: bool = (
        # And not of texts, with what a model's folder says of these.
        False
    )

    @property
    def strings(self) -> Sequence[str] | None:
        """The text or the token of each row."""
        return self.texts if self.tokens is None else self.tokens.strings

    @property
    def unit(self) -> str:
        """What a row is: a text or a token."""
        return "text" if self.tokens is None else "token"


def collection_of(
    source: Any,
    texts: Any = None,
    site: str | Site | None = None,
    token: Token | None = None,
    truncate: bool = False,
) -> Collection:
    """The rows of a model with texts, of states, or of an array `[text, width]` with
    texts or without.
    """
    if isinstance(source, Model):
        if texts is None:
            remedy = "Give texts=, or states in place of the model."
            raise TextError(
                f"No texts for {source.name}", "no texts were given", remedy
            )
        given = texts_of(texts)
        if isinstance(given, Mapping) or conversations(given) is not None:
            given = source.encode(given, truncate=truncate)
        if (
            not isinstance(given, Inputs | Iterable)
            or isinstance(given, bytes)
            or getattr(given, "shape", None) == ()
        ):
            remedy = "Give a list of strings, a file or a frame."
            raise TextError(
                f"No texts for {source.name}", f"texts are {shown(given)}", remedy
            )
        if isinstance(given, str):
            given = [given]
        listed = given if isinstance(given, Inputs) else reader.listed(given)
        if token != "each":
            return _of_model(source, listed, site, token, truncate)
        chosen = _one_site(
            source.anatomy.select(last_site(source) if site is None else site), site
        )
        return _of_states(
            source.capture(source.encode(listed, truncate=truncate), chosen),
            chosen,
            token,
        )
    if isinstance(source, Pair | Readable):
        if texts is not None:
            raise TextError(
                "Cannot use texts with states",
                "the states have their own texts",
                "Leave texts out.",
            )
        own = pooled_as(source)
        return _of_states(
            source, site, token if token is not None else "mean" if own is None else own
        )
    return _of_array(source, texts, site, token)


def _of_model(
    model: Model,
    texts: list[Any] | Inputs,
    site: str | Site | None,
    pool: Token | None,
    given: bool,
) -> Collection:
    chosen = _one_site(
        model.anatomy.select(last_site(model) if site is None else site), site
    )
    if isinstance(texts, Inputs):
        strings: Sequence[str] | None = texts.texts
    else:
        strings = (
            texts if texts and all(isinstance(text, str) for text in texts) else None
        )
    texts, token, truncate = as_trained(model, texts, pool, given)

    def pick(numbers: Ints) -> Tensor:
        some = (
            texts.some(numbers.tolist())
            if isinstance(texts, Inputs)
            else [texts[number] for number in numbers]
        )
        return vectors(
            model, some, sites=chosen, token=token, truncate=truncate
        ).values[0]

    def read() -> Iterator[Tensor]:
        return blocks(model, texts, site=chosen, token=token, truncate=truncate)

    return Collection(
        len(texts), read, pick, strings, None, chosen, token, model.source(chosen.stack)
    )


def _of_states(
    source: Readable | Pair, site: str | Site | None, token: Token
) -> Collection:
    pattern = last_site(source) if site is None else site
    if isinstance(source, Pair):
        source = source.decoder if "decoder" in str(pattern) else source.encoder
    part: Readable = source
    chosen = _one_site(select(pattern, part.sites, owner="these states"), site)
    tokens, each = part.tokens, token == "each"

    def read() -> Iterator[Tensor]:
        return blocks(part, site=chosen, token=token)

    known = getattr(part, "source", None) or {}
    count, rows = (len(tokens), tokens) if each else (tokens.count, None)

    def pick(numbers: Ints) -> Tensor:
        return _picked(read(), numbers)

    return Collection(
        count, read, pick, tokens.texts, rows, chosen, token, known, of_states=True
    )


def _of_array(
    source: Any, texts: Any, site: str | Site | None, token: Token | None
) -> Collection:
    values = (
        source.detach().cpu()
        if isinstance(source, Tensor) and not source.is_meta
        else source
    )
    shaped = (
        isinstance(values, Tensor | np.ndarray)
        and values.ndim == 2
        and 0 not in values.shape
    )
    shaped = shaped and not getattr(values, "is_meta", False)
    if not shaped or not (
        values.is_floating_point()
        if isinstance(values, Tensor)
        else values.dtype.kind == "f"
    ):
        given = (
            f"{values.dtype} {list(values.shape)}"
            if hasattr(values, "dtype")
            else type(source).__name__
        )
        remedy = (
            "Give a model with texts=, states, or an array [text, width] of floats."
        )
        raise StatesError("Cannot read vectors", f"got {given}", remedy)
    listed = (
        None
        if texts is None
        else reader.listed(texts_of([texts] if isinstance(texts, str) else texts))
    )
    if listed is not None and len(listed) != len(values):
        reason = f"there are {len(values):,} vectors and {len(listed):,} texts"
        raise TextError(
            "Texts do not fit the vectors", reason, "Give one for each, or none."
        )
    named = site if site is None or isinstance(site, Site) else Site.parse(site)

    def read() -> Iterator[Tensor]:
        rows = max(1, min(ROWS, BYTES // (values.itemsize * values.shape[1])))
        return (
            _tensor(values[start : start + rows])
            for start in range(0, len(values), rows)
        )

    stands = "mean" if token is None and named is not None else token
    return Collection(
        len(values),
        read,
        lambda numbers: _tensor(values[numbers]),
        listed,
        None,
        named,
        stands,
        {},
    )


def _one_site(chosen: Sequence[Site], site: str | Site | None) -> Site:
    """The one site that was named; of two stacks, the encoder's."""
    if not chosen:
        raise StatesError("No site", f"{str(site)[:60]} names none", "Name one.")
    of_stack = [one for one in chosen if one.stack == chosen[0].stack]
    if len(of_stack) > 1:
        raise StatesError(
            f"{str(site)[:60]!r} names {len(of_stack)} sites",
            "it must name one",
            "Choose one of them.",
        )
    return of_stack[0]


def _tensor(rows: Any) -> Tensor:
    """Rows as a tensor; torch takes no read-only array and no foreign byte order, so
    those are copied.
    """
    if isinstance(rows, Tensor):
        return rows
    native = rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("="))
    return torch.from_numpy(
        np.array(native) if not native.flags.writeable else np.asarray(native)
    )


def _picked(read: Iterator[Tensor], numbers: Ints) -> Tensor:
    """Some rows, in ascending order, of those that are read."""
    picked, done = [], 0
    for block in read:
        inside = numbers[(numbers >= done) & (numbers < done + len(block))] - done
        picked.append(block[torch.from_numpy(inside)])
        done += len(block)
    return torch.cat(picked)
