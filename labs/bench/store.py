"""Write a store, read a layer and pick rows, against the bare file system."""

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

import hiddenscope as hs
from hiddenscope.extract.compute import WRITERS
from hiddenscope.store import StorePlan, StoreSequence, Writer, create
from hiddenscope.store.rows import BLOCK_BYTES
from hiddenscope.store.shard import PIECE
from labs.bench import measure
from labs.bench.measure import Cost, Row

# To be read: a layer of 537 MB.
UNITS, ROWS, WIDTH, SITES = (
    8,
    16_384,
    2048,
    ("layer.0", "layer.1"),
)
# To be written: a whole model's.
WRITTEN_ROWS, WRITTEN_SITES = (
    1024,
    tuple(f"layer.{number}" for number in range(31)),
)
PICKED = 1000
WRITE_BAR, READ_BAR, PICK_BAR = 0.8, 0.8, 5.0
Array = np.ndarray[Any, Any]


def rows(repeats: int) -> list[Row]:
    """Compare a store of two layers with a plain file of the bytes of a layer."""
    folder = Path(tempfile.mkdtemp(prefix="hiddenscope-bench-"))
    try:
        states = np.random.default_rng(0).integers(
            0, 2**16, (ROWS, WIDTH), dtype=np.uint16
        )
        return [_write(folder, states, repeats), *_read(folder, states, repeats)]
    finally:
        shutil.rmtree(folder)


def _write(folder: Path, states: Array, repeats: int) -> Row:
    """Compare committing units of 31 layers with the same bytes in one file."""
    parts = len(states) // WRITTEN_ROWS
    pieces = states.reshape(parts, WRITTEN_ROWS, WIDTH)
    values = {}
    for number, site in enumerate(WRITTEN_SITES):
        values[site] = pieces[number % parts]
    size = UNITS * sum(value.nbytes for value in values.values())
    ways: dict[str, Callable[[], object]] = {
        "raw": lambda: _raw(folder / "raw", [*values.values()] * UNITS),
        "ours": lambda: stored(folder / "store", values),
    }
    costs = measure.interleaved(ways, repeats, before=lambda: _clear(folder))
    ratio = measure.ratios(costs, "ours")["raw"]
    raw = measure.median(costs["raw"]).wall
    _clear(folder)
    what = (
        f"{len(values)} layers, {size / 1e9:.1f} GB in {UNITS} units, with plan,"
        " checksums and fsync: speed / that of one sequential write with fsync"
        f" ({size / raw / 1e9:.2f} GB/s)"
    )
    return _by_wall("store write", what, ratio, WRITE_BAR)


def _clear(folder: Path) -> None:
    """Remove everything in a folder, and have the disk finish."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    os.sync()


def _read(folder: Path, states: Array, repeats: int) -> list[Row]:
    """Compare a layer with a plain file, and 1,000 vectors with that layer."""
    path, plain = folder / "store", folder / "plain"
    stored(path, dict.fromkeys(SITES, states))
    _raw(plain, [states] * UNITS)
    numbers = np.random.default_rng(1).choice(UNITS * ROWS, PICKED, replace=False)
    numbers.sort()
    opened = hs.open(path)
    warm: dict[str, Callable[[], object]] = {
        "raw": lambda: _plain(plain),
        "layer": lambda: _layer(opened),
        "picked": lambda: opened.rows("layer.1", numbers),
    }
    cold: dict[str, Callable[[], object]] = {
        "raw": lambda: _plain(plain),
        "layer": lambda: _layer(hs.open(path)),
        "picked": lambda: hs.open(path).rows("layer.1", numbers),
    }
    size = plain.stat().st_size
    evicted = measure.interleaved(
        cold, repeats, before=lambda: _evict(folder), warm=False
    )
    cached = measure.interleaved(warm, repeats, before=lambda: None)
    return [*_read_rows("warm", size, cached), *_read_rows("cold", size, evicted)]


def _read_rows(when: str, size: int, costs: dict[str, list[Cost]]) -> list[Row]:
    layer = measure.ratios(costs, "layer")["raw"]
    picked = measure.ratios(costs, "picked")["layer"]
    seconds = measure.median(costs["picked"]).wall
    what = (
        f"one layer of {size / 1e6:.0f} MB, every block checked: speed / that of a"
        " plain file of the same bytes"
    )
    pick = (
        f"reading that layer / reading {PICKED:,} of its vectors, checked"
        f" ({seconds * 1000:.0f} ms)"
    )
    return [
        _by_wall(f"store read {when}", what, layer, READ_BAR),
        _by_wall(f"store pick {when}", pick, picked, PICK_BAR),
    ]


def _by_wall(name: str, what: str, ratio: Cost, bar: float) -> Row:
    return Row(name, what, ratio.cpu, ratio.wall, bar, at_least=True, judged="wall")


def _plain(path: Path) -> int:
    """Read a file as a reader would that checks nothing: 64 MiB at a time, each into
    memory of its own.
    """
    total = 0
    with path.open("rb", buffering=0) as file:
        for _ in range(path.stat().st_size // BLOCK_BYTES):
            total += file.readinto(np.empty(BLOCK_BYTES, np.uint8).data)
    return total


def _layer(store: hs.Store) -> int:
    return sum(len(block) for block in store.blocks("layer.1"))


def stored(path: Path, values: dict[str, Array]) -> Writer:
    """Write a store of units that all hold these values."""
    plan = StorePlan(
        {"model": "bench"}, {}, tuple(values), dict.fromkeys(values, WIDTH), "bfloat16"
    )
    tokens = len(next(iter(values.values())))
    ids, spans = tuple(range(tokens)), ((-1, -1),) * tokens
    writer = create(
        path, plan, ([StoreSequence(unit, 0, ids, spans, 0)] for unit in range(UNITS))
    )
    committed: list[Future[bool]] = []
    with ThreadPoolExecutor(WRITERS) as threads:  # as a job writes them
        for unit in writer.pending():
            writer.sequences(unit)  # which a job reads for the pass
            wait(committed[: 1 - WRITERS])
            committed.append(threads.submit(writer.commit, unit, values))
    assert all(first.result() for first in committed)
    writer.complete()
    return writer


def _raw(path: Path, arrays: list[Array]) -> None:
    with path.open("wb", buffering=0) as file:
        for array in arrays:
            content = array.reshape(-1).view(np.uint8).data
            for start in range(0, len(content), PIECE):
                file.write(content[start : start + PIECE])
        os.fsync(file.fileno())


def _evict(folder: Path) -> None:
    """Have the system forget what it holds of the files, which are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
