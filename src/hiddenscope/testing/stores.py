"""A small store with everything that a store may have: units, a document in windows,
copies of texts, strings.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hiddenscope.store import StorePlan, StoreSequence, Writer, create
from hiddenscope.store.plan import DTYPES

SITES = ("layer.0", "layer.1", "final")
COPIES = ((4, 1), (5, 0))


def tiny_store(
    path: Path,
    *,
    units: Iterable[str] | None = None,
    dtype: str = "float32",
    width: int = 24,
    pool: str | None = None,
    every: int = 1,
) -> Writer:
    """Make a store of seven texts in three units, and commit all units, or those that
    are named.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tiny_store(Path(folder), units=["000001"]).pending()
    ['000000', '000002']
    """
    writer = tiny_plan(path, dtype=dtype, width=width, pool=pool, every=every)
    for unit in writer.pending() if units is None else units:
        writer.commit(unit, tiny_values(writer, unit))
    if not writer.pending():
        writer.complete()
    return writer


def tiny_plan(
    path: Path,
    *,
    dtype: str = "float32",
    width: int = 24,
    pool: str | None = None,
    every: int = 1,
) -> Writer:
    """Make the store without its units, or what is damaged of its plan."""
    widths = dict.fromkeys(SITES, width)
    model = {"model": "toy", "dtype": dtype, "depth": 1, "final": True}
    plan = StorePlan(
        model, {}, SITES, widths, dtype, pool, corpus={"count": 7}, every=every
    )
    strings = {number: f"t{number}" for number in range(200)}
    return create(path, plan, tiny_sequences(), COPIES, strings, every=every)


def tiny_sequences() -> list[list[StoreSequence]]:
    """Three units: of three texts, of a document in two windows, and of one text after
    two copies.
    """
    units = [(0, 5, 0), (1, 3, 0), (2, 4, 0)], [(3, 6, 0), (3, 4, 3)], [(6, 2, 0)]
    return [[tiny_sequence(*given) for given in unit] for unit in units]


def tiny_sequence(text: int, length: int, start: int = 0) -> StoreSequence:
    """A text of some tokens, or a window that begins at `start`."""
    ids = tuple((text * 17 + start + place) % 200 for place in range(length))
    spans = tuple(
        (2 * (start + place), 2 * (start + place) + 2) for place in range(length)
    )
    return StoreSequence(
        text, start, ids, spans, text % 2, None if start else "ab" * (length + 4)
    )


def tiny_values(writer: Writer, unit: str) -> dict[str, NDArray[np.generic]]:
    """States that depend on the site, the text, the position and the channel."""
    return {site: _stored(writer, unit, site) for site in writer.plan.sites}


def _stored(writer: Writer, unit: str, site: str) -> NDArray[np.generic]:
    plan = writer.plan
    places = list(_places(writer.sequences(unit), plan))
    channels = np.arange(plan.widths[site]) + 100 * plan.sites.index(site)
    wide = np.sin(np.array(places)[:, None] + channels).astype(np.float32)
    bits = wide.view(np.uint32) >> 16 if plan.dtype == "bfloat16" else wide
    return bits.astype(DTYPES[plan.dtype])


def _places(sequences: Iterable[StoreSequence], plan: StorePlan) -> Iterator[int]:
    for sequence in sequences:
        for place in sequence.kept(plan.every) if plan.pool is None else range(1):
            yield 10 * sequence.text + sequence.start + place
