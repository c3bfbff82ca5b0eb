"""Operations of torch in a pass: watched, checked for what kernels lose, and timed.

Queries, keys and weights of attention are the inputs and outputs of functions of torch,
not of modules, so that no hook shows them. A function mode does. torch calls a mode for
every function, so it is entered only while a watched module's own forward runs.

`F.scaled_dot_product_attention` picks a kernel by device, dtype and shape. torch's
flash kernel for CPUs takes the maximum of a row with an instruction that drops a NaN,
and then treats the row as wholly masked: where the queries or the keys hold a NaN or an
infinity, it returns finite, wrong numbers for some rows, depending on the dtype and on
how many keys are left over after the last full vector. So each device and dtype is
tried once. Where numbers get lost, the queries and keys of every attention call in our
passes are looked at, or it is proved that the states show what attention may lose (see
`hooks.finite_attention`).

Finite numbers so large that their products overflow inside the kernel are not detected.
"""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FunctionType
from typing import Any, Literal, TypeAlias, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hiddenscope import progress
from hiddenscope.errors import NotFinite
from hiddenscope.modules import autograd

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
    def names(self) -> tuple[str, ...]:
        """Return the names of the arguments, in order."""
        return _NAMES_WHEN_ADDING if self.function in _ADDING else _NAMES[self.kind]

    @property
    def named(self) -> dict[str, Any]:
        """Return the arguments by their names."""
        return {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}

    @property
    def _operand_names(self) -> tuple[str, ...]:
        # What a product is added to is none of its factors.
        return self.names[1:] if self.function in _ADDING else self.names[:3]

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Return queries, keys and values, two factors, or what a softmax is of.

        They are empty for a call in a form that is not understood.
        """
        operands = tuple(map(self.named.get, self._operand_names))
        is_known = all(isinstance(operand, Tensor) for operand in operands)
        return cast(tuple[Tensor, ...], operands) if is_known else ()

    def with_operand(self, index: int, tensor: Tensor) -> Operation:
        """Return the same call with another operand."""
        name = self._operand_names[index]
        if name in self.kwargs:
            return replace(self, kwargs={**self.kwargs, name: tensor})
        args = list(self.args)
        args[self.names.index(name)] = tensor
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


# A single key, a row shorter than a vector register, and one that leaves some keys
# behind the last full vector.
TRIAL_LENGTHS = (1, 8, 40)
TRIAL_WIDTH = 64
# A model may attend in a different dtype than its weights have: under autocast, with
# quantised weights, or because its code widens queries and keys.
ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# With these names transformers runs its own code or another library.
WITHOUT_SDPA = {"eager", "flash_attention_2", "flash_attention_3", "flex_attention"}

Mask = Literal["none", "is_causal", "attn_mask"]


class AttentionCheck(TorchFunctionMode):
    """Looks at the inputs of every attention call in one thread.

    `hooks.finite_attention` enters it. torch calls a mode for every operation: on
    smollm2 and x86-64 that costs 18% of a pass over 8 tokens and 8% of one over 1,024.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False
        # Of each call, the largest of its queries, keys or values that may be lost, as
        # a share of the largest number of their dtype.
        self._sizes: list[Tensor] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self.is_over:
            if function is functional.scaled_dot_product_attention:
                function = self._attention
            elif function is functional.multi_head_attention_forward:
                # A copy of torch's multi-head attention whose inner call is checked.
                original = functional.multi_head_attention_forward
                # torch suspends a mode while it handles a call, so the mode would not
                # see the attention call inside. torch's own function and its globals
                # stay as they are.
                names = {
                    **original.__globals__,
                    "scaled_dot_product_attention": self._attention,
                }
                function = FunctionType(
                    original.__code__, names, argdefs=original.__defaults__
                )
        return function(*args, **(kwargs or {}))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        sizes: list[Tensor] = []
        for which in lost_inputs(query.device, query.dtype):
            numbers = (query, key, value)[which].detach()
            if numbers.numel():
                # A NaN or an infinity is the least or the largest of them.
                sizes += torch.aminmax(numbers)
        if sizes:
            wide = torch.promote_types(query.dtype, torch.float32)
            largest = torch.stack(sizes).to(wide).abs().max()
            self._sizes.append(largest / torch.finfo(query.dtype).max)
        return functional.scaled_dot_product_attention(
            query, key, value, *args, **kwargs
        )

    def largest_share(self) -> float:
        """Return the largest input of a call, as a share of what its dtype holds.

        NotFinite says that a call received a NaN or an infinity.
        """
        if not self._sizes:
            return 0.0
        sizes = torch.stack([size.cpu().double() for size in self._sizes])
        finite = sizes.isfinite()
        if not finite.all():
            call = int(finite.logical_not().nonzero()[0]) + 1
            raise NotFinite(
                "Cannot trust this pass",
                f"attention call {call} of {len(sizes)} was given a NaN or an"
                " infinity, and its kernel gives finite numbers",
                "Load the model in a wider dtype, or with attention='eager' to see at"
                " which site it comes up.",
            )
        return float(sizes.max())


def may_call_sdpa(module: nn.Module) -> bool:
    """Tell whether the configuration of a module lets it call torch's attention."""
    # Code from outside transformers need not look at its configuration.
    if not type(module).__module__.startswith("transformers."):
        return True
    return not WITHOUT_SDPA.issuperset(_implementations(module.config))


