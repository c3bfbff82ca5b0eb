"""How many ids a module knows: what its embedding or its configuration says, or else
what it looks up.

CANINE names no vocabulary: it hashes each character into a few buckets, and takes every
one that Unicode has.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hiddenscope.discovery.trace import arguments, declared_vocabulary, trial_ids
from hiddenscope.modules import autograd, hooks

LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index.Tensor")
CHARACTERS = sys.maxunicode + 1
UNKNOWN = 256
TOKENS = 8


def vocabulary(module: nn.Module) -> int:
    """Give the number of ids that a module takes.

    >>> from hiddenscope.testing import tiny_model
    >>> vocabulary(tiny_model("gpt2"))
    128
    """
    return declared_vocabulary(module) or _looked_up(module)


class _Lookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a pass for rows that are looked up in a table: how long each table is,
    and which rows were read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.name() in LOOKUPS and isinstance(args[0], Tensor):
            rows = [
                part
                for part in _parts(args[1:])
                if isinstance(part, Tensor) and not part.is_floating_point()
            ]
            if rows:
                self.seen.append((args[0].shape[0], rows[0].detach().flatten().cpu()))
        return function(*args, **(kwargs or {}))


def _parts(args: Any) -> list[Any]:
    """The arguments of an operation, with those of its lists."""
    parts: list[Any] = []
    for argument in args:
        parts += argument if isinstance(argument, list | tuple) else [argument]
    return parts


def _looked_up(module: nn.Module) -> int:
    """The length of the table that ids are looked up in; every character, where what is
    looked up are no ids.
    """
    first, second = (trial_ids(module, 1, TOKENS, seed=seed) for seed in (0, 1))
    try:
        before, after = _lookups(module, first), _lookups(module, second)
    # A module that cannot be run like this knows a vocabulary that nothing tells: its
    # own pass will refuse an id.
    except Exception:
        return CHARACTERS
    hashed = False
    for (length, rows), (_, others) in zip(before, after, strict=False):
        if len(rows) != TOKENS or torch.equal(rows, others):
            continue
        offset = rows - first.flatten()
        if bool((offset == offset[0]).all()):
            return length - int(offset[0])
        hashed = True
    return CHARACTERS if hashed else UNKNOWN


def _lookups(module: nn.Module, ids: Tensor) -> list[tuple[int, Tensor]]:
    given = arguments(module, ids.to(hooks.input_device(module)))
    lookups = _Lookups()
    with autograd.restored(), torch.no_grad(), hooks.restoring(module), lookups:
        module(**given)
    return lookups.seen
