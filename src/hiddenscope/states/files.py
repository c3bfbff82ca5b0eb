"""States on disk: one safetensors file, written whole or not at all, read back exactly."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from hiddenscope.errors import FileError, SiteError
from hiddenscope.files import read_tensors, write_tensors
from hiddenscope.sites import Site
from hiddenscope.states.tokens import Source, Tokens

_FORMAT = "hiddenscope.states/1"


class StackParts(NamedTuple):
    """What the states of one stack are made of."""

    sites: tuple[Site, ...]
    values: torch.Tensor
    tokens: Tokens
    source: Source


class StackRecord(TypedDict):
    """What the header of a file says of one stack."""

    sites: list[str]
    count: int
    source: dict[str, Any]


def _pack(strings: Sequence[str], name: str) -> dict[str, torch.Tensor]:
    """Strings as bytes and ends: JSON would join two lone surrogates into one
    character, and headers are limited.
    """
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    ends = torch.tensor([len(part) for part in encoded], dtype=torch.int64).cumsum(0)
    # No buffer may be empty.
    joined = torch.frombuffer(bytearray(b"".join(encoded) + b"\0"), dtype=torch.uint8)[
        :-1
    ]
    return {name: joined.clone(), f"{name}.ends": ends}


def _unpack(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[str, ...]:
    joined, ends = (
        tensors[name].numpy().tobytes(),
        [0, *tensors[f"{name}.ends"].tolist()],
    )
    if ends[-1] != len(joined) or any(start > end for start, end in pairwise(ends)):
        raise ValueError(f"the ends of {name} do not fit")
    return tuple(
        joined[start:end].decode("utf-8", "surrogatepass")
        for start, end in pairwise(ends)
    )


def write(path: str | os.PathLike[str], parts: Mapping[str, StackParts]) -> None:
    """Write the states of one stack (under "") or of several, each under the prefix of
    its tensors.
    """
    if Path(path).suffix.lower() != ".safetensors":
        reason = "states are saved as .safetensors"
        raise FileError(
            f"Cannot save states as {os.fspath(path)}",
            reason,
            "Give the path that suffix.",
        )
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[str, StackRecord] = {}
    for prefix, states in parts.items():
        tokens = states.tokens
        arrays = {
            "text": tokens.text,
            "positions": tokens.positions,
            "ids": tokens.ids,
            "spans": tokens.spans,
        }
        tensors[f"{prefix}values"] = states.values
        tensors |= {
            f"{prefix}{name}": torch.from_numpy(array.copy())
            for name, array in arrays.items()
        }
        tensors |= _pack(tokens.strings, f"{prefix}strings")
        tensors |= {} if tokens.texts is None else _pack(tokens.texts, f"{prefix}texts")
        sites = [str(site) for site in states.sites]
        stacks[prefix] = {
            "sites": sites,
            "count": tokens.count,
            "source": states.source.to_json(),
        }
    write_tensors(path, tensors, {"format": _FORMAT, "states": json.dumps(stacks)})


def read(path: str | os.PathLike[str]) -> dict[str, StackParts]:
    """Read what `write` wrote."""
    tensors, header = read_tensors(path, "states", _FORMAT)
    try:
        stacks: dict[str, StackRecord] = json.loads(header["states"])
        if set(stacks) not in ({""}, {"encoder.", "decoder."}):
            raise ValueError("it names no stacks")
        return {
            prefix: _restore(tensors, prefix, record)
            for prefix, record in stacks.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, SiteError) as error:
        problem = f"Cannot read states from {os.fspath(path)}"
        raise FileError(
            problem,
            f"it is damaged, or not such a file ({error})",
            "Save the states again.",
        ) from error


def _restore(
    tensors: Mapping[str, torch.Tensor], prefix: str, record: StackRecord
) -> StackParts:
    text, positions, ids, spans = (
        tensors[prefix + name].numpy() for name in ("text", "positions", "ids", "spans")
    )
    texts = _unpack(tensors, f"{prefix}texts") if f"{prefix}texts" in tensors else None
    strings = _unpack(tensors, f"{prefix}strings")
    tokens = Tokens(texts, text, positions, ids, strings, spans, record["count"])
    sites = tuple(Site.parse(site) for site in record["sites"])
    return StackParts(
        sites, tensors[f"{prefix}values"], tokens, Source.from_json(record["source"])
    )
