"""Tensors that another program wrote or holds, by the names that it gave them."""

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import FileError, StatesError, Unsafe
from hiddenscope.files import believable

# The name of an array that came without one.
UNNAMED = ""
READABLE = ".safetensors, .safetensors.zst, .npy or .npz"
_PICKLED = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}


@dataclass(frozen=True)
class ForeignTensors:
    """Tensors by name, and what is known of the program that computed them.

    `depth` is that of the model, where the program says it; `notes` go into the source
    of the states.
    """

    name: str
    tensors: Mapping[str, Tensor]
    depth: int | None = None
    notes: tuple[str, ...] = ()
    header: Mapping[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Return how an error begins."""
        return f"Cannot read states from {self.name}"


def open_foreign(data: Any) -> ForeignTensors:
    """Return the tensors of a file, an array, a list of arrays, a dict or a cache."""
    if isinstance(data, str | os.PathLike):
        return _open_file(Path(data))
    if hasattr(data, "cache_dict"):
        return _open_cache(data)
    name = f"a {type(data).__name__}"
    if isinstance(data, Mapping):
        tensors = {}
        for key, value in data.items():
            tensors[str(key)] = _tensor(_first(value), f"{name} ({str(key)[:60]})")
        return ForeignTensors(name, tensors)
    if isinstance(data, list | tuple) and data and _is_array(data[0]):
        layers = [_tensor(layer, name) for layer in data]
        if len({layer.shape for layer in layers}) > 1:
            shapes = [list(layer.shape) for layer in layers[:4]]
            raise StatesError(
                f"Cannot read states from {name}",
                f"its arrays differ in shape ({shapes})",
                "Give one array for each layer, all of the same texts.",
            )
        return ForeignTensors(name, {UNNAMED: torch.stack(layers)})
    return ForeignTensors(name, {UNNAMED: _tensor(data, name)})


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _first(value: Any) -> Any:
    """Return the hidden states of what a block returned, which may be a tuple."""
    if isinstance(value, list | tuple) and value and _is_array(value[0]):
        return value[0]
    return value


def _tensor(value: Any, name: str) -> Tensor:
    """Return an array as a tensor on the CPU."""
    if isinstance(value, Tensor) and not value.is_meta:
        return value.detach().cpu()
    try:
        array = np.asarray(value)
        # A copy, because torch takes no read-only array.
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError, RuntimeError) as error:
        raise StatesError(
            f"Cannot read states from {name}",
            f"it is not an array of numbers ({str(error)[:100]})",
            "Give a tensor, an array, a dict of them or the path of a file.",
        ) from error


def _open_cache(cache: Any) -> ForeignTensors:
    """Return the activations of TransformerLens, with what its model says of them."""
    config = getattr(getattr(cache, "model", None), "cfg", None)
    depth = getattr(config, "n_layers", None)
    notes = []
    norm = str(getattr(config, "normalization_type", "") or "")
    if norm.endswith("Pre"):
        notes.append(
            "TransformerLens folded the weights of norms into those after them"
            f" (normalization_type is {norm})."
        )
    opened = open_foreign(dict(cache.cache_dict))
    return ForeignTensors("an ActivationCache", opened.tensors, depth, tuple(notes))


def _open_file(path: Path) -> ForeignTensors:
    name = ascii(path.name)[1:-1]
    problem = f"Cannot read states from {name}"
    suffix = path.suffix.lower()
    if suffix in _PICKLED:
        raise Unsafe(
            problem,
            "it is a pickle, which runs code when it is read",
            "Save the tensors with safetensors.torch.save_file(tensors, path).",
        )
    if not path.is_file():
        raise FileError(problem, "there is no such file", "Give the path of a file.")
    try:
        if suffix in (".npy", ".npz"):
            return ForeignTensors(name, _read_numpy(path, name))
        if suffix == ".safetensors":
            return _read_safetensors(path, name)
        if path.name.lower().endswith(".safetensors.zst"):
            return ForeignTensors(name, _read_compressed(path))
    except StatesError:
        raise
    except Exception as error:
        # Each of the three libraries has errors of its own for a damaged file.
        reason = f"it is damaged, cut short, or not such a file ({str(error)[:120]})"
        raise FileError(problem, reason, "Write the file again.") from error
    raise FileError(problem, f"its suffix is {suffix!r}", f"Give a {READABLE} file.")


def _read_numpy(path: Path, name: str) -> dict[str, Tensor]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            # zipfile reads no more of a member than this, whatever is in it.
            _check_growth(path, sum(member.file_size for member in packed.infolist()))
    # Arrays of objects would be unpickled.
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return {UNNAMED: _tensor(loaded, name)}
    with loaded as arrays:
        return {key: _tensor(arrays[key], name) for key in arrays.files}


def _read_safetensors(path: Path, name: str) -> ForeignTensors:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        # The file is not a mapping, and cannot be iterated itself.
        names = list(file.keys())
        tensors = {key: file.get_tensor(key) for key in names}
    return ForeignTensors(name, tensors, header=header)


def _read_compressed(path: Path) -> dict[str, Tensor]:
    """Read what vLLM's online connector writes with compression."""
    from safetensors.torch import load
    from zstandard import ZstdDecompressor

    most = believable(path.stat().st_size)
    with path.open("rb") as file, ZstdDecompressor().stream_reader(file) as content:
        whole = content.read(most + 1)
    _check_growth(path, len(whole))
    tensors: dict[str, Tensor] = load(whole)
    return tensors


def _check_growth(path: Path, size: int) -> None:
    most = believable(path.stat().st_size)
    if size > most:
        raise ValueError(f"it grows to more than {most:,} bytes, as no states do")
