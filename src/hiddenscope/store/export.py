"""Exports: the rows of a store in the formats of other programs.

Rows are read and written some at a time, with all that is known of each: `Store.tokens`
holds that of every row at once, as Python strings, and a corpus of a billion tokens
needs it in bounded memory.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.errors import FileError, SiteError
from hiddenscope.files import explained, temporary_beside, to_disk
from hiddenscope.store.plan import DTYPES
from hiddenscope.store.rows import Shards, SiteArray, TextIndex
from hiddenscope.versions import installed_version

if TYPE_CHECKING:
    import pyarrow

ExportFormat: TypeAlias = Literal["parquet", "zarr", "dataset", "atlas"]
Advance: TypeAlias = Callable[[float], None]

# Bytes of states, of all sites together, and rows that are held at a time.
BLOCK_BYTES = 16 * 2**20
BLOCK_ROWS = 16_384
# About this many bytes of vectors go into one file of a dataset.
FILE_BYTES = 512 * 2**20
# Characters of the text that are shown on either side of a token.
CONTEXT = 80


class StoredRows:
    """The rows of a store, read block by block.

    A row has the index of its text and its position. A token's also has its id, its
    string, its characters and the text around it; a pooled one has the whole text.
    Values are in the dtype on disk, bfloat16 widened to float32, which is exact.

    For Embedding Atlas, the vectors of the one site are called `vector`, and all are
    float32: DuckDB, which it asks, has no half precision.
    """

    def __init__(
        self, shards: Shards, index: TextIndex, sites: tuple[str, ...], *, atlas: bool
    ) -> None:
        plan = shards.plan
        self.shards = shards
        self.index = index
        self.atlas = atlas
        # The columns of vectors, each with its site.
        self.vectors = dict(zip(["vector"] if atlas else sites, sites, strict=True))
        self.dtype = DTYPES[plan.dtype]
        if atlas or plan.dtype == "bfloat16":
            self.dtype = np.dtype(np.float32)
        # The first sequence of each text, with which its string is stored.
        self._firsts = index.sequences.take(index.firsts)
        self._text_of = shards.text_reader()
        # As if all were float32, because narrower ones may be widened.
        self.width = sum(plan.widths[site] for site in sites)
        row_bytes = max(1, 4 * self.width)
        self.block_rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))
        # All columns without their rows, to tell their dtypes and widths.
        self.columns = self._block(0, 0)

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield all rows in order, some at a time, as columns by name."""
        for start in range(0, self.index.count, self.block_rows):
            yield self._block(start, min(start + self.block_rows, self.index.count))

    def _block(self, start: int, end: int) -> dict[str, NDArray[Any]]:
        tokens = self.shards.tokens(self.index, np.arange(start, end))
        firsts = self._firsts.take(tokens.text)
        texts = map(self._text_of, firsts.unit.tolist(), firsts.number.tolist())
        block: dict[str, NDArray[Any]] = {
            "text_index": self.index.texts[tokens.text],
            "position": tokens.positions,
        }
        is_pooled = self.shards.plan.pool is not None
        if not is_pooled:
            block["id"] = tokens.ids
            block["token"] = as_strings(tokens.strings)
            block["start"], block["end"] = tokens.spans.T
        if self.shards.has_texts and is_pooled:
            block["text"] = as_strings(texts)
        elif self.shards.has_texts:
            around = map(context, texts, *tokens.spans.T.tolist())
            block["context"] = as_strings(around)
        for name, site in self.vectors.items():
            wide = SiteArray(self.shards, self.index, site).read(start, end)
            block[name] = wide.astype(self.dtype, copy=False)
        return block


def context(text: str, start: int, end: int) -> str:
    """Return a token with the text around it; the text's beginning if it has none.

    >>> context("a long text " * 20, 100, 104) == ("a long text " * 20)[20:184]
    True
    >>> context("short", -1, -1)
    'short'
    """
    if start < 0:
        return text[: 2 * CONTEXT]
    return text[max(0, start - CONTEXT) : end + CONTEXT]


