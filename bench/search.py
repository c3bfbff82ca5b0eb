"""Exact search over a million vectors: against the bare matrix product of the same numbers."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import hiddenscope as hs
from bench import measure
from bench.measure import Row

COUNT, WIDTH, QUERIES, BEST, BAR = 1_000_000, 384, (16, 64), 10, 1.3
DRAWN = 100_000  # rows that are drawn at a time


def rows(repeats: int) -> list[Row]:
    """What the k nearest of each query cost for one product of all rows with all queries."""
    generator = np.random.default_rng(0)
    values = np.empty((COUNT, WIDTH), dtype=np.float32)
    for start in range(0, COUNT, DRAWN):
        values[start : start + DRAWN] = generator.standard_normal((DRAWN, WIDTH), dtype=np.float32)
    made = [_row(values, generator.standard_normal((count, WIDTH), dtype=np.float32), repeats) for count in QUERIES]
    with TemporaryDirectory() as folder:
        return [*made, _mapped(values, Path(folder, "rows.npy"))]


def _row(values: np.ndarray, queries: np.ndarray, repeats: int) -> Row:
    bare, asked = torch.from_numpy(values), torch.from_numpy(queries)
    ways = {"bare": lambda: bare @ asked.T, "search": lambda: hs.search(values, queries, BEST)}
    found = measure.ratios(measure.interleaved(ways, repeats), "bare")["search"]
    what = f"{COUNT:,} vectors, {WIDTH} wide: the {BEST} nearest to each of {len(queries)} queries by cosine"
    return Row(f"search {len(queries)}", f"{what} / one bare matrix product of the same", found.cpu, found.wall, BAR)


def _mapped(values: np.ndarray, path: Path) -> Row:
    """How much memory a search over a file takes, as a share of the file."""
    np.save(path, values)
    del values
    mapped, query = np.load(path, mmap_mode="r"), np.ones(WIDTH)
    before = measure.resident()
    share = (measure.peak(lambda: hs.search(mapped, query, BEST)) - before) / mapped.nbytes
    return Row("search memory", "the same from a memory-mapped file: memory held beyond / the size of the file", share)
