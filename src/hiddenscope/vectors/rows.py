"""Rows: what an analysis reads from a source, a vector for each text or for each token.

The source says which, so that no analysis needs a parameter for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hiddenscope.arguments import checked
from hiddenscope.errors import ArgumentError
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.states.pooling import parse_pooling
from hiddenscope.vectors.vectors import default_pool


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
    return EachToken(_opened(source))


def rows_of(
    source: Any, pool: Pooling | None, sites: SitePatterns
) -> tuple[Any, Pooling | None]:
    """Open a source and say how its rows are pooled: None if they are its tokens."""
    if isinstance(source, EachToken):
        check_unpooled(pool)
        return source.source, None
    opened = _opened(source)
    if pool is not None:
        return opened, parse_pooling(pool)
    sources = opened if isinstance(opened, list) else [opened]
    if not all(isinstance(part, Model | Readable | Pair) for part in sources):
        # The analysis refuses such a source itself.
        return opened, "mean"
    defaults = {default_pool(part, sites) for part in sources}
    if len(defaults) == 1:
        return opened, defaults.pop()
    # Models that differ here are compared by a pooling that suits all of them.
    return opened, "mean"


def check_unpooled(pool: Pooling | None) -> None:
    """Refuse a pooling of rows that are tokens."""
    if pool is not None:
        raise ArgumentError(
            f"Cannot pool by {pool}",
            "with hs.each_token every token is a row of its own",
            "Leave pool out, or give the source itself.",
        )


def _opened(source: Any) -> Any:
    """Load the model that a source names; keep models, states and stores."""
    if isinstance(source, list):
        return [as_source(part) for part in source]
    return as_source(source)
