"""Datasets of Hugging Face's library: the folder that `load_from_disk` opens.

The library writes such a folder from a table that it holds or copies; here its Arrow
files are written as the rows are read.
"""

import hashlib
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from hiddenscope.store.export.parquet import arrow_batch, arrow_schema
from hiddenscope.store.row_blocks import RowReader

# About so many bytes of vectors go into one file.
FILE_BYTES = 512 * 2**20


def write_dataset(
    path: Path, reader: RowReader, provenance: str, advance: Callable[[float], None]
) -> None:
    """Write Arrow files with the features and the state that the library reads."""
    import pyarrow
    from datasets import DatasetInfo, Features

    names = {site: site for site in reader.sites}
    plain = arrow_schema(reader, names, provenance)
    features = Features.from_arrow_schema(plain)
    schema = features.arrow_schema.with_metadata(plain.metadata)
    row_bytes = reader.dtype.itemsize * sum(reader.widths.values())
    blocks_per_file = max(1, FILE_BYTES // max(1, row_bytes * reader.block_rows))
    count = max(1, -(-reader.index.count // (reader.block_rows * blocks_per_file)))
    blocks = reader.blocks()
    files = []
    for number in range(count):
        files.append(f"data-{number:05}-of-{count:05}.arrow")
        with pyarrow.ipc.new_stream(path / files[-1], schema) as writer:
            for block in islice(blocks, blocks_per_file):
                writer.write_batch(arrow_batch(block, schema, names))
                advance(len(block))
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
