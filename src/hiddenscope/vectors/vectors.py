"""Vectors: one row for each text, or for each token, of every site that an analysis
reads, without holding all states.

pooling     one vector for each text, from a model's passes or from states
collection  what a caller may give as texts, as labelled texts, and as rows to search or cluster
nearest     the nearest of any number of rows, exactly

>>> from hiddenscope.model import load
>>> from hiddenscope.testing import tiny_model
>>> vectors(load((tiny_model("gpt2"), None)), [[5, 6, 7], [8, 9]], sites="layer.*").values.shape
torch.Size([4, 2, 64])
"""

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts, recordable
from hiddenscope.sites import STACKS, Site, SitePatterns, select
from hiddenscope.states import Pair, Readable, Source, States, Tokens
from hiddenscope.texts import listed
from hiddenscope.vectors.pooling import (
    Token,
    allocate,
    count,
    pooled,
    pooled_as,
    read,
    read_all,
)

__all__ = ["TOKENS", "Token", "Vectors", "blocks", "default_token", "vectors"]

TOKENS = ("last", "first", "mean", "max", "cls", "each")


@dataclass(frozen=True, eq=False)
class Vectors:
    """Values `[site, row, width]`, float32 (float64 stays): a row is a text, or where
    there are `tokens` a token.

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
        _one(site, chosen)
        return self.values[self.sites.index(chosen[0])]


def vectors(
    source: Model | Readable | Pair,
    texts: Texts | Inputs | None = None,
    *,
    sites: SitePatterns = "layer.*,final",
    token: Token = "last",
    truncate: bool | int = False,
    targets: Texts | Inputs | None = None,
) -> Vectors:
    """The vectors of texts, one for each in the order given: of a model and texts, or
    of states.

    `token` is what stands for a text: "last", "first", "cls", a position (negative from
    the end), or the "mean" or "max" over its tokens; "each" gives a row for each token.
    A model's states are pooled as they come, some batches at a time, and equal those of
    `capture(texts).pool()`: bit for bit up to 8,192 texts, within the rounding of other
    batches beyond. Of two stacks it is the encoder's unless the sites name the other.

    >>> import torch
    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> states = load((tiny_model("gpt2"), None)).capture([[5, 6, 7], [8, 9]])
    >>> torch.equal(vectors(states, token="mean").values, states.pool("mean"))
    True
    """
    token = _checked(token)
    if isinstance(source, Model):
        chosen = _sites_of_model(source, sites)
        listed = _listed(source, texts)
        if token != "each":
            return _of_model(
                source, listed, chosen, token, targets=targets, truncate=truncate
            )
        readable = _captured(source, listed, chosen, targets, truncate)
    else:
        readable = _readable(source, texts, targets, sites)
        chosen = _sites_of_states(readable, sites)
    tokens = readable.tokens
    values = read_all(readable, chosen, token)
    known = getattr(readable, "source", None) or {}
    return Vectors(
        chosen, values, tokens if token == "each" else None, tokens.texts, known
    )


def blocks(
    source: Model | Readable | Pair,
    texts: Texts | Inputs | None = None,
    *,
    site: str | Site,
    token: Token = "last",
    truncate: bool | int = False,
    targets: Texts | Inputs | None = None,
) -> Iterator[Tensor]:
    """The vectors of one site in order, `[some rows, width]` at a time, so that only
    some are held.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> model = load((tiny_model("gpt2"), None))
    >>> [len(block) for block in blocks(model, [[5, 6, 7], [8, 9]], site="final", token="mean")]
    [2]
    """
    token = _checked(token)
    if isinstance(source, Model):
        chosen = _sites_of_model(source, site)
        _one(site, chosen)
        listed = _listed(source, texts)
        if token != "each":
            portions = pooled(
                source, listed, chosen, token, targets=targets, truncate=truncate
            )
            return (block[0] for _, block in portions)
        readable = _captured(source, listed, chosen, targets, truncate)
    else:
        readable = _readable(source, texts, targets, site)
        chosen = _sites_of_states(readable, site)
        _one(site, chosen)
    return read(readable, chosen[0], token)


def default_token(
    source: Model | Readable | Pair, sites: SitePatterns = "layer.*,final"
) -> Token:
    """What stands for a text where nobody says: the last token of a decoder, which
    alone has seen the whole text.

    In an encoder every token sees it, and the last is often a separator: there it is
    the mean over tokens, or what the model's folder of sentence-transformers says.
    States tell an encoder by the classification token of its tokenizer.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> default_token(load((tiny_model("gpt2"), None))), default_token(load((tiny_model("bert"), None)))
    ('last', 'mean')
    """
    stack = _stack(sites)
    if isinstance(source, Model):
        stacks = source.anatomy.stacks
        if stacks[-1 if stack == "decoder" else 0].causal:
            return "last"
        trained = source.sentences
        return "mean" if trained is None or trained.missing else trained.pool
    part = source
    if isinstance(part, Pair):
        return "last" if stack == "decoder" else "mean"
    if (kept := pooled_as(part)) is not None:
        return kept
    encoder = (
        part.sites[0].stack == "encoder"
        or getattr(getattr(part, "source", None), "cls", None) is not None
    )
    return "mean" if encoder else "last"


def _checked(token: Token) -> Token:
    if isinstance(token, str) and token in TOKENS:
        return token
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    remedy = f"Use {', '.join(TOKENS)}, or a position."
    raise StatesError(
        f"No token {str(token)[:40]!r}",
        "it is not a way to pool the tokens of a text",
        remedy,
    )


def _listed(model: Model, texts: Any) -> Any:
    """The texts, as a list where they come from an iterator, a set, the keys of a
    mapping or a column of a frame.
    """
    if texts is None:
        raise TextError(
            f"No texts for {model.name}",
            "no texts were given",
            "Give texts, or give states.",
        )
    column = hasattr(texts, "tolist") and not isinstance(texts, np.ndarray | Tensor)
    return (
        listed(texts) if column or isinstance(texts, Iterator | Set | range) else texts
    )


def _of_model(
    model: Model,
    texts: Texts | Inputs,
    sites: tuple[Site, ...],
    token: Token,
    **options: Any,
) -> Vectors:
    values, done, strings = None, 0, []
    for inputs, block in pooled(model, texts, sites, token, **options):
        if values is None:
            values = allocate(len(sites), count(texts), block)
        values[:, done : done + len(inputs)] = block
        done += len(inputs)
        strings += list(inputs.texts or ())
    assert values is not None  # an encoder refuses no texts
    return Vectors(
        sites,
        values,
        None,
        tuple(strings) if strings else None,
        model.source(sites[0].stack),
    )


def _one(site: str | Site, chosen: Sequence[Site]) -> None:
    if len(chosen) > 1:
        raise StatesError(
            f"{str(site)[:60]!r} names {len(chosen)} sites",
            "it must name one",
            "Choose one of them.",
        )


def _captured(
    model: Model,
    texts: Texts | Inputs,
    sites: tuple[Site, ...],
    targets: Texts | Inputs | None,
    truncate: bool | int,
) -> Readable:
    captured = model.capture(
        model.encode(texts, targets=targets, truncate=truncate), sites
    )
    assert isinstance(captured, States)  # the sites are of one stack
    return captured


def _readable(source: Any, texts: Any, targets: Any, sites: SitePatterns) -> Readable:
    """What the states are read from; of a pair, one stack."""
    if texts is not None or targets is not None:
        raise TextError(
            "Cannot use texts with states",
            "the states have their own texts",
            "Leave them out, or give a model.",
        )
    if isinstance(source, Pair):
        return source.decoder if _stack(sites) == "decoder" else source.encoder
    if isinstance(source, Readable):
        return source
    raise StatesError(
        "Cannot read vectors",
        f"{type(source).__name__} has no states",
        "Give a model and texts, or states.",
    )


def _sites_of_model(model: Model, sites: SitePatterns) -> tuple[Site, ...]:
    recordable(model.module)
    return _of_one_stack(model.anatomy.select(sites), sites)


def _sites_of_states(part: Readable, sites: SitePatterns) -> tuple[Site, ...]:
    return _of_one_stack(select(sites, part.sites, owner="these states"), sites)


def _of_one_stack(chosen: tuple[Site, ...], sites: SitePatterns) -> tuple[Site, ...]:
    if not chosen:
        raise StatesError(
            "No sites to read vectors from",
            "the list is empty",
            "Choose 'layer.*' or 'final'.",
        )
    if len({site.stack for site in chosen}) < 2:
        return chosen
    stack = _stack(sites) or "encoder"
    return tuple(site for site in chosen if site.stack == stack)


def _stack(sites: SitePatterns) -> str | None:
    """Find the stack that the patterns name, if they name one."""
    # What is no pattern at all is refused, by its own name, where sites are chosen.
    several = sites if isinstance(sites, list | tuple) else [sites]
    patterns = [str(pattern) for pattern in several]
    named = [stack for stack in STACKS if any(stack in pattern for pattern in patterns)]
    if len(named) > 1:
        reason = "the encoder and the decoder have different tokens"
        raise StatesError(
            "Cannot read vectors of two stacks",
            reason,
            "Choose sites of the encoder or of the decoder.",
        )
    return named[0] if named else None
