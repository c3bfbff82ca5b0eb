"""Parquet files of a store's rows: one column of vectors for each site.

Embedding Atlas reads such a file too, with one column of vectors, by any reader of
Parquet and without Arrow's own types.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from hiddenscope.store.row_blocks import RowBlock, RowReader

if TYPE_CHECKING:
    import pyarrow

VECTOR = "vector"
METADATA = "hiddenscope"
Advance = Callable[[float], None]


def write_parquet(
    path: Path, reader: RowReader, provenance: str, advance: Advance
) -> None:
    """Write a column of vectors for each site, and one for each fact of a row."""
    names = {site: site for site in reader.sites}
    _write(path, reader, names, provenance, advance, arrow_types=True)


def write_atlas(
    path: Path, reader: RowReader, provenance: str, advance: Advance
) -> None:
    """Write the one site as the column `vector`, in types that every reader knows."""
    names = dict.fromkeys(reader.sites, VECTOR)
    _write(path, reader, names, provenance, advance, arrow_types=False)


def _write(
    path: Path,
    reader: RowReader,
    names: Mapping[str, str],
    provenance: str,
    advance: Advance,
    *,
    arrow_types: bool,
) -> None:
    from pyarrow.parquet import ParquetWriter

    schema = arrow_schema(reader, names, provenance)
    with ParquetWriter(
        path, schema, compression="zstd", store_schema=arrow_types
    ) as writer:
        for block in reader.blocks():
            writer.write_batch(arrow_batch(block, schema, names))
            advance(len(block))


def arrow_schema(
    reader: RowReader, names: Mapping[str, str], provenance: str
) -> "pyarrow.Schema":
    """Return the columns of the rows, with where they come from."""
    import pyarrow

    kinds = {int: pyarrow.int64(), str: pyarrow.string()}
    fields = []
    for name, kind in reader.column_kinds.items():
        fields.append(pyarrow.field(name, kinds[kind], nullable=False))
    number = pyarrow.from_numpy_dtype(reader.dtype)
    for site, width in reader.widths.items():
        vector = pyarrow.list_(pyarrow.field("item", number, nullable=False), width)
        fields.append(pyarrow.field(names[site], vector, nullable=False))
    return pyarrow.schema(fields, {METADATA: provenance})


def arrow_batch(
    block: RowBlock, schema: "pyarrow.Schema", names: Mapping[str, str]
) -> "pyarrow.RecordBatch":
    """Return the rows of a block, without a copy of their values."""
    import pyarrow

    columns: dict[str, NDArray[Any]] = dict(block.columns)
    arrays = []
    for name in schema.names[: len(columns)]:
        arrays.append(pyarrow.array(columns[name], schema.field(name).type))
    for site, name in names.items():
        flat = pyarrow.array(block.values[site].reshape(-1))
        kind = schema.field(name).type
        arrays.append(pyarrow.FixedSizeListArray.from_arrays(flat, type=kind))
    return pyarrow.record_batch(arrays, schema=schema)
