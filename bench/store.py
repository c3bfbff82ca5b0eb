"""A store on disk: writing, reading one layer and reading here and there, against the
bare file system.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

import hiddenscope as hs
from bench import measure
from bench.measure import Row
from hiddenscope.extract.compute import WRITERS
from hiddenscope.store import StorePlan, StoreSequence, Writer, create
from hiddenscope.store.checksums import PIECE
from hiddenscope.store.store import BLOCK_BYTES

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


def rows(repeats: int) -> list[Row]:
    """One store of two layers in bfloat16, and one plain file of the bytes of a layer."""
    folder = Path(tempfile.mkdtemp(prefix="hiddenscope-bench-"))
    try:
        states = np.random.default_rng(0).integers(
            0, 2**16, (ROWS, WIDTH), dtype=np.uint16
        )
        return [_write(folder, states, repeats), *_read(folder, states, repeats)]
    finally:
        shutil.rmtree(folder)


def _write(folder: Path, states: np.ndarray, repeats: int) -> Row:
    """Units of 31 layers committed with their checksums, against the same bytes in one
    file.
    """
    parts = len(states) // WRITTEN_ROWS
    values = {
        site: states.reshape(parts, WRITTEN_ROWS, WIDTH)[n % parts]
        for n, site in enumerate(WRITTEN_SITES)
    }
    size = UNITS * sum(value.nbytes for value in values.values())

    def clear() -> None:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()

    ways: dict[str, Callable[[], object]] = {
        "raw": lambda: _raw(folder / "raw", [*values.values()] * UNITS),
        "ours": lambda: _stored(folder / "store", values),
    }
    costs = measure.interleaved(ways, repeats, before=clear)
    ratio, raw = measure.ratios(costs, "ours")["raw"], measure.median(costs["raw"]).wall
    clear()
    what = (
        f"{len(values)} layers, {size / 1e9:.1f} GB in {UNITS} units, with plan,"
        " checksums and fsync: speed"
    )
    what = (
        f"{what} / that of one sequential write with fsync ({size / raw / 1e9:.2f}"
        " GB/s)"
    )
    return Row(
        "store write",
        what,
        ratio.cpu,
        ratio.wall,
        WRITE_BAR,
        at_least=True,
        judged="wall",
    )


def _read(folder: Path, states: np.ndarray, repeats: int) -> list[Row]:
    """One layer of the store against a plain file of as many bytes, and 1,000 vectors
    against that layer.
    """
    path, plain = folder / "store", folder / "plain"
    _stored(path, dict.fromkeys(SITES, states))
    _raw(plain, [states] * UNITS)
    size = f"{plain.stat().st_size / 1e6:.0f} MB"
    numbers = np.sort(
        np.random.default_rng(1).choice(UNITS * ROWS, PICKED, replace=False)
    )
    found = []
    for cold in (False, True):
        opened = hs.open(path)
        ways: dict[str, Callable[[], object]] = {
            "raw": lambda: _plain(plain),
            "layer": lambda opened=opened, cold=cold: _layer(
                hs.open(path) if cold else opened
            ),
            "picked": (
                lambda opened=opened, cold=cold: (
                    hs.open(path) if cold else opened
                ).rows("layer.1", numbers)
            ),
        }
        before = (lambda: _evict(folder)) if cold else (lambda: None)
        costs = measure.interleaved(ways, repeats, before=before, warm=not cold)
        when = "cold" if cold else "warm"
        read, pick = (
            measure.ratios(costs, "layer")["raw"],
            measure.ratios(costs, "picked")["layer"],
        )
        seconds = measure.median(costs["picked"]).wall * 1000
        found += [
            Row(
                f"store read {when}",
                f"one layer of {size}, every block checked: speed / that of a plain"
                " file of the same bytes",
                *(read.cpu, read.wall, READ_BAR),
                at_least=True,
                judged="wall",
            ),
            Row(
                f"store pick {when}",
                f"reading that layer / reading {PICKED:,} of its vectors, checked"
                f" ({seconds:.0f} ms)",
                *(pick.cpu, pick.wall, PICK_BAR),
                at_least=True,
                judged="wall",
            ),
        ]
    return found


def _plain(path: Path) -> int:
    """Read a file as a reader would that checks nothing: 64 MiB at a time, each into
    memory of its own.
    """
    with path.open("rb", buffering=0) as file:
        return sum(
            file.readinto(np.empty(BLOCK_BYTES, np.uint8).data)
            for _ in range(path.stat().st_size // BLOCK_BYTES)
        )


def _layer(store: hs.Store) -> int:
    return sum(len(block) for block in store.blocks("layer.1"))


def _stored(path: Path, values: dict[str, np.ndarray]) -> Writer:
    """A store of units that all hold these values."""
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


def _raw(path: Path, arrays: list[np.ndarray]) -> None:
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
