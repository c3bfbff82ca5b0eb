"""Stores: what a store or a file of states holds, and its texts, a page at a time.

Nothing here imports torch: a page of texts is answered while a model works.
"""

import json
import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import hiddenscope as hs
from hiddenscope.app.schemas import StoreAnswer, StoreText, StoreTextsAnswer
from hiddenscope.errors import Error, FileError
from hiddenscope.files import believable, identity

MAX_METADATA = 16 * 2**20
# Of a text in a list.
MAX_CHARACTERS = 300
MAX_SITES = 500
# Of sites of one width, and of sites whose widths differ.
STATES_FORMATS = ("hiddenscope.states/1", "hiddenscope.states/2")
# What parsing may raise of a file that is not what its name says.
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

# What a file says of each of its stacks, by the prefix of their tensors.
Stacks: TypeAlias = dict[str, dict[str, Any]]


def is_states(path: Path) -> bool:
    """Return whether there is a store or a file of states at this path."""
    try:
        if path.is_dir():
            return (path / "plan.json").is_file() and (path / "commits").is_dir()
        if path.suffix != ".safetensors" or not path.is_file():
            return False
        return _read_stacks(path) is not None
    except OSError:
        return False


def holds_pair(path: Path) -> bool:
    """Return whether a file holds the states of an encoder and a decoder."""
    return "encoder." in (_read_stacks(path) or {})


def store_identity(path: Path) -> str:
    """Return what changes with the states, also when more units are committed."""
    if not path.is_dir():
        return identity([path])
    commits = sorted((path / "commits").iterdir())
    return identity([path / "plan.json", *commits])


def describe_states(name: str, label: str, path: Path) -> StoreAnswer | None:
    """Return what a store or a file of states holds, or None where it is damaged."""
    try:
        if path.is_dir():
            return _describe_store(name, label, path)
        return _describe_file(name, label, path)
    except (Error, *DAMAGED):
        return None


def read_texts(path: Path, first: int, count: int) -> StoreTextsAnswer:
    """Return a page of texts in their order, with the number of tokens of each."""
    if path.is_dir():
        return _read_store_texts(path, first, count)
    lengths, texts = _read_file_texts(path, store_identity(path))
    page = []
    for number in range(first, min(first + count, len(lengths))):
        text = texts[number] if texts else ""
        page.append(_text_row(number, text, lengths[number]))
    return StoreTextsAnswer(total=len(lengths), first=first, texts=page)


def _read_store_texts(path: Path, first: int, count: int) -> StoreTextsAnswer:
    with hs.open(path) as store:
        page = []
        for number in store.texts[first : first + count].tolist():
            tokens = store.of(number).tokens
            if tokens.texts:
                text = tokens.texts[0]
            else:
                text = "".join(tokens.strings[:MAX_CHARACTERS])
            page.append(_text_row(number, text, len(tokens)))
        return StoreTextsAnswer(total=len(store.texts), first=first, texts=page)


def _text_row(number: int, text: str, tokens: int) -> StoreText:
    return StoreText(
        number=number,
        text=encodable(text[:MAX_CHARACTERS]),
        cut=len(text) > MAX_CHARACTERS,
        tokens=tokens,
    )


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode.

    Half a surrogate pair, which a tokenizer may leave, is replaced.

    >>> encodable("half a pair: " + chr(0xD83D))
    'half a pair: ?'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def _describe_store(name: str, label: str, path: Path) -> StoreAnswer:
    with hs.open(path) as store:
        return StoreAnswer(
            name=name,
            label=label,
            bytes=sum(file.stat().st_size for file in (path / "data").iterdir()),
            sites=[str(site) for site in store.sites][:MAX_SITES],
            tokens=len(store),
            texts=len(store.texts),
            model=encodable(str(store.source.model)[:200]),
            dtype=store.dtype,
            width=max(store.plan.widths.values()),
            complete=store.complete,
        )


def _describe_file(name: str, label: str, path: Path) -> StoreAnswer | None:
    stacks = _read_stacks(path)
    if stacks is None:
        return None
    sites: list[str] = []
    tokens = 0
    for stack in stacks.values():
        sites += map(str, stack["sites"])
        tokens += int(stack["shape"][1])
    first = next(iter(stacks.values()))
    return StoreAnswer(
        name=name,
        label=label,
        bytes=path.stat().st_size,
        sites=sites[:MAX_SITES],
        tokens=tokens,
        texts=int(first["count"]),
        model=encodable(str(first["source"].get("model", ""))[:200]),
        dtype=DTYPES.get(first["dtype"], str(first["dtype"])[:20]),
        width=int(first["shape"][2]),
        complete=True,
    )


def _read_stacks(path: Path) -> Stacks | None:
    """Return what a file of states says of each stack, or None for another file."""
    try:
        with path.open("rb") as file:
            # A safetensors file begins with the length of its header, which is JSON.
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_METADATA:
                return None
            header = json.loads(file.read(length))
        metadata = header.get("__metadata__") or {}
        if metadata.get("format") not in STATES_FORMATS:
            return None
        stacks: Stacks = json.loads(metadata["states"])
        for prefix, stack in stacks.items():
            name = f"{prefix}values"
            # The widest stands for all, as in the description of a store.
            if "widths" in stack:
                name += f".{max(stack['widths'])}"
            stack |= header[name]
            if not 0 <= stack["count"] <= believable(path.stat().st_size):
                return None
        return stacks
    except DAMAGED:
        return None


@lru_cache(maxsize=4)
def _read_file_texts(
    path: Path, file_identity: str
) -> tuple[list[int], tuple[str, ...] | None]:
    """Return how many tokens each text of a file has, and the texts if they are stored.

    `file_identity` makes the cache forget a file that has changed.
    """
    from safetensors import SafetensorError, safe_open

    try:
        prefix, stack = next(iter((_read_stacks(path) or {}).items()))
        with safe_open(path, framework="np") as file:
            text_of_token = file.get_tensor(f"{prefix}text")
            counts = np.bincount(text_of_token, minlength=int(stack["count"]))
            lengths = counts.tolist()
            # `file` is not a mapping, and has no `in`.
            if f"{prefix}texts" not in file.keys():  # noqa: SIM118
                return lengths, None
            joined = file.get_tensor(f"{prefix}texts").tobytes()
            ends = [0, *file.get_tensor(f"{prefix}texts.ends").tolist()]
        texts = tuple(joined[a:b].decode("utf-8", "replace") for a, b in pairwise(ends))
        if len(texts) != len(lengths):
            raise ValueError(f"{len(texts)} texts, and tokens of {len(lengths)}")
        return lengths, texts
    except (SafetensorError, *DAMAGED) as error:
        raise FileError(
            f"Cannot read states from {path.name}",
            f"it is damaged, or not such a file ({str(error)[:200]})",
            "Save the states again.",
        ) from error
