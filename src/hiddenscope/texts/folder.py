"""Folder: the files of texts in a folder."""

import os
from pathlib import Path

from hiddenscope.errors import FileError

FORMATS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSIONS = (".gz", ".zst")


def files_in(folder: Path) -> list[Path]:
    """List the files of texts in a folder and below, by name; hidden ones are left out."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [
            Path(place, name)
            for name in names
            if not name.startswith(".") and _is_known(name)
        ]
    if not files:
        reason = f"no file in it ends with {', '.join(FORMATS)}"
        raise FileError(
            f"Cannot read texts from {str(folder)[:80]!a}",
            reason,
            "Give a folder of such files.",
        )
    return sorted(files)


def _is_known(name: str) -> bool:
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return Path(name).suffix.lower() in FORMATS
