"""Files of lenses: tensors and a few words about them, as safetensors."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hiddenscope.errors import FileError
from hiddenscope.files import read_tensors, write_tensors


@dataclass(frozen=True, eq=False)
class Kept:
    """What such a file holds."""

    tensors: Mapping[str, Tensor]
    said: Mapping[str, Any]


def write_kept(path: str | os.PathLike[str], form: str, kept: Kept) -> None:
    """Write a file, whole or not at all."""
    if Path(path).suffix.lower() != ".safetensors":
        reason = "a lens is kept as .safetensors"
        raise FileError(f"Cannot save a lens as {os.fspath(path)!r}", reason, "Give the path that suffix.")
    write_tensors(path, kept.tensors, {"format": form, "lens": json.dumps(kept.said)})


def read_kept(path: str | os.PathLike[str], form: str) -> Kept:
    """Read what `write_kept` wrote."""
    tensors, header = read_tensors(path, "a lens", form)
    try:
        return Kept(tensors, dict(json.loads(header["lens"])))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"Cannot read a lens from {os.fspath(path)!r}"
        raise FileError(problem, f"it is damaged or of another kind ({error})", "Fit the lens again.") from error
