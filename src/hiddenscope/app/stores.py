"""Kept states as the page opens them: what a store or a file of states holds, and its
texts, a page at a time.

Nothing here imports torch, so that a page of texts is answered while a model works.
"""

import json
import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import hiddenscope as hs
from hiddenscope.app.schemas import StoreAnswer, StoreText, StoreTextsAnswer
from hiddenscope.errors import Error, FileError
from hiddenscope.files import identity

MOST_METADATA = 16 * 2**20
MOST_CHARACTERS = 300  # of a text in a list
MOST_SITES = 500
STATES_FORMAT = "hiddenscope.states/1"
# What reading a file may raise that is not what its name says.
DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    StopIteration,
    struct.error,
)
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_states(path: Path) -> bool:
    """Whether there is a store or a file of states at this path."""
    try:
        if path.is_dir():
            return (path / "plan.json").is_file() and (path / "commits").is_dir()
        return (
            path.suffix == ".safetensors"
            and path.is_file()
            and _header(path) is not None
        )
    except OSError:
        return False


def holds_pair(path: Path) -> bool:
    """Whether a file of states holds those of an encoder and a decoder."""
    return "encoder." in (_header(path) or {})


def store_identity(path: Path) -> str:
    """What tells kept states from others, and from what they were before more units
    were committed.
    """
    return identity(
        [path / "plan.json", *sorted((path / "commits").iterdir())]
        if path.is_dir()
        else [path]
    )


def describe(name: str, label: str, path: Path) -> StoreAnswer | None:
    """What a store or a file of states says of itself; None where it is damaged."""
    try:
        return (
            _describe_store(name, label, path)
            if path.is_dir()
            else _describe_file(name, label, path)
        )
    except (Error, *DAMAGED):
        return None


def read_texts(path: Path, first: int, count: int) -> StoreTextsAnswer:
    """Some texts in their order, with their numbers and how many tokens each has."""
    if not path.is_dir():
        lengths, texts = _texts_of_file(path, store_identity(path))
        page = [
            (number, texts[number] if texts else "", lengths[number])
            for number in range(len(lengths))
        ]
        return _page(len(lengths), first, page[first : first + count])
    with hs.open(path) as store:
        numbers = store.texts[first : first + count].tolist()
        tokens = [store.of(number).tokens for number in numbers]
        page = [
            (
                number,
                (one.texts or ("".join(one.strings[:MOST_CHARACTERS]),))[0],
                len(one),
            )
            for number, one in zip(numbers, tokens, strict=True)
        ]
        return _page(len(store.texts), first, page)


def plain(text: str) -> str:
    """A text that UTF-8 can encode: half a surrogate pair, which a tokenizer may leave,
    is replaced.

    >>> plain("half a pair: " + chr(0xD83D))
    'half a pair: ?'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def _page(total: int, first: int, rows: list[tuple[int, str, int]]) -> StoreTextsAnswer:
    texts = [
        StoreText(
            number=number,
            text=plain(text[:MOST_CHARACTERS]),
            cut=len(text) > MOST_CHARACTERS,
            tokens=tokens,
        )
        for number, text, tokens in rows
    ]
    return StoreTextsAnswer(total=total, first=first, texts=texts)


def _describe_store(name: str, label: str, path: Path) -> StoreAnswer:
    with hs.open(path) as store:
        return StoreAnswer(
            name=name,
            label=label,
            bytes=sum(file.stat().st_size for file in (path / "data").iterdir()),
            sites=[str(site) for site in store.sites][:MOST_SITES],
            tokens=len(store),
            texts=len(store.texts),
            model=plain(str(store.source.model)[:200]),
            dtype=store.dtype,
            width=max(store.plan.widths.values()),
            complete=store.complete,
        )


def _describe_file(name: str, label: str, path: Path) -> StoreAnswer | None:
    stacks = _header(path)
    if stacks is None:
        return None
    first = next(iter(stacks.values()))
    return StoreAnswer(
        name=name,
        label=label,
        bytes=path.stat().st_size,
        sites=[str(site) for stack in stacks.values() for site in stack["sites"]][
            :MOST_SITES
        ],
        tokens=sum(int(stack["shape"][1]) for stack in stacks.values()),
        texts=int(first["count"]),
        model=plain(str(first["source"].get("model", ""))[:200]),
        dtype=DTYPES.get(first["dtype"], str(first["dtype"])[:20]),
        width=int(first["shape"][2]),
        complete=True,
    )


def _header(path: Path) -> dict[str, Any] | None:
    """What a file of states says of each of its stacks; None where it is another file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST_METADATA:
                return None
            header = json.loads(file.read(length))
        notes = header.get("__metadata__") or {}
        if notes.get("format") != STATES_FORMAT:
            return None
        stacks = json.loads(notes["states"])
        return {
            prefix: {**stack, **header[f"{prefix}values"]}
            for prefix, stack in stacks.items()
        }
    except DAMAGED:
        return None


@lru_cache(maxsize=4)
def _texts_of_file(path: Path, known: str) -> tuple[list[int], tuple[str, ...] | None]:
    """How many tokens each text of a file has, and the texts where they were kept.
    `known` is the file's identity.
    """
    from safetensors import SafetensorError, safe_open

    try:
        prefix, stack = next(iter((_header(path) or {}).items()))
        with safe_open(path, framework="np") as file:
            lengths = np.bincount(
                file.get_tensor(f"{prefix}text"), minlength=int(stack["count"])
            ).tolist()
            if f"{prefix}texts" not in file.keys():  # it is no mapping  # noqa: SIM118
                return lengths, None
            joined = file.get_tensor(f"{prefix}texts").tobytes()
            ends = [0, *file.get_tensor(f"{prefix}texts.ends").tolist()]
        texts = tuple(joined[a:b].decode("utf-8", "replace") for a, b in pairwise(ends))
        if len(texts) != len(lengths):
            raise ValueError(f"{len(texts)} texts, and tokens of {len(lengths)}")
        return lengths, texts
    except (SafetensorError, *DAMAGED) as error:
        reason = f"it is damaged, or not such a file ({str(error)[:200]})"
        raise FileError(
            f"Cannot read states from {path.name}", reason, "Save the states again."
        ) from error