def _implementations(config: Any) -> Iterator[str | None]:
    """Yield the attention implementation of a configuration and of those inside it."""
    yield getattr(config, "_attn_implementation", None)
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _implementations(inner)


def loses_inputs(device: torch.device) -> bool:
    """Tell whether attention on a device may lose a NaN or an infinity in any dtype."""
    return any(lost_inputs(device, dtype) for dtype in ATTENTION_DTYPES)


@cache
def lost_inputs(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return which of queries, keys and values (0, 1, 2) attention may lose.

    >>> lost_inputs(torch.device("meta"), torch.float32)
    ()
    """
    if device.type == "meta" or not dtype.is_floating_point:
        return ()
    lost = []
    with autograd.restored(inference=False), torch.no_grad():
        for which in range(3):
            masks: tuple[Mask, ...] = ("none", "is_causal", "attn_mask")
            cases = itertools.product(TRIAL_LENGTHS, (torch.nan, torch.inf), masks)
            if any(_loses(device, dtype, which, *case) for case in cases):
                lost.append(which)
    return tuple(lost)


def _loses(
    device: torch.device,
    dtype: torch.dtype,
    which: int,
    length: int,
    value: float,
    mask: Mask,
) -> bool:
    """Tell whether attention returns a finite row where it cannot be finite."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 1, 2, length, TRIAL_WIDTH, generator=generator).to(dtype)
    inputs[which, 0, 0, length // 2, 5] = value
    queries, keys, values = inputs.double()
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = queries @ keys.mT
    if mask != "none":
        scores = scores.masked_fill(~causal, -torch.inf)
    weights = scores.softmax(-1)
    # A value with no weight is rightly left out, although zero times NaN is NaN.
    spoilt_values = (weights > 0).double() @ (~values.isfinite()).double() > 0
    not_finite = ~weights.isfinite().all(-1, keepdim=True) | spoilt_values
    query, key, value_states = inputs.to(device)
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value_states,
        attn_mask=causal.to(device) if mask == "attn_mask" else None,
        is_causal=mask == "is_causal",
    )
    return bool((output.cpu().isfinite() & not_finite).any())


# How slow this CPU is in bfloat16 and float16 is measured and not looked up: what torch
# says a CPU supports is not what its kernels do. On a Neoverse-N1 it says that float16
# is supported, and products take 13 times as long as in float32 (in bfloat16, nearly
# 300 times).

Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]

ROWS, WIDTH, REPEATS = 64, 128, 3
SLOW = 5  # times as long as in float32: worth saying
# The products of a linear layer without a bias and with one, of GPT-2, which stores its
# weights transposed, and of attention.
PRODUCTS: tuple[Product, ...] = (
    functional.linear,
    lambda rows, weight: functional.linear(rows[None], weight, weight[0]),
    lambda rows, weight: torch.addmm(weight[0], rows, weight),
    torch.mm,
    lambda rows, weight: torch.bmm(rows[None], rows.T[None]),
    lambda rows, weight: torch.bmm(rows[None], weight[None]),
)
_noted: WeakSet[nn.Module] = WeakSet()


def tell_of_slow_products(module: nn.Module, name: str) -> None:
    """Note on stderr, once for each module, that its dtype is slow on this CPU."""
    if module not in _noted:
        _noted.add(module)
        note = note_on_slow_products(module)
        if note:
            progress.note(f"{name}: {note}.")


def note_on_slow_products(module: nn.Module) -> str:
    """Say that a module's dtype is slow on this CPU.

    It is empty where the dtype is not slow, or the module is not on the CPU.

    >>> note_on_slow_products(nn.Linear(2, 2))
    ''
    """
    dtypes = set()
    for weight in module.parameters():
        if weight.device.type == "cpu":
            dtypes.add(weight.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        if dtype not in dtypes or slowdown(dtype) < SLOW:
            continue
        name = str(dtype).removeprefix("torch.")
        rounded = float(f"{slowdown(dtype):.1g}")
        return (
            f"on this CPU a matrix product in {name} may take about {rounded:,.0f}"
            " times as long as in float32; load it in float32 to be faster"
        )
    return ""


@cache
def slowdown(dtype: torch.dtype) -> float:
    """Return how many times as long as in float32 the slowest kind of product takes.

    >>> slowdown(torch.float32) > 0
    True
    """
    # Neither the user's default dtype and device nor an autocast may change what is
    # timed.
    rows = torch.ones(ROWS, WIDTH, dtype=torch.float32, device="cpu")
    weight = torch.ones(WIDTH, WIDTH, dtype=torch.float32, device="cpu")
    with (
        autograd.restored(inference=False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        # torch warns once, with a stack trace of C++, that it must do without its fast
        # product.
        warnings.simplefilter("ignore")
        ratios = []
        for product in PRODUCTS:
            best = []
            for factors in ((rows, weight), (rows.to(dtype), weight.to(dtype))):
                times = []
                for _ in range(REPEATS):
                    start = time.perf_counter()
                    product(*factors)
                    times.append(time.perf_counter() - start)
                best.append(min(times))
            ratios.append(best[1] / best[0])
    return max(ratios)
