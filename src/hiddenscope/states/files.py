"""States on disk: one safetensors file, written whole or not at all."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch

from hiddenscope.errors import FileError, SiteError
from hiddenscope.files import believable, read_tensors, write_tensors
from hiddenscope.sites import Site
from hiddenscope.states.mixed import MixedValues, SiteValues
from hiddenscope.states.tokens import Source, Tokens

_FORMAT = "hiddenscope.states/1"
# Where widths differ, a file has a tensor for each, which older versions refuse.
_MIXED_FORMAT = "hiddenscope.states/2"
_ARRAYS = ("text", "positions", "ids", "spans")


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


def _pack(strings: Sequence[str], name: str) -> dict[str, torch.Tensor]:
    """Pack strings as their bytes and ends.

    JSON would join two lone surrogates into one character, and headers are limited.
    """
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    ends = torch.tensor([len(part) for part in encoded], dtype=torch.int64).cumsum(0)
    # torch takes no empty buffer, so there is one byte more.
    buffer = bytearray(b"".join(encoded) + b"\0")
    joined = torch.frombuffer(buffer, dtype=torch.uint8)[:-1]
    return {name: joined.clone(), f"{name}.ends": ends}


def _unpack(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[str, ...]:
    joined = tensors[name].numpy().tobytes()
    ends = [0, *tensors[f"{name}.ends"].tolist()]
    if ends[-1] != len(joined) or any(start > end for start, end in pairwise(ends)):
        raise ValueError(f"the ends of {name} do not fit")
    parts = [joined[start:end] for start, end in pairwise(ends)]
    return tuple(part.decode("utf-8", "surrogatepass") for part in parts)


def write(path: str | os.PathLike[str], parts: Mapping[str, StackParts]) -> None:
    """Write the states of one stack or of several, by the prefix of their tensors."""
    if Path(path).suffix.lower() != ".safetensors":
        raise FileError(
            f"Cannot save states as {os.fspath(path)}",
            "states are saved as .safetensors",
            "Give the path that suffix.",
        )
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[str, StackRecord] = {}
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
    write_tensors(path, tensors, {"format": file_format, "states": json.dumps(stacks)})


def is_foreign(path: str | os.PathLike[str]) -> bool:
    """Tell whether a safetensors file was written by another program.

    One that cannot be opened is not: the reader of our own files says why.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError):
        return False
    return not header.get("format", "").startswith("hiddenscope.")


def read_file(path: str | os.PathLike[str]) -> dict[str, StackParts]:
    """Read the stacks that `write` wrote, by their prefixes."""
    tensors, header = read_tensors(path, "states", _FORMAT, _MIXED_FORMAT)
    try:
        stacks: dict[str, StackRecord] = json.loads(header["states"])
        if set(stacks) not in ({""}, {"encoder.", "decoder."}):
            raise ValueError("it names no stacks")
        most = believable(os.path.getsize(path))
        if not all(0 <= record["count"] <= most for record in stacks.values()):
            raise ValueError("it has not so many texts")
        return {
            prefix: _restore(tensors, prefix, record)
            for prefix, record in stacks.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, SiteError) as error:
        raise FileError(
            f"Cannot read states from {os.fspath(path)}",
            f"it is damaged, or not such a file ({error})",
            "Save the states again.",
        ) from error


def _restore(
    tensors: Mapping[str, torch.Tensor], prefix: str, record: StackRecord
) -> StackParts:
    text, positions, ids, spans = (tensors[prefix + name].numpy() for name in _ARRAYS)
    texts = None
    if f"{prefix}texts" in tensors:
        texts = _unpack(tensors, f"{prefix}texts")
    strings = _unpack(tensors, f"{prefix}strings")
    tokens = Tokens(texts, text, positions, ids, strings, spans, record["count"])
    sites = tuple(Site.parse(site) for site in record["sites"])
    source = Source.from_json(record["source"])
    values = _restore_values(tensors, prefix, sites, record.get("widths"))
    return StackParts(sites, values, tokens, source)


def _restore_values(
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    sites: tuple[Site, ...],
    widths: list[int] | None,
) -> SiteValues:
    if widths is None:
        return tensors[f"{prefix}values"]
    groups = {width: tensors[f"{prefix}values.{width}"] for width in widths}
    return MixedValues(sites, tuple(widths), groups)
