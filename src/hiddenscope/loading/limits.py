"""How much a model from a file may ask for, held against what its files hold.

A config is a handful of numbers that somebody else wrote, and any of them may be
absurd: a million layers, a window of ten million tokens. While the module is built, on
the meta device where tensors have no memory, its parts are counted, and a count that
the weight files cannot fill stops it. `bounded` limits its first pass. Importing this
loads no torch.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hiddenscope.errors import Damaged

LARGEST_COUNT = 100_000
# Names of what is counted one by one: a config class or a tokenizer makes a list of so
# many, before any weight is read.
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
    """What the weight files of a model hold: how many tensors, of how many bytes, and
    the longest axis of any.

    >>> WeightTotals(2, 100, 50) + WeightTotals(1, 20, 60)
    WeightTotals(tensors=3, bytes=120, longest=60)
    """

    tensors: int = 0
    bytes: int = 0
    longest: int = 0

    def __add__(self, other: "WeightTotals") -> "WeightTotals":
        return WeightTotals(
            self.tensors + other.tensors,
            self.bytes + other.bytes,
            max(self.longest, other.longest),
        )


def check_counts(
    entries: Iterator[tuple[str, Any]], held: WeightTotals, name: str
) -> None:
    """Raise Damaged if a config or a tokenizer's config counts layers, labels or the
    like in absurd numbers.

    >>> check_counts(iter([("num_labels", 1000), ("layer_norm_eps", 1)]), WeightTotals(), "config.json")
    >>> check_counts(iter([("num_labels", 10**9)]), WeightTotals(), "config.json")
    Traceback (most recent call last):
    hiddenscope.errors.Damaged: Cannot use config.json: it has num_labels=1,000,000,000. Download the file again.
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
    """Stop the building of a module, with Damaged, once it has more parts than the
    weight files can fill.

    >>> import torch
    >>> from torch import nn
    >>> with building(WeightTotals(tensors=2, bytes=24), {"width": 10**6}, "x"), torch.device("meta"):
    ...     _ = nn.Linear(10**6, 10**6)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hiddenscope.errors.Damaged: Cannot load x: a model of its config has more than 67,109,248 parameters...
    """
    from torch.nn.modules import module as modules

    parts, thread = _Parts(held), threading.get_ident()

    def watch(kind: str) -> Callable[[Any, str, Any], None]:
        def added(module: Any, part_name: str, part: Any) -> None:
            if threading.get_ident() == thread and parts.too_many(
                kind, module, part_name, part
            ):
                excess, remedy = (
                    parts.excess(),
                    "Check that config and weights belong together.",
                )
                raise Damaged(
                    f"Cannot load {name}",
                    f"a model of its config has {excess}{largest(config)}",
                    remedy,
                )

        return added

    # These are called for every part that any module gets; they watch no pass.
    handles: list[Any] = []
    try:
        for kind in ("module", "parameter", "buffer"):
            handles.append(
                getattr(modules, f"register_module_{kind}_registration_hook")(
                    watch(kind)
                )
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Parts:
    """Counts modules, parameters and the bytes of buffers. What is set anew, as when it
    is loaded, counts once.
    """

    def __init__(self, held: WeightTotals) -> None:
        self.held = held
        self.sizes: dict[tuple[str, int, str], int] = {}
        self.totals = {"module": 0, "parameter": 0, "buffer": 0}
        self.most = {
            "module": MODULES + MODULES_PER_TENSOR * held.tensors,
            "parameter": PARAMETERS + PARAMETERS_PER_BYTE * held.bytes,
            "buffer": BUFFERS + BUFFERS_PER_BYTE * held.bytes,
        }

    def too_many(self, kind: str, module: Any, name: str, part: Any) -> bool:
        """Whether there is too much of a kind, now that a part was added. It is called
        for every part of a model.
        """
        if part is None:
            return False
        if kind == "module":
            self.totals[kind] += 1
        else:
            key, size = (kind, id(module), name), part.numel()
            if kind == "buffer":
                size *= part.element_size()
            self.totals[kind] += size - self.sizes.get(key, 0)
            self.sizes[key] = size
        return self.totals[kind] > self.most[kind]

    def excess(self) -> str:
        """What there is too much of, in words."""
        if self.totals["module"] > self.most["module"]:
            holds = f"its weight files hold {self.held.tensors:,} tensors"
            return f"more than {self.most['module']:,} modules, and {holds}"
        have = f"its weight files have {self.held.bytes:,} bytes"
        if self.totals["parameter"] > self.most["parameter"]:
            return f"more than {self.most['parameter']:,} parameters, and {have}"
        return (
            f"masks and tables of more than {self.most['buffer']:,} bytes, and {have}"
        )


def largest(config: Mapping[str, Any]) -> str:
    """The largest number of a config, in words: in an absurd config it is most often
    the absurd one.
    """
    numbers = [(value, key) for key, value in walk(config) if type(value) is int]
    if not numbers:
        return ""
    value, key = max(numbers)
    return f"; the largest number in the config is {key}={_number(value)}"


def _number(value: int) -> str:
    return (
        f"{value:,}"
        if abs(value) < 10**24
        else f"{value:.3e}"
        if abs(value) < 10**300
        else "a number of 300 digits"
    )


def walk(content: Any) -> Iterator[tuple[str, Any]]:
    """Every key of nested JSON with its value, however deep; the items of a list come
    under the list's own key.

    >>> list(walk({"a": [{"b": 1}, 2]}))
    [('a', [{'b': 1}, 2]), ('a', {'b': 1}), ('a', 2), ('b', 1)]
    """
    waiting = [("", content)]
    while waiting:
        key, current = waiting.pop()
        pairs = (
            current.items()
            if isinstance(current, Mapping)
            else ((key, item) for item in current)
        )
        for name, value in pairs:
            yield name, value
            if isinstance(value, Mapping | list):
                waiting.append((name, value))
