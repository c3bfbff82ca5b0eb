"""Attention kernels that lose a NaN or an infinity, and a check of their inputs.

`F.scaled_dot_product_attention` picks a kernel by device, dtype and shape. torch's
flash kernel for CPUs takes the maximum of a row with an instruction that drops a NaN,
and then treats the row as wholly masked: where the queries or the keys hold a NaN or an
infinity, it returns finite, wrong numbers for some rows, depending on the dtype and on
how many keys are left over after the last full vector. So each device and dtype is
tried once, and where numbers get lost, the inputs of every attention call in our passes
are summed: a NaN or an infinity shows in the sum.

Finite numbers so large that their products overflow inside the kernel are not detected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hiddenscope.errors import NotFinite
from hiddenscope.modules import autograd

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
    """Collects a sum of the inputs of every attention call in one thread.

    `hooks.finite_attention` enters it. torch calls a mode for every operation: on
    smollm2 and x86-64 that costs 18% of a pass over 8 tokens and 8% of one over 1,024,
    so it is entered only where a kernel that loses its inputs can run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Tensor] = []
        self.is_over = False

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
                function = self._multi_head_attention()
        if kwargs:
            return function(*args, **kwargs)
        return function(*args)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        lost = lost_inputs(query.device, query.dtype)
        if lost:
            tensors = (query, key, value)
            sums = [_sum(tensors[which].detach()) for which in lost]
            self.sums.append(torch.stack(sums).sum())
        return functional.scaled_dot_product_attention(
            query, key, value, *args, **kwargs
        )

    def _multi_head_attention(self) -> Callable[..., Any]:
        """Return a copy of torch's multi-head attention whose inner call is checked."""
        original = functional.multi_head_attention_forward
        # torch suspends a mode while it handles a call, so the mode would not see the
        # attention call inside. torch's own function and its globals stay as they are.
        names = {
            **original.__globals__,
            "scaled_dot_product_attention": self._attention,
        }
        return FunctionType(
            original.__code__,
            names,
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )

    def raise_if_lost(self) -> None:
        """Raise NotFinite if an attention call received a NaN or an infinity."""
        if not self.sums:
            return
        finite = torch.stack(self.sums).isfinite()
        if not bool(finite.all()):
            call = int(finite.logical_not().nonzero()[0]) + 1
            raise NotFinite(
                "Cannot trust this pass",
                f"attention call {call} of {len(self.sums)} was given a NaN or an"
                " infinity, and its kernel gives finite numbers",
                "Load the model in a wider dtype, or with attention='eager' to see at"
                " which site it comes up.",
            )


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


def _sum(numbers: Tensor) -> Tensor:
    """Return a number that is not finite if one of these is not."""
    if numbers.dtype != torch.float16:
        return numbers.sum().float()
    # A sum in float16 overflows, and one of float16 to float32 takes 13 times as long.
    low, high = torch.aminmax(numbers)
    return low.float() + high.float()
