"""Operations: watch the attention, products and softmaxes that a module's code calls.

Queries, keys and weights of attention are the inputs and outputs of functions of torch,
not of modules, so that no hook shows them. A function mode does. torch calls a mode for
every function, so it is entered only while a watched module's own forward runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

OperationKind: TypeAlias = Literal["attention", "product", "softmax"]

KINDS: Mapping[Callable[..., Any], OperationKind] = {
    functional.scaled_dot_product_attention: "attention",
    torch.matmul: "product",
    Tensor.matmul: "product",
    Tensor.__matmul__: "product",
    torch.bmm: "product",
    Tensor.bmm: "product",
    torch.baddbmm: "product",
    Tensor.baddbmm: "product",
    torch.einsum: "product",
    functional.softmax: "softmax",
    torch.softmax: "softmax",
    Tensor.softmax: "softmax",
}
# The names of what an operation is made of, in the order of its arguments.
_NAMES: Mapping[OperationKind, tuple[str, ...]] = {
    "attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    "product": ("input", "other"),
    "softmax": ("input",),
}
_ADDING = (torch.baddbmm, Tensor.baddbmm)
_NAMES_WHEN_ADDING = ("input", "batch1", "batch2")


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of a function, the `number`th of its kind in a call of a module.

    `forward` stands for that call of the module.
    """

    kind: OperationKind
    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    forward: object

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Return queries, keys and values, two factors, or what a softmax is of.

        They are empty for a call in a form that is not understood.
        """
        named = self.named
        operands = [named.get(name) for name in self._operand_names]
        if not all(isinstance(operand, Tensor) for operand in operands):
            return ()
        return tuple(operand for operand in operands if operand is not None)

    @property
    def named(self) -> dict[str, Any]:
        """Return the arguments by their names."""
        names = _NAMES[self.kind]
        if self.function in _ADDING:
            names = _NAMES_WHEN_ADDING
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def _operand_names(self) -> tuple[str, ...]:
        if self.kind == "attention":
            return _NAMES["attention"][:3]
        if self.function in _ADDING:
            # The first argument is added to the product of the others.
            return _NAMES_WHEN_ADDING[1:]
        return _NAMES[self.kind]

    def with_operand(self, index: int, tensor: Tensor) -> Operation:
        """Return the same call with another operand."""
        name = self._operand_names[index]
        if name in self.kwargs:
            return replace(self, kwargs={**self.kwargs, name: tensor})
        args = list(self.args)
        # Operands are the first arguments, or the last of a product that adds.
        args[index + int(self.function in _ADDING)] = tensor
        return replace(self, args=tuple(args))

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


def _as_product(equation: Any, *factors: Any) -> tuple[Callable[..., Any], Any]:
    """Return an einsum as a function of [shared, row, inner], [shared, inner, column].

    One that is no product stays as it is.
    """
    # torch takes them as a list too.
    if isinstance(factors[0], list | tuple):
        (factors,) = factors
    match = re.fullmatch(r"(\w+),(\w+)->(\w+)", str(equation).replace(" ", ""))
    if match is not None:
        left, right, output = match.groups()
        row = re.sub(f"[{right}]", "", left)
        inner = re.sub(f"[{output}]", "", left)
        column = re.sub(f"[{left}]", "", right)
        if len(row) == len(inner) == len(column) == 1:
            shared = re.sub(f"[{row}{column}]", "", output)
            first, second = shared + row + inner, shared + inner + column
            function = partial(torch.einsum, f"{first},{second}->{output}")
            permuted = torch.einsum(f"{left}->{first}", factors[0])
            return function, (permuted, torch.einsum(f"{right}->{second}", factors[1]))
    return torch.einsum, (equation, *factors)


RunOperation: TypeAlias = Callable[[Operation], Any]
"""Makes the call, changed or not, and returns what it returns."""

OperationCallback: TypeAlias = Callable[[Operation, RunOperation], Any]
"""Called with an operation in place of it; it returns what the operation returns."""


class OperationMode(TorchFunctionMode):
    """Hands the operations of one call of a module to callbacks, one after another."""

    def __init__(self, callbacks: Sequence[OperationCallback]) -> None:
        super().__init__()
        self.callbacks = tuple(callbacks)
        self.is_over = False
        self._forward = object()
        self._counts: Counter[OperationKind] = Counter()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = None if self.is_over else KINDS.get(function)
        if kind is None:
            return function(*args, **(kwargs or {}))
        if function is torch.einsum:
            function, args = _as_product(*args)
        number = self._counts[kind]
        self._counts[kind] += 1
        operation = Operation(
            kind, number, function, args, dict(kwargs or {}), self._forward
        )
        return _call(self.callbacks, operation)


def _call(callbacks: tuple[OperationCallback, ...], operation: Operation) -> Any:
    if not callbacks:
        return operation.run()
    return callbacks[0](operation, lambda changed: _call(callbacks[1:], changed))
