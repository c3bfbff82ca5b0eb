"""What is searched or clustered: the vectors of a model's texts, of states, or of an array, read some at a time.

>>> shelf_of(np.eye(3), ["a", "b", "c"]).pick(np.array([0, 2])).tolist()
[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.sites import Site, select
from hiddenscope.states import Pair, Readable, States, Tokens
from hiddenscope.vectors import Token, blocks, vectors
from hiddenscope.vectors.sentences import POOLED, last_site, texts_of

Numbers: TypeAlias = NDArray[np.int64]

ROWS, BYTES = 32_768, 2**26  # of an array that are read at a time, the fewer of both


@dataclass(frozen=True)
class Shelf:
    """Rows in order: how many, how they are read, and what is known of them."""

    count: int
    blocks: Callable[[], Iterator[Tensor]]
    pick: Callable[[Numbers], Tensor]
    texts: Sequence[str] | None
    tokens: Tokens | None  # where a row is a token
    site: Site | None
    token: Token
    source: Any

    @property
    def strings(self) -> Sequence[str] | None:
        """What a reader knows each row by."""
        return self.texts if self.tokens is None else self.tokens.strings

    @property
    def unit(self) -> str:
        """What a row is."""
        return "text" if self.tokens is None else "token"


def shelf_of(source: Any, texts: Any = None, site: Any = None, token: Token = POOLED, truncate: bool = False) -> Shelf:
    """A shelf of a model with texts, of states, or of an array `[text, width]` with texts or without."""
    if isinstance(source, Model):
        if texts is None:
            reason = "there are no texts"
            raise TextError(f"Vectors of {source.name}", reason, "Give texts=, or states in place of the model.")
        given = texts_of(texts)
        listed = [given] if isinstance(given, str) else list(given)
        if token != "each":
            return _of_model(source, listed, site, token, truncate)
        place = _one(source.anatomy.select(site or last_site(source)), site)
        return _of_states(source.capture(listed, place, truncate=truncate), place, token)
    if isinstance(source, Pair | Readable):
        if texts is not None:
            raise TextError("Vectors of states", "texts were given too", "Leave them out: the states know theirs.")
        return _of_states(source, site, token)
    return _of_array(source, texts, site, token)


def _of_model(model: Model, texts: list[Any], site: Any, token: Token, truncate: bool) -> Shelf:
    place = _one(model.anatomy.select(site or last_site(model)), site)
    strings = texts if texts and all(isinstance(one, str) for one in texts) else None

    def pick(numbers: Numbers) -> Tensor:
        some = [texts[number] for number in numbers]
        return vectors(model, some, sites=place, token=token, truncate=truncate).values[0]

    def read() -> Iterator[Tensor]:
        return blocks(model, texts, site=place, token=token, truncate=truncate)

    return Shelf(len(texts), read, pick, strings, None, place, token, model.source(place.stack))


def _of_states(source: Readable | Pair, site: Any, token: Token) -> Shelf:
    asked = site or last_site(source)
    if isinstance(source, Pair):
        source = source.decoder if "decoder" in str(asked) else source.encoder
    part: Readable = source
    place = _one(part.select(sites=asked).sites if isinstance(part, States) else select(asked, part.sites), site)
    tokens, each = part.tokens, token == "each"

    def read() -> Iterator[Tensor]:
        return blocks(part, site=place, token=token)

    known = getattr(part, "source", None) or {}
    count, rows = (len(tokens), tokens) if each else (tokens.count, None)
    return Shelf(count, read, lambda numbers: _picked(read(), numbers), tokens.texts, rows, place, token, known)


def _of_array(source: Any, texts: Any, site: Any, token: Token) -> Shelf:
    values = source.detach().cpu() if isinstance(source, Tensor) else source
    shaped = isinstance(values, Tensor | np.ndarray) and values.ndim == 2 and 0 not in values.shape
    if not shaped or not (values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"):
        shape = f"{values.dtype} {list(values.shape)}" if hasattr(values, "dtype") else type(source).__name__
        remedy = "Give a model with texts=, states, or an array [text, width] of floats."
        raise StatesError("Vectors", f"they are to come from {shape}", remedy)
    listed = None if texts is None else list(texts_of([texts] if isinstance(texts, str) else texts))
    if listed is not None and len(listed) != len(values):
        raise TextError(f"{len(values):,} vectors", f"there are {len(listed):,} texts", "Give one for each, or none.")
    named = None if site is None else Site.parse(str(site))

    def read() -> Iterator[Tensor]:
        some = max(1, min(ROWS, BYTES // (values.itemsize * values.shape[1])))
        return (_tensor(values[start : start + some]) for start in range(0, len(values), some))

    return Shelf(len(values), read, lambda numbers: _tensor(values[numbers]), listed, None, named, token, {})


def _one(chosen: Sequence[Site], site: Any) -> Site:
    """The one site that was asked for; of two stacks, the encoder's."""
    own = [one for one in chosen if one.stack == chosen[0].stack]
    if len(own) > 1:
        raise StatesError(f"One site, {str(site)[:60]!r}", f"it names {len(own)}", "Ask for one.")
    return own[0]


def _tensor(some: Any) -> Tensor:
    """Torch takes no array that cannot be written to, nor one in another byte order; such a block is copied."""
    if isinstance(some, Tensor):
        return some
    native = some if some.dtype.isnative else some.astype(some.dtype.newbyteorder("="))
    return torch.from_numpy(np.array(native) if not native.flags.writeable else np.asarray(native))


def _picked(read: Iterator[Tensor], numbers: Numbers) -> Tensor:
    """Some rows, in ascending order, of those that are read."""
    found, done = [], 0
    for block in read:
        inside = numbers[(numbers >= done) & (numbers < done + len(block))] - done
        found.append(block[torch.from_numpy(inside)])
        done += len(block)
    return torch.cat(found)
