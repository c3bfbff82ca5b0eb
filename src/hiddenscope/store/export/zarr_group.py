"""Zarr groups of a store's rows: an array for each site and each fact of a row."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

from hiddenscope.store.row_blocks import StoredRows


def write_zarr(
    path: Path, reader: StoredRows, provenance: str, advance: Callable[[float], None]
) -> None:
    """Write a group of version 3, whose dimensions have the names that xarray reads."""
    import zarr

    rows = reader.index.count
    chunk = min(reader.block_rows, max(1, rows))
    group = zarr.create_group(path, zarr_format=3, overwrite=True)
    group.attrs["hiddenscope"] = json.loads(provenance)
    for name, kind in reader.column_kinds.items():
        group.create_array(
            name,
            shape=(rows,),
            chunks=(chunk,),
            dtype="int64" if kind is int else "str",
            dimension_names=("row",),
        )
    for site, width in reader.widths.items():
        group.create_array(
            site,
            shape=(rows, width),
            chunks=(chunk, max(1, width)),
            dtype=reader.dtype,
            dimension_names=("row", f"width_{width}"),
        )
    arrays = dict(group.arrays())
    for block in reader.blocks():
        part = slice(block.start, block.start + len(block))
        for name, values in (*block.columns.items(), *block.values.items()):
            arrays[name][part] = values
        advance(len(block))
    with warnings.catch_warnings():
        # zarr warns that other programs may not know it; xarray warns without it.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)
