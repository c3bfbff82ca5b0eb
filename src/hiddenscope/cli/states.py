"""States in place of a model: `--states PATH`, one rule for every command.

PATH is a store that `extract` wrote, or a .safetensors file that `capture --out` wrote.
Nothing is computed again, so the options of a model and of its texts have no use beside
it. Labels come from the file of labelled texts that the states were made of: one for
each text, in the same order.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import hiddenscope as hs
from hiddenscope import errors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Saved: TypeAlias = "hs.Store | hs.States | hs.Pair"
# Options of texts and of other models, which have no use beside states.
USELESS = {
    "models": "--model",
    "targets": "--targets",
    "truncate": "--truncate",
    "other": "--other",
}


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the folder of a store."""
    return os.path.isdir(path) and os.path.lexists(Path(path) / "plan.json")


def check_states(
    path: Path, of_model: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuse a path that cannot hold states, and options that have no use beside it."""
    is_saved_file = path.suffix.lower() == ".safetensors" and path.is_file()
    if not is_store(path) and not is_saved_file:
        reason = "there is no such file or folder"
        if path.is_dir():
            reason = "it has no plan.json, so it is not a store"
        elif path.exists():
            reason = "it is not a .safetensors file"
        raise errors.FileError(
            f"Cannot read states from {str(path)[:80]!r}",
            reason,
            "Give the folder that `extract --to` wrote, or the file that `capture"
            " --out` wrote.",
        )
    useless = [f"--{name}" for name, value in of_model.items() if value is not None]
    useless += [option for name, option in USELESS.items() if options.get(name)]
    if useless:
        raise errors.StatesError(
            f"Cannot use {', '.join(useless)} with --states",
            "no model computes anything",
            "Leave one out.",
        )


def read_states(path: Path) -> Saved:
    """Open the store in a folder, or load the states in a file."""
    if is_store(path):
        return hs.open(path)
    # Imported only here, since it needs torch.
    states: hs.States | hs.Pair = import_module("hiddenscope.states").load_states(path)
    return states


def read_saved(path: Path) -> "Saved | NDArray[np.float32]":
    """Open states, or the vectors in a .npy file."""
    import numpy as np

    if path.suffix.lower() != ".npy":
        return read_states(path)
    try:
        vectors: NDArray[np.float32] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise errors.FileError(
            f"Cannot read vectors from {path}", str(error), "Give a .npy file."
        ) from error
    return vectors
