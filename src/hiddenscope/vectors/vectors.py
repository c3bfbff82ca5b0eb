"""The vectors of a model's texts or of states, all at once or block by block."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts, require_recordable
from hiddenscope.sites import STACKS, Site, SitePatterns, select
from hiddenscope.states import Pair, Pooling, Readable, Source, States, Tokens
from hiddenscope.states.pooling import parse_pooling
from hiddenscope.texts import as_list
from hiddenscope.vectors.computed import compute, count
from hiddenscope.vectors.stored import allocate, pooled_as, read_all, read_vectors


@dataclass(frozen=True, eq=False)
class Vectors:
    """Values `[site, row, width]`, float32 (float64 stays).

    A row is a text, or where there are `tokens` a token.

    >>> import torch
    >>> values = torch.zeros(1, 2, 4)
    >>> Vectors((Site(0),), values, None, ("a", "b"), Source("toy"))["layer.0"].shape
    torch.Size([2, 4])
    """

    sites: tuple[Site, ...]
    values: Tensor
    tokens: Tokens | None
    texts: tuple[str, ...] | None
    source: Source | Mapping[str, Any]

    def __getitem__(self, site: str | Site) -> Tensor:
        selected = select(site, self.sites, owner="these vectors")
        return self.values[self.sites.index(single_site(site, selected))]


def vectors(
    source: Model | Readable | Pair,
    texts: Texts | Inputs | None = None,
    *,
    sites: SitePatterns = "layer.*,final",
    pool: Pooling | None = "last",
    truncate: bool | int = False,
    targets: Texts | Inputs | None = None,
) -> Vectors:
    """Return one vector for each text of a model or of states, in their order.

    `pool` says what stands for a text; None gives a row for each token. A model's
    states are pooled as they come, some batches at a time, and equal those of
    `capture(texts).pool()`: bit for bit up to 8,192 texts, within the rounding of other
    batches beyond. Of two stacks the encoder is read unless the sites name the other.

    >>> import torch
    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> states = load((tiny_model("gpt2"), None)).capture([[5, 6, 7], [8, 9]])
    >>> torch.equal(vectors(states, pool="mean").values, states.pool("mean"))
    True
    """
    if pool is not None:
        pool = parse_pooling(pool)
    if isinstance(source, Model):
        selected = _sites_of_model(source, sites)
        model_texts = _check_texts(source, texts)
        if pool is not None:
            return _of_model(
                source, model_texts, selected, pool, targets=targets, truncate=truncate
            )
        readable = _captured(source, model_texts, selected, targets, truncate)
    else:
        readable = _readable(source, texts, targets, sites)
        selected = _sites_of_states(readable, sites)
    values = read_all(readable, selected, pool)
    return Vectors(
        selected,
        values,
        readable.tokens if pool is None else None,
        readable.tokens.texts,
        getattr(readable, "source", None) or {},
    )


def blocks(
    source: Model | Readable | Pair,
    texts: Texts | Inputs | None = None,
    *,
    site: str | Site,
    pool: Pooling | None = "last",
    truncate: bool | int = False,
    targets: Texts | Inputs | None = None,
) -> Iterator[Tensor]:
    """Yield the vectors of one site in order, `[some rows, width]` at a time.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> model = load((tiny_model("gpt2"), None))
    >>> texts = [[5, 6, 7], [8, 9]]
    >>> [len(block) for block in blocks(model, texts, site="final", pool="mean")]
    [2]
    """
    if pool is not None:
        pool = parse_pooling(pool)
    if isinstance(source, Model):
        selected = _sites_of_model(source, site)
        single_site(site, selected)
        model_texts = _check_texts(source, texts)
        if pool is not None:
            portions = compute(
                source, model_texts, selected, pool, targets=targets, truncate=truncate
            )
            return (block[0] for _, block in portions)
        readable = _captured(source, model_texts, selected, targets, truncate)
    else:
        readable = _readable(source, texts, targets, site)
        selected = _sites_of_states(readable, site)
    return read_vectors(readable, single_site(site, selected), pool)


def default_pool(
    source: Model | Readable | Pair, sites: SitePatterns = "layer.*,final"
) -> Pooling:
    """Return the pooling of a source where none is named.

    In a decoder it is the last token, the only one that has seen the whole text. In an
    encoder every token sees it, and the last is often a separator: there it is the mean
    over tokens, or what the model's folder of sentence-transformers says. States tell
    an encoder by the classification token of its tokenizer.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> default_pool(load((tiny_model("gpt2"), None)))
    'last'
    >>> default_pool(load((tiny_model("bert"), None)))
    'mean'
    """
    stack = _named_stack(sites)
    if isinstance(source, Model):
        stacks = source.anatomy.stacks
        if stacks[-1 if stack == "decoder" else 0].causal:
            return "last"
        trained = source.sentences
        if trained is None or trained.missing:
            return "mean"
        return trained.pool
    if isinstance(source, Pair):
        return "last" if stack == "decoder" else "mean"
    stored_as = pooled_as(source)
    if stored_as is not None:
        return stored_as
    cls = getattr(getattr(source, "source", None), "cls", None)
    if source.sites[0].stack == "encoder" or cls is not None:
        return "mean"
    return "last"


def single_site(pattern: str | Site | None, selected: Sequence[Site]) -> Site:
    """Return the site that a pattern selected; refuse several."""
    if len(selected) > 1:
        raise StatesError(
            f"{str(pattern)[:60]!r} names {len(selected)} sites",
            "it must name one",
            "Choose one of them.",
        )
    return selected[0]


def _check_texts(model: Model, texts: Any) -> Any:
    """Return the texts, as a list if they can be read only once or have no indices."""
    if texts is None:
        raise TextError(
            f"No texts for {model.name}",
            "no texts were given",
            "Give texts, or give states.",
        )
    # A column of a frame has `tolist` too.
    column = hasattr(texts, "tolist") and not isinstance(texts, np.ndarray | Tensor)
    if column or isinstance(texts, Iterator | Set | range):
        return as_list(texts)
    return texts


def _of_model(
    model: Model,
    texts: Texts | Inputs,
    sites: tuple[Site, ...],
    pool: Pooling,
    *,
    targets: Texts | Inputs | None,
    truncate: bool | int,
) -> Vectors:
    values: Tensor | None = None
    done = 0
    strings: list[str] = []
    portions = compute(model, texts, sites, pool, targets=targets, truncate=truncate)
    for inputs, block in portions:
        if values is None:
            values = allocate(len(sites), count(texts), block)
        values[:, done : done + len(inputs)] = block
        done += len(inputs)
        strings += inputs.texts or ()
    assert values is not None  # the encoder refuses an empty list of texts
    source = model.source(sites[0].stack)
    return Vectors(sites, values, None, tuple(strings) or None, source)


def _captured(
    model: Model,
    texts: Texts | Inputs,
    sites: tuple[Site, ...],
    targets: Texts | Inputs | None,
    truncate: bool | int,
) -> Readable:
    inputs = model.encode(texts, targets=targets, truncate=truncate)
    captured = model.capture(inputs, sites)
    assert isinstance(captured, States)  # the sites are of one stack
    return captured


def _readable(
    source: Readable | Pair, texts: object, targets: object, sites: SitePatterns
) -> Readable:
    """Return the states to read; of a pair, one stack."""
    if texts is not None or targets is not None:
        raise TextError(
            "Cannot use texts with states",
            "the states have their own texts",
            "Leave them out, or give a model.",
        )
    if isinstance(source, Pair):
        return source.decoder if _named_stack(sites) == "decoder" else source.encoder
    if isinstance(source, Readable):
        return source
    raise StatesError(
        "Cannot read vectors",
        f"{type(source).__name__} has no states",
        "Give a model and texts, or states.",
    )


def _sites_of_model(model: Model, sites: SitePatterns) -> tuple[Site, ...]:
    require_recordable(model.module)
    return _of_one_stack(model.anatomy.select(sites), sites)


def _sites_of_states(states: Readable, sites: SitePatterns) -> tuple[Site, ...]:
    return _of_one_stack(select(sites, states.sites, owner="these states"), sites)


def _of_one_stack(selected: tuple[Site, ...], sites: SitePatterns) -> tuple[Site, ...]:
    if not selected:
        raise StatesError(
            "No sites to read vectors from",
            "the list is empty",
            "Choose 'layer.*' or 'final'.",
        )
    if len({site.stack for site in selected}) < 2:
        return selected
    stack = _named_stack(sites) or "encoder"
    return tuple(site for site in selected if site.stack == stack)


def _named_stack(sites: SitePatterns) -> str | None:
    """Return the stack that the patterns name, if they name one."""
    # Patterns that cannot be parsed are refused where the sites are selected.
    patterns = sites if isinstance(sites, list | tuple) else [sites]
    names = " ".join(str(pattern) for pattern in patterns)
    named = [stack for stack in STACKS if stack in names]
    if len(named) > 1:
        raise StatesError(
            "Cannot read vectors of two stacks",
            "the encoder and the decoder have different tokens",
            "Choose sites of the encoder or of the decoder.",
        )
    return named[0] if named else None
