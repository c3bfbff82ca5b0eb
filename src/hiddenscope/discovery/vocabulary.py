"""The number of ids that a module takes.

Its embedding or its configuration names it, or else the tables that it looks ids up in.
CANINE names no vocabulary: it hashes each character into a few buckets, and takes every
one that Unicode has.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hiddenscope.discovery.trace import arguments, declared_vocabulary, trial_ids
from hiddenscope.errors import is_out_of_memory
from hiddenscope.modules import autograd, hooks

LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index.Tensor")
CHARACTERS = sys.maxunicode + 1
UNKNOWN = 256
TOKENS = 8


def vocabulary(module: nn.Module) -> int:
    """Return the number of ids that a module takes.

    >>> from hiddenscope.testing import tiny_model
    >>> vocabulary(tiny_model("gpt2"))
    128
    """
    return declared_vocabulary(module) or _vocabulary_by_lookup(module)


class _LookupRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the lookups of a pass: the length of each table, and the rows read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lookups: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.name() in LOOKUPS and isinstance(args[0], Tensor):
            rows = _first_index(args[1:])
            if rows is not None:
                self.lookups.append((args[0].shape[0], rows.detach().flatten().cpu()))
        return function(*args, **(kwargs or {}))


def _first_index(args: Any) -> Tensor | None:
    """Return the first tensor of integers among arguments and lists of them."""
    for argument in args:
        parts = argument if isinstance(argument, list | tuple) else [argument]
        for part in parts:
            if isinstance(part, Tensor) and not part.is_floating_point():
                return part
    return None


def _vocabulary_by_lookup(module: nn.Module) -> int:
    """Return the length of the table that ids are looked up in.

    Where the rows are not the ids, as in CANINE, every character is an id.
    """
    first = trial_ids(module, 1, TOKENS, seed=0)
    second = trial_ids(module, 1, TOKENS, seed=1)
    try:
        before, after = _lookups(module, first), _lookups(module, second)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Nothing tells the vocabulary of a module that cannot be run like this: its own
        # pass will refuse an id.
        return CHARACTERS
    hashed = False
    for (length, rows), (_, others) in zip(before, after, strict=False):
        # A table that is read in the same way for other ids is not that of the ids.
        if len(rows) != TOKENS or torch.equal(rows, others):
            continue
        offset = rows - first.flatten()
        if bool((offset == offset[0]).all()):
            return length - int(offset[0])
        hashed = True
    return CHARACTERS if hashed else UNKNOWN


def _lookups(module: nn.Module, ids: Tensor) -> list[tuple[int, Tensor]]:
    inputs = arguments(module, ids.to(hooks.input_device(module)))
    recorder = _LookupRecorder()
    with autograd.restored(), torch.no_grad(), hooks.restoring(module), recorder:
        module(**inputs)
    return recorder.lookups
