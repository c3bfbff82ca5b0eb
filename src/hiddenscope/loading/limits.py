"""Limits on what a model's files may ask for, derived from what they hold.

A config is a handful of numbers from a stranger, and any of them may be absurd: a
million layers, a window of ten million tokens. While the module is built, on the meta
device where tensors have no memory, its parts are counted, and a count that the weight
files cannot fill stops it. `SizeLimit` limits its first pass.

A tokenizer is a list of steps, and each may lengthen its input: "replace e by ee",
thirty times in a row, turns one letter into a billion, even while the added tokens are
read. So the growth of all steps is multiplied out before the file is loaded.

Importing this loads no torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenscope.errors import Damaged
from hiddenscope.modules.installation import PartKind, registering

if TYPE_CHECKING:
    from torch import nn

LARGEST_COUNT = 100_000
# Config classes and tokenizers build a list with one item for each of these, before any
# weight is read.
_COUNTED = re.compile(
    r"(?:.*_)?(?:layers?|labels?|experts?|heads?|blocks?|groups?|stages?|depth|cycles|iterations|hashes|extra_ids)(?:_.*)?"
)
_NOT_COUNTED = re.compile(
    r".*(?:size|dim|eps|length|window|theta|factor|scale|rate|prob|dropout|seed|_id|range)"
)

# How many parts of each kind a module may have: this many, and some for each tensor or
# byte of its weight files.
_PARTS = {
    # Of 493 classes of transformers none builds more than 2.5 for each tensor that it
    # saves.
    "module": (
        2_000,
        16,
        "tensors",
        "more than {:,} modules, and its weight files hold",
    ),
    # Packed weights hold up to 8 in a byte, and shared ones are first built apart (2.1
    # times as many, at most).
    "parameter": (
        2**26,
        16,
        "bytes",
        "more than {:,} parameters, and its weight files have",
    ),
    # Bytes of masks and tables of positions, which are not in the weight files.
    "buffer": (
        2**28,
        4,
        "bytes",
        "masks and tables of more than {:,} bytes, and its weight files have",
    ),
}

# How far the steps of a tokenizer may multiply a character or a text, how many special
# tokens they may add to it, how long they may make it, and how many steps there may be.
MOST_GROWTH, MOST_COPIES = 4_096, 64
MOST_SPECIAL, LONGEST_PADDING = 10_000, 2**24
MOST_STEPS = 2_000
_GROWTH = {"ByteLevel": 4.0, "Metaspace": 2.0}
# Entries of a tokenizer.json with steps.
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "padding")


@dataclass(frozen=True)
class WeightTotals:
    """The number of tensors in a model's weight files, their bytes and longest axis."""

    tensors: int = 0
    bytes: int = 0
    longest: int = 0


def check_counts(
    entries: Iterator[tuple[str, object]], held: WeightTotals, name: str
) -> None:
    """Raise Damaged if a config counts layers, labels or the like in absurd numbers.

    >>> ordinary = iter([("num_labels", 1000), ("layer_norm_eps", 1)])
    >>> check_counts(ordinary, WeightTotals(), "config.json")
    >>> absurd = iter([("num_labels", 10**9)])
    >>> check_counts(absurd, WeightTotals(), "config.json")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hiddenscope.errors.Damaged: Cannot use config.json: it has num_labels=1,000,...
    """
    most = max(LARGEST_COUNT, held.longest)
    for key, value in entries:
        if not isinstance(value, int) or isinstance(value, bool) or value <= most:
            continue
        if _COUNTED.fullmatch(key) and not _NOT_COUNTED.fullmatch(key):
            raise Damaged(
                f"Cannot use {name}",
                f"it has {key}={_number(value)}",
                "Download the file again.",
            )


@contextmanager
def building(
    held: WeightTotals, config: Mapping[str, Any], name: str
) -> Iterator[None]:
    """Raise Damaged once a module gets more parts than its weight files can fill.

    >>> import torch
    >>> from torch import nn
    >>> held = WeightTotals(tensors=2, bytes=24)
    >>> with torch.device("meta"), building(held, {"width": 10**6}, "x"):
    ...     _ = nn.Linear(10**6, 10**6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hiddenscope.errors.Damaged: Cannot load x: a model of its config has more than ...
    """
    limits = {
        kind: least + per_unit * getattr(held, unit)
        for kind, (least, per_unit, unit, _) in _PARTS.items()
    }
    totals: Counter[PartKind] = Counter()
    # A part that is set again, as when its weight is loaded, counts once.
    sizes: dict[tuple[PartKind, int, str], int] = {}

    def added(kind: PartKind, module: nn.Module, part_name: str, part: Any) -> None:
        if part is None:
            return
        if kind == "module":
            totals[kind] += 1
        else:
            size = part.numel()
            if kind == "buffer":
                size *= part.element_size()
            key = (kind, id(module), part_name)
            totals[kind] += size - sizes.get(key, 0)
            sizes[key] = size
        if totals[kind] > limits[kind]:
            _, _, unit, excess = _PARTS[kind]
            raise Damaged(
                f"Cannot load {name}",
                f"a model of its config has {excess.format(limits[kind])}"
                f" {getattr(held, unit):,} {unit}{largest(config)}",
                "Check that config and weights belong together.",
            )

    with registering(added):
        yield


