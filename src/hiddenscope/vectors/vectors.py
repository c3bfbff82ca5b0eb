"""The vectors of a model's texts or of states.

The source says whether a row is a text or a token, so that no analysis needs a
parameter for it.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hiddenscope.arguments import checked
from hiddenscope.errors import ArgumentError, StatesError, TextError
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results.report import Pooled
from hiddenscope.sites import STACKS, Site, SitePatterns, select
from hiddenscope.states import Pair, Pooling, Readable, Source, States, Tokens
from hiddenscope.states.pooling import SINKLESS, parse_pooling, vector_pooling
from hiddenscope.texts import as_list
from hiddenscope.vectors.pooled import (
    allocate,
    compute,
    count,
    pooled_as,
    read_all,
)
from hiddenscope.vectors.tally import Tally


@dataclass(frozen=True, eq=False)
class Vectors:
    """Values `[site, row, width]`, float32 (float64 stays).

    A row is a text, or where there are `tokens` a token. `pooled` says what rules them.

    >>> import torch
    >>> values = torch.zeros(1, 2, 4)
    >>> rows = Vectors((Site(0),), values, None, ("a", "b"), Source("toy"), None)
    >>> rows["layer.0"].shape
    torch.Size([2, 4])
    """

    sites: tuple[Site, ...]
    values: Tensor
    tokens: Tokens | None
    texts: tuple[str, ...] | None
    source: Source | Mapping[str, Any]
    pooled: Pooled | None

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
    tally: Tally | None = None,
) -> Vectors:
    """Return one vector for each text of a model or of states, in their order.

    `pool` says what stands for a text; None gives a row for each token. A model's
    states are pooled as they come, some batches at a time, and equal those of
    `capture(texts).pool()`: bit for bit up to 8,192 texts, within the rounding of other
    batches beyond. Of two stacks the encoder is read unless the sites name the other.
    A `tally` is told what is noticed on the way.

    >>> import torch
    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> states = load((tiny_model("gpt2"), None)).capture([[5, 6, 7], [8, 9]])
    >>> torch.equal(vectors(states, pool="mean").values, states.pool("mean"))
    True
    """
    pooling = None if pool is None else parse_pooling(pool)
    opened, selected = open_sites(source, texts, sites)
    tally = tally or Tally()
    several = _listed(texts)
    if isinstance(opened, Model) and pooling is None:
        inputs = opened.encode(several, truncate=truncate)
        captured = opened.capture(inputs, selected)
        assert isinstance(captured, States)  # the sites are of one stack
        opened = captured
    if not isinstance(opened, Model):
        rows = read_all(opened, selected, pooling, tally)
        return Vectors(
            selected,
            rows,
            opened.tokens if pooling is None else None,
            opened.tokens.texts,
            getattr(opened, "source", None) or {},
            tally.report(selected, rows, pooling),
        )
    assert pooling is not None  # or the states were captured
    values = None
    done = 0
    strings: list[str] = []
    for inputs, block in compute(opened, several, selected, pooling, truncate, tally):
        if values is None:
            values = allocate(len(selected), count(several), block)
        values[:, done : done + len(inputs)] = block
        done += len(inputs)
        strings += inputs.texts or ()
    assert values is not None  # the encoder refuses an empty list of texts
    provenance = opened.source(selected[0].stack)
    pooled = tally.report(selected, values, pooling)
    return Vectors(selected, values, None, tuple(strings) or None, provenance, pooled)


def default_pool(
    source: Model | Readable | Pair, sites: SitePatterns = "layer.*,final"
) -> Pooling:
    """Return the pooling of a source where none is named.

    In a decoder it is the last token, the only one that has seen the whole text. In an
    encoder every token sees it, and the last is often a separator: there it is the mean
    over tokens, or what the model's folder of sentence-transformers says. States say
    themselves which they are; older ones tell an encoder by the classification token of
    its tokenizer.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model
    >>> default_pool(load((tiny_model("gpt2"), None)))
    'last'
    >>> default_pool(load((tiny_model("bert"), None)))
    'mean:sinkless'
    """
    stack = _named_stack(sites)
    if isinstance(source, Model):
        stacks = source.anatomy.stacks
        if stacks[-1 if stack == "decoder" else 0].causal:
            return "last"
        trained = source.sentences
        if trained is None or trained.missing:
            return SINKLESS
        return trained.pool
    if isinstance(source, Pair):
        return "last" if stack == "decoder" else SINKLESS
    stored_as = pooled_as(source)
    if stored_as is not None:
        return stored_as
    origin = getattr(source, "source", None)
    causal = getattr(origin, "causal", None)
    if causal is None:
        has_cls = getattr(origin, "cls", None) is not None
        causal = source.sites[0].stack != "encoder" and not has_cls
    return "last" if causal else SINKLESS


def single_site(pattern: str | Site | None, selected: Sequence[Site]) -> Site:
    """Return the site that a pattern selected; refuse several."""
    if len(selected) > 1:
        raise StatesError(
            f"{str(pattern)[:60]!r} names {len(selected)} sites",
            "it must name one",
            "Choose one of them.",
        )
    return selected[0]


@dataclass(frozen=True, eq=False)
class EachToken:
    """A source of states whose rows are its tokens; `each_token` makes one."""

    source: Model | Readable | Pair | list[Model]


@checked
def each_token(
    source: ModelLike | Sequence[ModelLike] | Readable | Pair,
) -> EachToken:
    """Make an analysis read one row for each token of a source, not one for each text.

    `hs.probe`, `hs.project`, `hs.search` and `hs.cluster` take it in place of a model,
    of states or of a store. Nothing is pooled then.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> states = hs.load((tiny_model("gpt2"), None)).capture([[5, 6, 7], [8, 9]])
    >>> near = hs.search(hs.each_token(states), states["final"][3], k=2, site="final")
    >>> near.facts["unit"], near.facts["searched"]
    ('token', 5)
    """
    return EachToken(_loaded(source))


def rows_of(
    source: Any, pool: Pooling | None, sites: SitePatterns, *, scores: bool = False
) -> tuple[Any, Pooling | None]:
    """Open a source and say how its rows are pooled: None if they are its tokens.

    A probe can pool `scores` of tokens too.
    """
    if isinstance(source, EachToken):
        check_unpooled(pool)
        return source.source, None
    opened = _loaded(source)
    if pool is not None:
        return opened, vector_pooling(pool, scores=scores)
    sources = opened if isinstance(opened, list) else [opened]
    if not all(isinstance(part, Model | Readable | Pair) for part in sources):
        # The analysis refuses such a source itself.
        return opened, SINKLESS
    defaults = {default_pool(part, sites) for part in sources}
    if len(defaults) == 1:
        return opened, defaults.pop()
    # Models that differ here are compared by a pooling that suits all of them.
    return opened, SINKLESS


def check_unpooled(pool: Pooling | None) -> None:
    """Refuse a pooling of rows that are tokens."""
    if pool is not None:
        raise ArgumentError(
            f"Cannot pool by {pool}",
            "with hs.each_token every token is a row of its own",
            "Leave pool out, or give the source itself.",
        )


def _loaded(source: Any) -> Any:
    """Load the model that a source names; keep models, states and stores."""
    if isinstance(source, list):
        return [as_source(part) for part in source]
    return as_source(source)


def open_sites(
    source: Model | Readable | Pair, texts: object, sites: SitePatterns
) -> tuple[Model | Readable, tuple[Site, ...]]:
    """Return a model or the states of one stack, and the sites that are read."""
    stack = _named_stack(sites) or "encoder"
    opened = source
    if isinstance(source, Pair):
        opened = source.decoder if stack == "decoder" else source.encoder
    if isinstance(opened, Model):
        if texts is None:
            raise TextError(
                f"No texts for {opened.name}",
                "no texts were given",
                "Give texts, or give states.",
            )
        selected = opened.anatomy.select(sites)
    elif not isinstance(opened, Readable):
        raise StatesError(
            "Cannot read vectors",
            f"{type(source).__name__} has no states",
            "Give a model and texts, or states.",
        )
    elif texts is not None:
        raise TextError(
            "Cannot use texts with states",
            "the states have their own texts",
            "Leave them out, or give a model.",
        )
    else:
        selected = select(sites, opened.sites, owner="these states")
    if not selected:
        raise StatesError(
            "No sites to read vectors from",
            "the list is empty",
            "Choose 'layer.*' or 'final'.",
        )
    if len({site.stack for site in selected}) > 1:
        selected = tuple(site for site in selected if site.stack == stack)
    return opened, selected


def _listed(texts: Any) -> Any:
    """Return texts as a list if they can be read only once or have no indices."""
    # A column of a frame has `tolist` too.
    column = hasattr(texts, "tolist") and not isinstance(texts, np.ndarray | Tensor)
    if column or isinstance(texts, Iterator | Set | range):
        return as_list(texts)
    return texts


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
