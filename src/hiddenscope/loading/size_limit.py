"""A limit on the tensors of a model's first pass, over a few tokens: a hostile config
may ask for absurd ones.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hiddenscope.errors import TooLarge
from hiddenscope.loading.limits import largest

# What one operation of a pass over a few tokens may give, and how many operations such
# a pass may take.
OUTPUT, OUTPUT_PER_BYTE = 2**26, 4
OPERATIONS, OPERATIONS_PER_MODULE = 50_000, 500
WIDEST = 16  # bytes of one number, at most


class SizeLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A pass over a few tokens: stops, with TooLarge, at an operation that gives a
    larger tensor than they need.

    >>> import torch
    >>> with SizeLimit(nn.Linear(2, 2), "x"):
    ...     _ = torch.zeros(10**6, 10**6, device="meta")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hiddenscope.errors.TooLarge: Cannot run x: for a few tokens it makes a tensor of 4,000,000,000,000 bytes...
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.is_over = False
        sizes = [
            weight.numel() * weight.element_size() for weight in module.parameters()
        ]
        self.largest = OUTPUT + OUTPUT_PER_BYTE * max(sizes, default=0)
        self.operations = OPERATIONS + OPERATIONS_PER_MODULE * sum(
            1 for _ in module.modules()
        )
        config: Any = getattr(module, "config", None)
        self.config: Mapping[str, Any] = (
            config.to_dict() if hasattr(config, "to_dict") else {}
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_over:
            # An interrupt left the mode in place: whatever runs now is no longer
            # limited.
            return function(*args, **kwargs)
        self.operations -= 1
        if self.operations < 0:
            raise self._refusal("it makes too many operations")
        if _may_exceed(self.largest, args, kwargs):
            # Before there is memory for it.
            self._check(_by_shapes(function, args, kwargs))
        output = function(*args, **kwargs)
        self._check(output)
        return output

    def _check(self, output: Any) -> None:
        for part in output if isinstance(output, tuple | list) else (output,):
            if (
                isinstance(part, Tensor)
                and (size := part.numel() * part.element_size()) > self.largest
            ):
                raise self._refusal(f"it makes a tensor of {size:,} bytes")

    def _refusal(self, what: str) -> TooLarge:
        return TooLarge(
            f"Cannot run {self.name}",
            f"for a few tokens {what}{largest(self.config)}",
            "Check the sizes in its config.",
        )


def _may_exceed(most: int, args: Any, kwargs: Any) -> bool:
    """Whether an operation could give so many bytes: two tensors, every number with
    every other, or a given size.
    """
    leaves = tree_leaves((args, kwargs))
    sizes = sorted(
        (leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), reverse=True
    )
    given = [leaf for leaf in leaves if type(leaf) is int and leaf > 1]
    return prod([*sizes[:2], *given]) * WIDEST > most


def _by_shapes(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, without its numbers; None where that depends on the
    numbers.
    """

    def bare(leaf: Any) -> Any:
        return (
            leaf.to("meta")
            if isinstance(leaf, Tensor)
            else torch.device("meta")
            if type(leaf) is torch.device
            else leaf
        )

    try:
        return function(*tree_map(bare, args), **tree_map(bare, kwargs))
    except Exception:
        return None
