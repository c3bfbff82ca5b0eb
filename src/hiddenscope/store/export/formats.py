"""Formats: how the rows of a store leave it, by name or by the suffix of the path."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hiddenscope import progress
from hiddenscope.errors import FileError, SiteError
from hiddenscope.store.export.dataset import write_dataset
from hiddenscope.store.export.parquet import write_atlas, write_parquet
from hiddenscope.store.export.target import check_target, creating
from hiddenscope.store.export.zarr_group import write_zarr
from hiddenscope.store.row_blocks import StoredRows
from hiddenscope.versions import installed_version

ExportFormat: TypeAlias = Literal["parquet", "zarr", "dataset", "atlas"]

WriteRows: TypeAlias = Callable[[Path, StoredRows, str, Callable[[float], None]], None]


@dataclass(frozen=True)
class _Format:
    """One format: its writer, its library, and whether it is a folder."""

    write: WriteRows
    library: str
    folder: bool = False
    suffix: str = ""
    wide: bool = False


FORMATS: Mapping[str, _Format] = {
    "parquet": _Format(write_parquet, "pyarrow", suffix=".parquet"),
    "zarr": _Format(write_zarr, "zarr", folder=True, suffix=".zarr"),
    "dataset": _Format(write_dataset, "datasets", folder=True),
    # DuckDB, which Embedding Atlas asks, has no half precision.
    "atlas": _Format(write_atlas, "pyarrow", suffix=".parquet", wide=True),
}


def export_rows(
    reader: StoredRows,
    target: Path,
    name: ExportFormat | None,
    provenance: Mapping[str, Any],
) -> str:
    """Write the rows of a store in a format, and return its name."""
    format_name = name or _by_suffix(target)
    export_format = _checked(format_name, target, reader)
    check_target(target)
    reader = StoredRows(reader.shards, reader.index, reader.sites, export_format.wide)
    facts = {
        "format": f"hiddenscope.export.{format_name}/1",
        **provenance,
        "sites": list(reader.sites),
        "widths": list(reader.widths.values()),
        "exported_dtype": reader.dtype.name,
        "versions": _versions(export_format.library),
    }
    with (
        creating(target, folder=export_format.folder) as fresh,
        progress.track(f"Exporting to {target.name}", reader.index.count) as advance,
    ):
        export_format.write(fresh, reader, json.dumps(facts), advance)
    return format_name


def _by_suffix(target: Path) -> str:
    for name, known in FORMATS.items():
        if known.suffix and target.suffix.lower() == known.suffix:
            return name
    suffix = target.suffix or "no suffix"
    raise FileError(
        f"Cannot tell the format of {ascii(target.name)[1:-1]}",
        f"it has {suffix}, and .parquet and .zarr are known",
        f"Name a format: {', '.join(FORMATS)}.",
    )


def _checked(name: str, target: Path, reader: StoredRows) -> _Format:
    """Refuse an unknown format, a missing library, and sites that do not fit."""
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
    if name == "atlas" and len(reader.sites) != 1:
        raise SiteError(
            problem,
            f"Embedding Atlas shows one site, and {len(reader.sites)} are chosen",
            f"Choose one, such as sites={reader.sites[-1]!r}.",
        )
    return known


def _versions(library: str) -> dict[str, str]:
    names = ("hiddenscope", "numpy", library)
    return {name: installed_version(name) for name in names}
