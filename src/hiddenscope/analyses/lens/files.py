"""Files of lenses: safetensors, with a JSON header."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from hiddenscope.errors import FileError
from hiddenscope.files import read_tensors, write_tensors

PathLike: TypeAlias = str | os.PathLike[str]


def write_lens_file(
    path: PathLike,
    file_format: str,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, object],
) -> None:
    """Write tensors and their header; the suffix must be .safetensors."""
    if Path(path).suffix.lower() != ".safetensors":
        raise FileError(
            f"Cannot save a lens as {os.fspath(path)!r}",
            "a lens is a .safetensors file",
            "Give the path that suffix.",
        )
    write_tensors(path, tensors, {"format": file_format, "lens": json.dumps(header)})


def read_lens_file(
    path: PathLike, file_format: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_lens_file` wrote."""
    tensors, header = read_tensors(path, "a lens", file_format)
    try:
        return tensors, dict(json.loads(header["lens"]))
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: PathLike, error: Exception) -> FileError:
    """Return the error for a file that holds no lens."""
    return FileError(
        f"Cannot read a lens from {os.fspath(path)!r}",
        f"it is damaged or of another kind ({error})",
        "Fit the lens again.",
    )
