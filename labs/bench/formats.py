"""Write and read states beside the usual files: torch, safetensors, datasets.

The same bytes in as many files, brought to the disk. Only our store keeps checksums, a
plan and records of commits, and only it checks every block that it reads.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hiddenscope as hs
from labs.bench import measure, store
from labs.bench.measure import Cost, Row

ROWS, SITES = 4096, ("layer.0", "layer.1")
READ = "layer.1"
FORMATS = ("torch.save", "safetensors", "datasets")
Values = dict[str, np.ndarray[Any, Any]]


def rows(repeats: int) -> list[Row]:
    """Compare the speed of our store with each format, and check what is read."""
    folder = Path(tempfile.mkdtemp(prefix="hiddenscope-bench-"))
    try:
        return _rows(folder, repeats)
    finally:
        shutil.rmtree(folder)


def _rows(folder: Path, repeats: int) -> list[Row]:
    shape = (ROWS, store.WIDTH)
    drawn = np.random.default_rng(0).integers(0, 2**15, shape, dtype=np.int16)
    values = dict.fromkeys(SITES, drawn)
    written = measure.interleaved(
        {name: _writer(name, folder, values) for name in ("ours", *FORMATS)},
        repeats,
        before=os.sync,
    )
    readers = {name: _reader(name, folder) for name in ("ours", *FORMATS)}
    for name, reader in readers.items():
        total = sum(_sum(block) for block in reader())
        expected = store.UNITS * int(drawn.astype(np.int64).sum())
        if total != expected:
            raise AssertionError(f"{name} read other states than it wrote")
    read = measure.interleaved(readers, repeats)
    size = store.UNITS * len(SITES) * drawn.nbytes
    what = f"{size / 1e6:.0f} MB in {store.UNITS} units"
    made = _compared("store write", f"{what}, brought to the disk", written)
    return [*made, *_compared("store read", f"{what}, one layer, warm", read)]


def _compared(name: str, what: str, costs: dict[str, list[Cost]]) -> list[Row]:
    made = []
    for other in FORMATS:
        ratio = measure.ratios(costs, "ours")[other]
        text = f"{what}: speed of our store / of {other}"
        made.append(Row(f"{name} formats", text, ratio.cpu, ratio.wall))
    return made


def _writer(name: str, folder: Path, values: Values) -> Callable[[], None]:
    place = folder / name

    def run() -> None:
        shutil.rmtree(place, ignore_errors=True)
        if name == "ours":
            store.stored(place, _as_bits(values))
            return
        place.mkdir()
        for unit in range(store.UNITS):
            WRITERS[name](place / str(unit), values)
        _to_disk(place)

    return run


def _as_bits(values: Values) -> Values:
    """Return the bit patterns of bfloat16, which a store takes as uint16."""
    return {site: value.view(np.uint16) for site, value in values.items()}


def _write_torch(path: Path, values: Values) -> None:
    tensors = {site: torch.from_numpy(value) for site, value in values.items()}
    torch.save(tensors, path)


def _write_safetensors(path: Path, values: Values) -> None:
    # A copy each: safetensors refuses tensors that share their memory.
    tensors = {site: torch.from_numpy(value.copy()) for site, value in values.items()}
    save_file(tensors, path)


def _write_datasets(path: Path, values: Values) -> None:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    Dataset.from_dict(values).save_to_disk(str(path))


WRITERS: dict[str, Callable[[Path, Values], None]] = {
    "torch.save": _write_torch,
    "safetensors": _write_safetensors,
    "datasets": _write_datasets,
}


def _to_disk(place: Path) -> None:
    """Bring every file of a folder to the disk, as our store does."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _reader(name: str, folder: Path) -> Callable[[], Sequence[Any]]:
    place = folder / name
    if name == "ours":
        return lambda: list(hs.open(place).blocks(READ))
    paths = [place / str(unit) for unit in range(store.UNITS)]
    return lambda: [READERS[name](path) for path in paths]


def _read_torch(path: Path) -> Any:
    # Mapped, so that only the layer that is asked for is read.
    return torch.load(path, mmap=True)[READ].clone()


def _read_safetensors(path: Path) -> Any:
    # A copy, since a tensor that is only mapped was not read yet.
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(READ).clone()


def _read_datasets(path: Path) -> Any:
    from datasets import load_from_disk

    return load_from_disk(str(path)).with_format("numpy")[READ][:]


READERS: dict[str, Callable[[Path], Any]] = {
    "torch.save": _read_torch,
    "safetensors": _read_safetensors,
    "datasets": _read_datasets,
}


def _sum(block: Any) -> int:
    """Add up the bit patterns of a block of any kind."""
    if isinstance(block, torch.Tensor):
        block = block.view(torch.int16).numpy()
    bits = np.asarray(block)
    if bits.dtype.itemsize == 2:
        bits = bits.view(np.int16)
    return int(bits.astype(np.int64).sum())