def as_strings(strings: Iterable[str]) -> NDArray[Any]:
    """Return strings that UTF-8 can hold: half of a surrogate pair becomes a mark.

    >>> as_strings(["a", "\\ud800"]).tolist()
    ['a', '\\ufffd\\ufffd\\ufffd']
    """
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    return np.array([part.decode("utf-8", "replace") for part in encoded], object)


def write_parquet(
    path: Path, rows: StoredRows, provenance: str, advance: Advance
) -> None:
    """Write a column of vectors for each site, and one for each fact of a row."""
    from pyarrow.parquet import ParquetWriter

    schema = _arrow_schema(rows, provenance)
    # Embedding Atlas takes any reader of Parquet, without Arrow's own types.
    with ParquetWriter(
        path, schema, compression="zstd", store_schema=not rows.atlas
    ) as writer:
        for block in rows.blocks():
            writer.write_batch(_arrow_batch(block, schema))
            advance(len(block["position"]))


def _arrow_schema(rows: StoredRows, provenance: str) -> "pyarrow.Schema":
    """Return the columns of the rows, with where they come from."""
    import pyarrow

    fields = []
    for name, column in rows.columns.items():
        kind = pyarrow.string()
        if column.dtype != object:
            kind = pyarrow.from_numpy_dtype(column.dtype)
        if column.ndim > 1:
            number = pyarrow.field("item", kind, nullable=False)
            kind = pyarrow.list_(number, column.shape[1])
        fields.append(pyarrow.field(name, kind, nullable=False))
    return pyarrow.schema(fields, {"hiddenscope": provenance})


def _arrow_batch(
    block: Mapping[str, NDArray[Any]], schema: "pyarrow.Schema"
) -> "pyarrow.RecordBatch":
    """Return the rows of a block, without a copy of their vectors."""
    import pyarrow

    arrays = []
    for field in schema:
        values = block[field.name]
        if values.ndim == 1:
            arrays.append(pyarrow.array(values, field.type))
        else:
            flat = pyarrow.array(values.reshape(-1))
            vectors = pyarrow.FixedSizeListArray.from_arrays(flat, type=field.type)
            arrays.append(vectors)
    return pyarrow.record_batch(arrays, schema=schema)


