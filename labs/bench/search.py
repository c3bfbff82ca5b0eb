"""Search a million vectors exactly, against the bare matrix product."""

import numpy as np
import torch

import hiddenscope as hs
from labs.bench import measure
from labs.bench.measure import Row

COUNT, WIDTH, BEST = 1_000_000, 384, 10
# By the number of queries; with few, reading the rows for their norms weighs more.
BARS = {
    64: 1.25,
    16: None,
}
DRAWN = 100_000  # rows that are drawn at a time


def rows(repeats: int) -> list[Row]:
    """Compare a search with one matrix product of all rows and queries."""
    generator = np.random.default_rng(0)
    values = np.empty((COUNT, WIDTH), dtype=np.float32)
    for start in range(0, COUNT, DRAWN):
        values[start : start + DRAWN] = generator.standard_normal(
            (DRAWN, WIDTH), dtype=np.float32
        )
    queries = {
        count: generator.standard_normal((count, WIDTH), dtype=np.float32)
        for count in BARS
    }
    return [_row(values, some, repeats, BARS[count]) for count, some in queries.items()]


def _row(
    values: np.ndarray, queries: np.ndarray, repeats: int, bar: float | None
) -> Row:
    rows, right = torch.from_numpy(values), torch.from_numpy(queries).T
    ways = {
        "bare": lambda: rows @ right,
        "search": lambda: hs.search(values, queries, BEST),
    }
    ratio = measure.ratios(measure.interleaved(ways, repeats), "bare")["search"]
    what = (
        f"{COUNT:,} vectors, {WIDTH} wide: the {BEST} nearest to each of {len(queries)}"
        " queries by cosine"
    )
    return Row(
        f"search {len(queries)}",
        f"{what} / one bare matrix product of the same",
        ratio.cpu,
        ratio.wall,
        bar,
    )
