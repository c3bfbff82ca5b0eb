"""Limits on what a model's files may ask for, derived from what they hold.

A config is a handful of numbers from a stranger, and any of them may be absurd: a
million layers, a window of ten million tokens. While the module is built, on the meta
device where tensors have no memory, its parts are counted, and a count that the weight
files cannot fill stops it. `SizeLimit` limits its first pass. Importing this loads no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from hiddenscope.errors import Damaged
from hiddenscope.modules.registration import PartKind, registering

if TYPE_CHECKING:
    from torch import Tensor, nn

LARGEST_COUNT = 100_000
# Config classes and tokenizers build a list with one item for each of these, before any
# weight is read.
_COUNTED = re.compile(
    r"(?:.*_)?(?:layers?|labels?|experts?|heads?|blocks?|groups?|stages?|depth|cycles|iterations|hashes|extra_ids)(?:_.*)?"
)
_NOT_COUNTED = re.compile(
    r".*(?:size|dim|eps|length|window|theta|factor|scale|rate|prob|dropout|seed|_id|range)"
)

# Of 493 classes of transformers none builds more than 2.5 modules for each tensor that
# it saves.
MODULES, MODULES_PER_TENSOR = 2_000, 16
# Packed weights hold up to 8 parameters in a byte, and shared ones are first built
# apart (2.1 times as many, at most).
PARAMETERS, PARAMETERS_PER_BYTE = 2**26, 16
# Masks and tables of positions are not in the weight files.
BUFFERS, BUFFERS_PER_BYTE = 2**28, 4


@dataclass(frozen=True)
class WeightTotals:
    """The number of tensors in a model's weight files, their bytes and longest axis.

    >>> WeightTotals(2, 100, 50) + WeightTotals(1, 20, 60)
    WeightTotals(tensors=3, bytes=120, longest=60)
    """

    tensors: int = 0
    bytes: int = 0
    longest: int = 0

    @classmethod
    def of(cls, shapes: Collection[Sequence[int]], size: int) -> WeightTotals:
        """Return the totals of a file of this size, which holds these shapes.

        >>> WeightTotals.of([[2, 3], [], [0, 10**12]], 28)
        WeightTotals(tensors=3, bytes=28, longest=3)
        """
        # An empty tensor takes no byte of the file, whatever its other axes say.
        axes = [max(shape, default=1) for shape in shapes if prod(shape)]
        return cls(len(shapes), size, max(axes, default=0))

    def __add__(self, other: WeightTotals) -> WeightTotals:
        return WeightTotals(
            self.tensors + other.tensors,
            self.bytes + other.bytes,
            max(self.longest, other.longest),
        )


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
    parts = _PartCounts(held)

    def added(
        kind: PartKind,
        module: nn.Module,
        part_name: str,
        part: nn.Module | Tensor | None,
    ) -> None:
        parts.add(kind, module, part_name, part)
        if parts.totals[kind] > parts.limits[kind]:
            raise Damaged(
                f"Cannot load {name}",
                f"a model of its config has {parts.excess()}{largest(config)}",
                "Check that config and weights belong together.",
            )

    with registering(added):
        yield


class _PartCounts:
    """Counts of the modules, parameters and buffer bytes that were built.

    A part that is set again, as when its weight is loaded, counts once.
    """

    def __init__(self, held: WeightTotals) -> None:
        self.held = held
        self.sizes: dict[tuple[PartKind, int, str], int] = {}
        self.totals: dict[PartKind, int] = {"module": 0, "parameter": 0, "buffer": 0}
        self.limits: dict[PartKind, int] = {
            "module": MODULES + MODULES_PER_TENSOR * held.tensors,
            "parameter": PARAMETERS + PARAMETERS_PER_BYTE * held.bytes,
            "buffer": BUFFERS + BUFFERS_PER_BYTE * held.bytes,
        }

    def add(self, kind: PartKind, module: nn.Module, name: str, part: Any) -> None:
        """Count one part; this is called for every part of a model."""
        if part is None:
            return
        if kind == "module":
            self.totals[kind] += 1
            return
        size = part.numel()
        if kind == "buffer":
            size *= part.element_size()
        key = (kind, id(module), name)
        self.totals[kind] += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def excess(self) -> str:
        """Describe what there is too much of."""
        if self.totals["module"] > self.limits["module"]:
            most = f"{self.limits['module']:,} modules"
            return (
                f"more than {most}, and its weight files hold {self.held.tensors:,}"
                " tensors"
            )
        have = f"its weight files have {self.held.bytes:,} bytes"
        if self.totals["parameter"] > self.limits["parameter"]:
            return f"more than {self.limits['parameter']:,} parameters, and {have}"
        most = f"{self.limits['buffer']:,} bytes"
        return f"masks and tables of more than {most}, and {have}"


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
