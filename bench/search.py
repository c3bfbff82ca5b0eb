"""Exact search over a million vectors: against the bare matrix product of the same numbers."""

import numpy as np
import torch

import hiddenscope as hs
from bench import measure
from bench.measure import Row

COUNT, WIDTH, BEST = 1_000_000, 384, 10
QUERIES = {
    64: 1.3,
    16: None,
}  # the bar; with few queries the norms of the rows weigh more, and that is there to be read
DRAWN = 100_000  # rows that are drawn at a time


def rows(repeats: int) -> list[Row]:
    """What the k nearest of each query cost for one product of all rows with all queries."""
    generator = np.random.default_rng(0)
    values = np.empty((COUNT, WIDTH), dtype=np.float32)
    for start in range(0, COUNT, DRAWN):
        values[start : start + DRAWN] = generator.standard_normal((DRAWN, WIDTH), dtype=np.float32)
    asked = {count: generator.standard_normal((count, WIDTH), dtype=np.float32) for count in QUERIES}
    return [_row(values, queries, repeats, QUERIES[count]) for count, queries in asked.items()]


def _row(values: np.ndarray, queries: np.ndarray, repeats: int, bar: float | None) -> Row:
    bare, asked = torch.from_numpy(values), torch.from_numpy(queries)
    ways = {"bare": lambda: bare @ asked.T, "search": lambda: hs.search(values, queries, BEST)}
    found = measure.ratios(measure.interleaved(ways, repeats), "bare")["search"]
    what = f"{COUNT:,} vectors, {WIDTH} wide: the {BEST} nearest to each of {len(queries)} queries by cosine"
    return Row(f"search {len(queries)}", f"{what} / one bare matrix product of the same", found.cpu, found.wall, bar)
