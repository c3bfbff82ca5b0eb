"""A small store of states to read, damage and write again.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     tiny_store(Path(folder)).pending()
[]
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hiddenscope.store import StorePlan, StoreSequence, Writer, create
from hiddenscope.store.plan import DTYPES

# Of the store: its sites, and the texts that are copies of others.
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
    """Create a store of seven texts in three units, and commit some or all units.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tiny_store(Path(folder), units=["000001"]).pending()
    ['000000', '000002']
    """
    writer = tiny_plan(path, dtype=dtype, width=width, pool=pool, every=every)
    if units is None:
        units = writer.pending()
    for unit in units:
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
    """Create the store without committing any unit."""
    widths = dict.fromkeys(SITES, width)
    model = {"model": "toy", "dtype": dtype, "depth": 1, "final": True}
    plan = StorePlan(
        model, {}, SITES, widths, dtype, pool, corpus={"count": 7}, every=every
    )
    strings = {number: f"t{number}" for number in range(200)}
    return create(path, plan, tiny_sequences(), COPIES, strings)


def tiny_sequences() -> list[list[StoreSequence]]:
    """Return three units: three texts, a document in two windows, and a single text.

    The texts between the document and the last are copies.
    """
    return [
        [tiny_sequence(0, 5), tiny_sequence(1, 3), tiny_sequence(2, 4)],
        [tiny_sequence(3, 6), tiny_sequence(3, 4, start=3)],
        [tiny_sequence(6, 2)],
    ]


def tiny_sequence(text: int, length: int, start: int = 0) -> StoreSequence:
    """Return a text of some tokens, or a window that begins at `start`."""
    places = range(start, start + length)
    ids = tuple((text * 17 + place) % 200 for place in places)
    spans = tuple((2 * place, 2 * place + 2) for place in places)
    string = None if start else "ab" * (length + 4)
    return StoreSequence(text, start, ids, spans, text % 2, string)


def tiny_values(writer: Writer, unit: str) -> dict[str, NDArray[np.generic]]:
    """Return states that depend on the site, the text, the position and the channel."""
    plan = writer.plan
    rows = []
    for sequence in writer.sequences(unit):
        places = range(1) if plan.pool is not None else sequence.kept(plan.every)
        for place in places:
            rows.append(10 * sequence.text + sequence.start + place)
    values: dict[str, NDArray[np.generic]] = {}
    for number, site in enumerate(plan.sites):
        channels = np.arange(plan.widths[site]) + 100 * number
        wide = np.sin(np.array(rows)[:, None] + channels).astype(np.float32)
        # A bfloat16 is the first half of a float32.
        bits = wide.view(np.uint32) >> 16 if plan.dtype == "bfloat16" else wide
        values[site] = bits.astype(DTYPES[plan.dtype])
    return values