def write_dataset(
    path: Path, rows: StoredRows, provenance: str, advance: Advance
) -> None:
    """Write the folder that `load_from_disk` of Hugging Face's library opens.

    The library makes such a folder from a table that it holds or copies; here its Arrow
    files are written as the rows are read.
    """
    import pyarrow
    from datasets import DatasetInfo, Features

    plain = _arrow_schema(rows, provenance)
    features = Features.from_arrow_schema(plain)
    schema = features.arrow_schema.with_metadata(plain.metadata)
    row_bytes = rows.dtype.itemsize * rows.width
    blocks_per_file = max(1, FILE_BYTES // max(1, row_bytes * rows.block_rows))
    count = max(1, -(-rows.index.count // (rows.block_rows * blocks_per_file)))
    blocks = rows.blocks()
    files = []
    for number in range(count):
        files.append(f"data-{number:05}-of-{count:05}.arrow")
        with pyarrow.ipc.new_stream(path / files[-1], schema) as writer:
            for block in islice(blocks, blocks_per_file):
                writer.write_batch(_arrow_batch(block, schema))
                advance(len(block["position"]))
    description = f"Hidden states that hiddenscope exported: {provenance}"
    DatasetInfo(description=description, features=features).write_to_directory(path)
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": hashlib.sha256(provenance.encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (path / "state.json").write_text(json.dumps(state, indent=2), "utf-8")


def write_zarr(path: Path, rows: StoredRows, provenance: str, advance: Advance) -> None:
    """Write a group of version 3, whose dimensions have the names that xarray reads.

    It has an array for each site and each fact of a row.
    """
    import zarr

    count = rows.index.count
    chunk = min(rows.block_rows, max(1, count))
    group = zarr.create_group(path, zarr_format=3, overwrite=True)
    group.attrs["hiddenscope"] = json.loads(provenance)
    for name, column in rows.columns.items():
        widths = column.shape[1:]
        group.create_array(
            name,
            shape=(count, *widths),
            chunks=(chunk, *[max(1, width) for width in widths]),
            dtype="str" if column.dtype == object else column.dtype,
            dimension_names=("row", *[f"width_{width}" for width in widths]),
        )
    arrays = dict(group.arrays())
    done = 0
    for block in rows.blocks():
        end = done + len(block["position"])
        for name, values in block.items():
            arrays[name][done:end] = values
        advance(end - done)
        done = end
    with warnings.catch_warnings():
        # zarr warns that other programs may not know it; xarray warns without it.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)


@dataclass(frozen=True)
class _Format:
    """One format: its writer, its library, and whether it is a folder."""

    write: Callable[[Path, StoredRows, str, Advance], None]
    library: str
    suffix: str = ""
    folder: bool = False


FORMATS: Mapping[str, _Format] = {
    "parquet": _Format(write_parquet, "pyarrow", ".parquet"),
    "zarr": _Format(write_zarr, "zarr", ".zarr", folder=True),
    "dataset": _Format(write_dataset, "datasets", folder=True),
    "atlas": _Format(write_parquet, "pyarrow", ".parquet"),
}


def export_rows(
    shards: Shards,
    index: TextIndex,
    sites: tuple[str, ...],
    target: Path,
    name: str | None,
    provenance: Mapping[str, Any],
) -> str:
    """Write the rows of a store in a format, and return its name."""
    if name is None:
        name = {".parquet": "parquet", ".zarr": "zarr"}.get(target.suffix.lower())
    if name is None:
        suffix = target.suffix or "no suffix"
        raise FileError(
            f"Cannot tell the format of {ascii(target.name)[1:-1]}",
            f"it has {suffix}, and .parquet and .zarr are known",
            f"Name a format: {', '.join(FORMATS)}.",
        )
    problem = f"Cannot export as {name[:40]}"
    known = FORMATS.get(name)
    if known is None:
        raise FileError(
            problem, "there is no such format", f"Choose one of {', '.join(FORMATS)}."
        )
    if known.suffix and target.suffix.lower() != known.suffix:
        raise FileError(
            problem,
            f"{ascii(target.name)[1:-1]} does not end in {known.suffix}",
            "Give the path that suffix.",
        )
    if find_spec(known.library) is None:
        raise FileError(
            problem,
            f"{known.library} is not installed",
            "Run pip install 'hiddenscope[export]'.",
        )
    if name == "atlas" and len(sites) != 1:
        raise SiteError(
            problem,
            f"Embedding Atlas shows one site, and {len(sites)} are chosen",
            f"Choose one, such as sites={sites[-1]!r}.",
        )
    rows = StoredRows(shards, index, sites, atlas=name == "atlas")
    libraries = ("hiddenscope", "numpy", known.library)
    facts = {
        "format": f"hiddenscope.export.{name}/1",
        **provenance,
        "sites": list(sites),
        "widths": [shards.plan.widths[site] for site in sites],
        "exported_dtype": rows.dtype.name,
        "versions": {library: installed_version(library) for library in libraries},
    }
    with (
        _creating(target, folder=known.folder) as fresh,
        progress.track(f"Exporting to {target.name}", index.count) as advance,
    ):
        known.write(fresh, rows, json.dumps(facts), advance)
    return name


@contextmanager
def _creating(target: Path, *, folder: bool) -> Iterator[Path]:
    """Yield a fresh path beside the target, which becomes it if the body succeeds.

    Whatever ends the body before, nothing is left. What a killed process left behind
    is removed by the next export to the same place.
    """
    problem = f"Cannot export to {ascii(str(target))[1:-1]}"
    exists = FileError(problem, "it exists already", "Choose a new path.")
    if os.path.lexists(target):
        raise exists
    if not target.absolute().parent.is_dir():
        raise FileError(
            problem, "its folder does not exist", "Make the folder, or choose another."
        )
    with (
        explained(problem, "Choose a folder that can be written and has room."),
        temporary_beside(target, "export.", folder=folder) as fresh,
    ):
        yield fresh
        for path in (fresh, *fresh.rglob("*")):
            to_disk(path)
        # Another process may have written it meanwhile.
        if os.path.lexists(target):
            raise exists
        os.rename(fresh, target)
        to_disk(target.absolute().parent)