def largest(config: Mapping[str, Any]) -> str:
    """Name the largest number of a config: it is most often the absurd one."""
    numbers = [(value, key) for key, value in walk(config) if type(value) is int]
    if not numbers:
        return ""
    value, key = max(numbers)
    return f"; the largest number in the config is {key}={_number(value)}"


def _number(value: int) -> str:
    if abs(value) < 10**24:
        return f"{value:,}"
    # Python refuses to turn a longer integer into a float.
    if abs(value) < 10**300:
        return f"{value:.3e}"
    return "a number of 300 digits"


def walk(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of nested JSON with its value, however deep.

    The items of a list come under the key of the list.

    >>> list(walk({"a": [{"b": 1}, 2]}))
    [('a', [{'b': 1}, 2]), ('a', {'b': 1}), ('a', 2), ('b', 1)]
    """
    waiting = [("", content)]
    while waiting:
        key, current = waiting.pop()
        if isinstance(current, Mapping):
            pairs = list(current.items())
        else:
            pairs = [(key, item) for item in current]
        for name, value in pairs:
            yield name, value
            if isinstance(value, Mapping | list):
                waiting.append((name, value))


def check_tokenizer_file(path: Path) -> None:
    """Raise Damaged if the steps of a tokenizer.json can make a text absurdly long."""
    try:
        steps = _tokenizer_steps(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        # A missing file is no fault, and the library reports what is not JSON.
        return

    def check(name: str, count: float, most: int, excess: str) -> None:
        if count > most:
            shown = f"{count:,.0f}" if count < 1e24 else f"{count:.0e}"
            raise Damaged(
                f"Cannot load the tokenizer {path}",
                f"its {name} {excess.format(shown)}",
                "Use a tokenizer that you trust, or pass the live (module, tokenizer).",
            )

    for name, parts in steps.items():
        check(name, len(parts), MOST_STEPS, "has {} steps")
    growth = {}
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        growth[name] = prod(map(_growth, steps[name]))
        check(name, growth[name], MOST_GROWTH, "can make one character into {}")
    copies, special = 1.0, 0
    for step in steps["post_processor"]:
        copies_text, added = _template_counts(step)
        copies *= copies_text
        special += added
    check("post_processor", copies, MOST_COPIES, "can copy a text {} times")
    check("post_processor", special, MOST_SPECIAL, "adds {} special tokens")
    for step in steps["padding"]:
        strategy = step.get("strategy")
        fixed = strategy.get("Fixed") if isinstance(strategy, dict) else None
        for length in (step.get("pad_to_multiple_of"), fixed):
            if isinstance(length, int):
                check(
                    "padding", length, LONGEST_PADDING, "pads every text to {} tokens"
                )
    # A decoder runs on the way back, after the other steps.
    together = growth["normalizer"] * growth["pre_tokenizer"]
    check("steps together", together, MOST_GROWTH, "can make one character into {}")


def _tokenizer_steps(content: bytes) -> dict[str, list[dict[str, Any]]]:
    """Return the steps of each kind, without the sequences that hold them."""
    entries = json.loads(content)
    steps: dict[str, list[dict[str, Any]]] = {}
    for name in _STEPS:
        steps[name] = []
        waiting = [entries.get(name)] if isinstance(entries, dict) else []
        while waiting:
            step = waiting.pop()
            if not isinstance(step, dict):
                continue
            if step.get("type") != "Sequence":
                steps[name].append(step)
                continue
            for value in step.values():
                if isinstance(value, list):
                    waiting += value
    return steps


def _growth(step: dict[str, Any]) -> float:
    """Return how many characters a step can make of one, at most."""
    if step.get("type") != "Replace":
        return _GROWTH.get(str(step.get("type")), 1.0)
    match step:
        case {"pattern": {"String": str(text)}, "content": str(content)}:
            return max(1.0, len(content) / max(1, len(text)))
        case {"content": str(content)}:
            length = len(content)
        case _:
            length = 0
    match step:
        case {"pattern": {"Regex": str(regex)}} if "(?" not in regex:
            # What matches the empty string is put beside every character, not in its
            # place.
            with suppress(re.error, RecursionError, OverflowError):
                if re.compile(regex).match("") is None:
                    return max(1.0, float(length))
    return length + 1.0


def _template_counts(step: dict[str, Any]) -> tuple[float, int]:
    """Return how often a template copies a text, and how many tokens it adds."""
    special = 0
    copies = {"single": 0, "pair": 0}
    for name in copies:
        pieces = step.get(name)
        for piece in pieces if isinstance(pieces, list) else ():
            # Pieces that are no objects add nothing.
            if not isinstance(piece, dict):
                continue
            if "Sequence" in piece:
                copies[name] += 1
                continue
            # A token that is not listed has one id.
            special += 1
            match step.get("special_tokens"), piece.get("SpecialToken"):
                case dict(listed), {"id": str(token)}:
                    match listed.get(token):
                        case {"ids": list(ids)}:
                            special += len(ids) - 1
    # A template for two texts names both of them, so each is copied half as often.
    return max(1, copies["single"], copies["pair"] / 2), special
