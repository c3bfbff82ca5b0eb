"""Vectors: one row a text, or one a token, of every site that an analysis looks at, without holding all states.

capturing  the vectors of a model's texts, pooled as they come
reading    the vectors of states that are read block by block
pooling    which rows of states make the vector of each text
nearest    the nearest of any number of rows, exactly
shelf      what is searched or clustered: of a model and texts, of states, or of an array
sentences  what stands for a text, and how the vectors of texts spread: mean cosine, centring, whitening

>>> from hiddenscope.model import load
>>> from hiddenscope.testing import tiny_model
>>> vectors(load((tiny_model("gpt2"), None)), [[5, 6, 7], [8, 9]], sites="layer.*").values.shape
torch.Size([4, 2, 64])
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Texts, watchable
from hiddenscope.sites import STACKS, Site, select
from hiddenscope.states import Pair, Readable, Source, States, Tokens
from hiddenscope.vectors.capturing import listed, pooled, portions
from hiddenscope.vectors.pooling import Token
from hiddenscope.vectors.reading import read, whole

__all__ = ["TOKENS", "Token", "Vectors", "blocks", "vectors"]

TOKENS = ("last", "first", "mean", "max", "cls", "each")


@dataclass(frozen=True, eq=False)
class Vectors:
    """Values `[site, row, width]`, float32 (float64 stays): a row is a text, or with `tokens` a token of one.

    >>> import torch
    >>> Vectors((Site(0),), torch.zeros(1, 2, 4), None, ("a", "b"), Source("toy"))["layer.0"].shape
    torch.Size([2, 4])
    """

    sites: tuple[Site, ...]
    values: Tensor
    tokens: Tokens | None
    texts: tuple[str, ...] | None
    source: Source | Mapping[str, Any]

    def __getitem__(self, site: str | Site) -> Tensor:
        chosen = select(site, self.sites, owner="these vectors")
        if len(chosen) > 1:
            raise StatesError(f"One site, {str(site)[:60]!r}", f"it names {len(chosen)}", "Ask for one.")
        return self.values[self.sites.index(chosen[0])]


def vectors(
    source: Model | Readable | Pair,
    texts: Texts | None = None,
    *,
    sites: Any = "layer.*,final",
    token: Token = "last",
    truncate: bool = False,
    targets: Texts | None = None,
) -> Vectors:
    """The vectors of texts, one a text in the order given: of a model and texts, or of states.

    `token` is what stands for a text: "last", "first", "cls", a position (negative from the end), or the "mean" or
    "max" over its tokens; "each" gives a row a token. A model's states are pooled as they come, a few batches at a
    time, and equal those of `capture(texts).pool()`: bit for bit up to 8,192 texts, within the rounding of other
    batches beyond. Of two stacks it is the encoder's unless the sites name the other.

    >>> import torch
    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> states = load((tiny_model("gpt2"), None)).capture([[5, 6, 7], [8, 9]])
    >>> torch.equal(vectors(states, token="mean").values, states.pool("mean"))
    True
    """
    token = _known(token)
    if isinstance(source, Model):
        wanted = _wanted(source, sites)
        _given(source, texts)
        if token != "each":
            values, kept = pooled(source, texts, wanted, token, truncate=truncate, targets=targets)
            return Vectors(wanted, values, None, kept, source.source(wanted[0].stack))
        source = _states(source.capture(texts, wanted, targets=targets, truncate=truncate))  # type: ignore[arg-type]
    else:
        source = _readable(source, texts, targets, sites)
        wanted = _chosen(source, sites)
    tokens = source.tokens
    values = whole(source, wanted, token)
    return Vectors(
        wanted, values, tokens if token == "each" else None, tokens.texts, getattr(source, "source", None) or {}
    )


def blocks(
    source: Model | Readable | Pair,
    texts: Texts | None = None,
    *,
    site: str | Site,
    token: Token = "last",
    truncate: bool = False,
    targets: Texts | None = None,
) -> Iterator[Tensor]:
    """The vectors of one site in order, `[some rows, width]` at a time, so that no more than a few are held.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> model = load((tiny_model("gpt2"), None))
    >>> [len(block) for block in blocks(model, [[5, 6, 7], [8, 9]], site="final", token="mean")]
    [2]
    """
    token = _known(token)
    if isinstance(source, Model):
        wanted = _wanted(source, site)
        _one(site, wanted)
        _given(source, texts)
        if token != "each":
            given = listed(texts), listed(targets)
            return (block[0] for _, block in portions(source, given, wanted, token, truncate))
        source = _states(source.capture(texts, wanted, targets=targets, truncate=truncate))  # type: ignore[arg-type]
    else:
        source = _readable(source, texts, targets, site)
        wanted = _chosen(source, site)
        _one(site, wanted)
    return read(source, wanted[0], token)


def _known(token: Token) -> Token:
    if isinstance(token, str) and token in TOKENS:
        return token
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    remedy = f"Ask for {', '.join(TOKENS)}, or give a position."
    raise StatesError(f"No token {str(token)[:40]!r}", "it stands for no text", remedy)


def _given(model: Model, texts: Texts | None) -> None:
    if texts is None:
        reason = "there are no texts"
        raise TextError(f"Vectors of {model.name}", reason, "Give one or several, or give states.")


def _one(site: str | Site, wanted: Sequence[Site]) -> None:
    if len(wanted) > 1:
        raise StatesError(f"One site, {str(site)[:60]!r}", f"it names {len(wanted)}", "Ask for one.")


def _readable(source: Any, texts: Texts | None, targets: Texts | None, sites: Any) -> Readable:
    """Where the states are read from; of a pair, one stack."""
    if texts is not None or targets is not None:
        raise TextError("Vectors of states", "texts were given too", "Leave them out, or give a model.")
    if isinstance(source, Pair):
        return source.decoder if _stack(sites) == "decoder" else source.encoder
    if isinstance(source, Readable):
        return source
    reason = f"{type(source).__name__} is none of what they can be taken from"
    raise StatesError("Vectors", reason, "Give a model and texts, or states.")


def _states(captured: States | Pair) -> States:
    assert isinstance(captured, States)  # sites of one stack were asked for
    return captured


def _wanted(model: Model, sites: Any) -> tuple[Site, ...]:
    watchable(model.module)
    return _of_one_stack(model.anatomy.select(sites), sites)


def _chosen(part: Readable, sites: Any) -> tuple[Site, ...]:
    chosen = part.select(sites=sites).sites if isinstance(part, States) else select(sites, part.sites)
    return _of_one_stack(chosen, sites)


def _of_one_stack(chosen: tuple[Site, ...], sites: Any) -> tuple[Site, ...]:
    if len({site.stack for site in chosen}) < 2:
        return chosen
    stack = _stack(sites) or "encoder"
    return tuple(site for site in chosen if site.stack == stack)


def _stack(sites: Any) -> str | None:
    """The stack that the patterns name, if they name one."""
    said = [str(item) for item in ([sites] if isinstance(sites, str | Site) else sites)]
    named = [stack for stack in STACKS if any(stack in item for item in said)]
    if len(named) > 1:
        reason = "the sites are of two stacks, whose tokens are not the same"
        raise StatesError("Vectors of one stack", reason, "Ask for those of the encoder or of the decoder.")
    return named[0] if named else None
