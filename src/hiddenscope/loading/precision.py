"""Which dtype to compute in: the checkpoint's on a GPU; on a CPU float32, unless bfloat16 is fast there.

A CPU without native bfloat16 computes a linear layer some hundred times slower in it than in float32, so the choice
is measured on the machine, once a process, and said in a note.
"""

from __future__ import annotations

import time
import warnings
from functools import cache
from typing import TYPE_CHECKING

from hiddenscope.errors import LoadError

if TYPE_CHECKING:
    import torch

_ROWS, _WIDTH, _REPEATS = 32, 512, 5
_HOPELESS, _LONG = 4.0, 0.05


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name.

    >>> parse_dtype("bf16")
    torch.bfloat16
    """
    import torch

    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
    short |= {"fp32": "float32", "f32": "float32", "float": "float32", "fp64": "float64", "f64": "float64"}
    name = str(dtype).removeprefix("torch.")
    found = getattr(torch, short.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LoadError(
            f"Cannot load in dtype {str(dtype)[:40]!r}",
            "it is no floating-point dtype of torch",
            "Choose 'float32', 'bfloat16' or 'float16'.",
        )
    return found


def choose_dtype(stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype to compute in, and one sentence that says why.

    >>> import torch
    >>> choose_dtype(torch.float32, torch.device("cpu"))
    (torch.float32, 'Computing in float32, the dtype of the checkpoint.')
    """
    import torch

    if device.type != "cpu" or stored in (torch.float32, torch.float64):
        return stored, f"Computing in {_name(stored)}, the dtype of the checkpoint."
    if stored != torch.bfloat16:
        return torch.float32, f"Computing in float32: the checkpoint is {_name(stored)}, and this is a CPU."
    ratio = bfloat16_cost()
    measured = f"a bfloat16 linear layer takes {ratio:.2g} times as long as a float32 one on this CPU"
    if ratio <= 1:
        return torch.bfloat16, f"Computing in bfloat16, the dtype of the checkpoint: {measured}."
    return torch.float32, f"Computing in float32, though the checkpoint is bfloat16: {measured}."


@cache
def bfloat16_cost() -> float:
    """The time of a bfloat16 linear layer over that of a float32 one, on this CPU."""
    import torch

    reference = _seconds(torch.float32, None)
    return _seconds(torch.bfloat16, reference) / reference


def _seconds(dtype: torch.dtype, reference: float | None) -> float:
    import torch

    x, weight = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    times: list[float] = []
    with torch.inference_mode(), warnings.catch_warnings():
        # torch warns where it has no bfloat16 kernel; that it is slow there is what is measured.
        warnings.simplefilter("ignore")
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            times.append(time.perf_counter() - begin)
            # The first run also sets the kernel up; the second one tells, and a hopeless dtype is not run five times.
            told = len(times) > 1 or times[0] > _LONG
            if reference is not None and told and min(times) > _HOPELESS * reference:
                break
    return min(times)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
