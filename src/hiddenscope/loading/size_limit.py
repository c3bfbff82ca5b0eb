"""A limit on the tensors of a model's first pass, over a few tokens.

A hostile config may ask for absurd ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hiddenscope.errors import TooLarge
from hiddenscope.loading.limits import largest

# The bytes that one operation of a pass over a few tokens may give, and the number of
# operations of such a pass.
OUTPUT, OUTPUT_PER_BYTE = 2**26, 4
OPERATIONS, OPERATIONS_PER_MODULE = 50_000, 500
BYTES_PER_NUMBER = 16  # of complex128, the widest dtype


class SizeLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises TooLarge at an operation whose tensor is larger than a few tokens need.

    >>> import torch
    >>> with SizeLimit(nn.Linear(2, 2), "x"):
    ...     _ = torch.zeros(10**6, 10**6, device="meta")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hiddenscope.errors.TooLarge: Cannot run x: for a few tokens it makes a tensor ...
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.is_over = False
        sizes = [weight.nbytes for weight in module.parameters()]
        modules = len(list(module.modules()))
        self.largest = OUTPUT + OUTPUT_PER_BYTE * max(sizes, default=0)
        self.operations = OPERATIONS + OPERATIONS_PER_MODULE * modules
        config: Any = getattr(module, "config", None)
        self.config: Mapping[str, Any] = {}
        if hasattr(config, "to_dict"):
            self.config = config.to_dict()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_over:
            # An interrupt left the mode in place: whatever runs now is not limited.
            return function(*args, **kwargs)
        self.operations -= 1
        if self.operations < 0:
            raise self._refusal("it makes too many operations")
        # At most an operation combines every number of two tensors, once for each size
        # in its arguments.
        tensor_sizes = []
        integers = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                tensor_sizes.append(leaf.numel())
            elif type(leaf) is int and leaf > 1:
                integers.append(leaf)
        largest_two = sorted(tensor_sizes, reverse=True)[:2]
        if prod([*largest_two, *integers]) * BYTES_PER_NUMBER > self.largest:
            # Before there is memory for it.
            self._check(_output_on_meta(function, args, kwargs))
        output = function(*args, **kwargs)
        self._check(output)
        return output

    def _check(self, output: object) -> None:
        parts = output if isinstance(output, tuple | list) else (output,)
        for part in parts:
            if isinstance(part, Tensor):
                size = part.numel() * part.element_size()
                if size > self.largest:
                    raise self._refusal(f"it makes a tensor of {size:,} bytes")

    def _refusal(self, reason: str) -> TooLarge:
        return TooLarge(
            f"Cannot run {self.name}",
            f"for a few tokens {reason}{largest(self.config)}",
            "Check the sizes in its config.",
        )


def _output_on_meta(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the output of an operation without its numbers.

    It is None where the shape depends on the numbers.
    """

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to("meta")
        if type(leaf) is torch.device:
            return torch.device("meta")
        return leaf

    try:
        return function(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
    except Exception:
        return None
