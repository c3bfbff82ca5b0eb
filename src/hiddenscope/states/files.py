"""States on disk: one safetensors file of ours, written whole or not at all, and the
tensors that other programs write or hold.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import Error, FileError, SiteError, StatesError, Unsafe
from hiddenscope.files import (
    PathLike,
    believable,
    check_file,
    check_growth,
    check_shape,
    open_tensors,
    read_arrays,
    read_tensors,
    reading,
    save_tensors,
)
from hiddenscope.sites import Site
from hiddenscope.states.mixed import MixedValues, SiteValues
from hiddenscope.states.tokens import Source, Tokens

_FORMAT = "hiddenscope.states/1"
# Where widths differ, a file has a tensor for each, which older versions refuse.
_MIXED_FORMAT = "hiddenscope.states/2"
_ARRAYS = ("text", "positions", "ids", "spans")
# The name of an array that came without one.
UNNAMED = ""
READABLE = ".safetensors, .safetensors.zst, .npy or .npz"
_PICKLED = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}


class StackParts(NamedTuple):
    """The parts that the states of one stack are made of."""

    sites: tuple[Site, ...]
    values: SiteValues
    tokens: Tokens
    source: Source


class StackRecord(TypedDict):
    """The description of one stack in the header of a file.

    `widths` are there if they differ. Then `values.64` holds the sites that are 64 wide
    in the place of `values`.
    """

    sites: list[str]
    count: int
    source: dict[str, Any]
    widths: NotRequired[list[int]]


def _pack(strings: Sequence[str], name: str) -> dict[str, Tensor]:
    """Pack strings as their bytes and ends.

    JSON would join two lone surrogates into one character, and headers are limited.
    """
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    ends = torch.tensor([len(part) for part in encoded], dtype=torch.int64).cumsum(0)
    # torch takes no empty buffer, so there is one byte more.
    buffer = bytearray(b"".join(encoded) + b"\0")
    joined = torch.frombuffer(buffer, dtype=torch.uint8)[:-1]
    return {name: joined.clone(), f"{name}.ends": ends}


def _unpack(tensors: Mapping[str, Tensor], name: str) -> tuple[str, ...]:
    joined = tensors[name].numpy().tobytes()
    ends = [0, *tensors[f"{name}.ends"].tolist()]
    if ends[-1] != len(joined) or any(start > end for start, end in pairwise(ends)):
        raise ValueError(f"the ends of {name} do not fit")
    parts = [joined[start:end] for start, end in pairwise(ends)]
    return tuple(part.decode("utf-8", "surrogatepass") for part in parts)


def write(path: PathLike, parts: Mapping[str, StackParts]) -> None:
    """Write the states of one stack or of several, by the prefix of their tensors."""
    tensors = {}
    stacks = {}
    file_format = _FORMAT
    for prefix, states in parts.items():
        tokens = states.tokens
        for name in _ARRAYS:
            array = getattr(tokens, name)
            # A copy, because torch takes no read-only array.
            tensors[f"{prefix}{name}"] = torch.from_numpy(array.copy())
        tensors |= _pack(tokens.strings, f"{prefix}strings")
        if tokens.texts is not None:
            tensors |= _pack(tokens.texts, f"{prefix}texts")
        stacks[prefix] = {
            "sites": [str(site) for site in states.sites],
            "count": tokens.count,
            "source": states.source.to_json(),
        }
        values = states.values
        if isinstance(values, MixedValues):
            file_format = _MIXED_FORMAT
            stacks[prefix]["widths"] = list(values.widths)
            for width, group in values.groups.items():
                tensors[f"{prefix}values.{width}"] = group
        else:
            tensors[f"{prefix}values"] = values
    save_tensors(path, tensors, {"format": file_format, "states": json.dumps(stacks)})


def is_foreign(path: PathLike) -> bool:
    """Tell whether a safetensors file was written by another program.

    One that cannot be opened is not: the reader of our own files says why.
    """
    try:
        with open_tensors(path, f"Cannot read {os.fspath(path)}") as file:
            header = file.metadata() or {}
    except FileError:
        return False
    return not header.get("format", "").startswith("hiddenscope.")


def read_file(path: PathLike) -> dict[str, StackParts]:
    """Read the stacks that `write` wrote, by their prefixes."""
    tensors, header = read_tensors(path, "states", _FORMAT, _MIXED_FORMAT)
    try:
        stacks = json.loads(header["states"])
        if set(stacks) not in ({""}, {"encoder.", "decoder."}):
            raise ValueError("it names no stacks")
        most = believable(os.path.getsize(path))
        if not all(0 <= record["count"] <= most for record in stacks.values()):
            raise ValueError("it has not this many texts")
        parts = {}
        for prefix, record in stacks.items():
            parts[prefix] = _restore(tensors, prefix, record)
        return parts
    except (KeyError, TypeError, ValueError, AttributeError, SiteError) as error:
        raise FileError(
            f"Cannot read states from {os.fspath(path)}",
            f"it is damaged, or not such a file ({error})",
            "Save the states again.",
        ) from error


def _restore(
    tensors: Mapping[str, Tensor], prefix: str, record: StackRecord
) -> StackParts:
    text, positions, ids, spans = (tensors[prefix + name].numpy() for name in _ARRAYS)
    texts = None
    if f"{prefix}texts" in tensors:
        texts = _unpack(tensors, f"{prefix}texts")
    strings = _unpack(tensors, f"{prefix}strings")
    tokens = Tokens(texts, text, positions, ids, strings, spans, record["count"])
    sites = tuple(Site.parse(site) for site in record["sites"])
    source = Source.from_json(record["source"])
    widths = record.get("widths")
    if widths is None:
        return StackParts(sites, tensors[f"{prefix}values"], tokens, source)
    groups = {width: tensors[f"{prefix}values.{width}"] for width in widths}
    return StackParts(sites, MixedValues(sites, tuple(widths), groups), tokens, source)


@dataclass(frozen=True)
class ForeignTensors:
    """Tensors of another program by its names, and what is known of that program.

    `depth` is that of the model, where the program says it; `notes` go into the source
    of the states.
    """

    name: str
    tensors: Mapping[str, Tensor]
    depth: int | None = None
    notes: tuple[str, ...] = ()
    header: Mapping[str, str] = field(default_factory=dict)

    def error(self, reason: str, remedy: str, kind: type[Error] = StatesError) -> Error:
        """Return the error for tensors that cannot be read as states."""
        return kind(f"Cannot read states from {self.name}", reason, remedy)


def open_foreign(data: Any) -> ForeignTensors:
    """Return the tensors of a file, an array, a list of arrays, a dict or a cache."""
    if isinstance(data, str | os.PathLike):
        return _open_file(Path(data))
    # What TransformerLens returns, with what its model says of it.
    if hasattr(data, "cache_dict"):
        config = getattr(getattr(data, "model", None), "cfg", None)
        notes: tuple[str, ...] = ()
        norm = str(getattr(config, "normalization_type", ""))
        if norm.endswith("Pre"):
            notes = (
                "TransformerLens folded the weights of norms into those after them"
                f" (normalization_type is {norm}).",
            )
        depth = getattr(config, "n_layers", None)
        opened = open_foreign(dict(data.cache_dict))
        return ForeignTensors("an ActivationCache", opened.tensors, depth, notes)
    name = f"a {type(data).__name__}"
    if isinstance(data, Mapping):
        tensors = {}
        for key, value in data.items():
            # What a block returned may be a tuple, of which the first is the state.
            if _holds_arrays(value):
                value = value[0]
            tensors[str(key)] = _tensor(value, f"{name} ({str(key)[:60]})")
        return ForeignTensors(name, tensors)
    if not _holds_arrays(data):
        return ForeignTensors(name, {UNNAMED: _tensor(data, name)})
    layers = [_tensor(layer, name) for layer in data]
    if len({layer.shape for layer in layers}) > 1:
        shapes = [list(layer.shape) for layer in layers[:4]]
        raise StatesError(
            f"Cannot read states from {name}",
            f"its arrays differ in shape ({shapes})",
            "Give one array for each layer, all of the same texts.",
        )
    return ForeignTensors(name, {UNNAMED: torch.stack(layers)})


def _holds_arrays(data: Any) -> bool:
    is_list = isinstance(data, list | tuple) and bool(data)
    return is_list and isinstance(data[0], Tensor | np.ndarray)


def _tensor(value: Any, name: str) -> Tensor:
    """Return an array as a tensor on the CPU."""
    if isinstance(value, Tensor) and not value.is_meta:
        return value.detach().cpu()
    try:
        # A copy, because torch takes no read-only array.
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise StatesError(
            f"Cannot read states from {name}",
            f"it is not an array of numbers ({str(error)[:100]})",
            "Give a tensor, an array, a dict of them or the path of a file.",
        ) from error


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
    size = check_file(path, problem)
    is_packed = path.name.lower().endswith(".safetensors.zst")
    if suffix not in (".npy", ".npz", ".safetensors") and not is_packed:
        reason = f"its suffix is {suffix!r}"
        raise FileError(problem, reason, f"Give a {READABLE} file.")
    if suffix in (".npy", ".npz"):
        arrays = read_arrays(path, problem)
        # Emptied on the way: a tensor is a copy of its array.
        tensors = {key: _tensor(arrays.pop(key), name) for key in list(arrays)}
        return ForeignTensors(name, tensors)
    if is_packed:
        return ForeignTensors(name, _read_packed(path, size, problem))
    with open_tensors(path, problem) as file:
        header = file.metadata() or {}
        # The file is not a mapping, and cannot be iterated itself.
        names = list(file.keys())
        tensors = {key: file.get_tensor(key) for key in names}
        return ForeignTensors(name, tensors, header=header)


def _read_packed(path: Path, size: int, problem: str) -> dict[str, Tensor]:
    """Read what vLLM's online connector writes with compression."""
    import pyarrow
    from safetensors.torch import load

    with reading(problem):
        with pyarrow.input_stream(path, compression="zstd") as content:
            whole = content.read(believable(size) + 1)
        check_growth(len(whole), size, problem)
        tensors: dict[str, Tensor] = load(whole)
        for name, tensor in tensors.items():
            check_shape(name, tensor.shape, size, problem)
        return tensors
