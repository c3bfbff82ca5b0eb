"""Run any program of token ids, and list its tensors that have a row for each token.

A program is a port's module or a function that the user wrote.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import ModuleCall, record_calls
from hiddenscope.discovery import Tap
from hiddenscope.discovery.trace import layouts
from hiddenscope.errors import Error, ModuleError, PassError
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes import PaddedBatch

Program = Callable[..., Any]
# Items that an iterator may yield for one text.
MOST_ITEMS = 2000
TARGET_WORDS = ("decoder", "target", "tgt")


@dataclass
class Value:
    """A tensor of a program as rows [token, width], and its tap if a module made it."""

    name: str
    rows: Tensor
    tap: Tap | None = None


def is_compiled(program: object) -> bool:
    """Check whether torch.compile made a module.

    It calls no hooks then, so only its outputs can be seen.
    """
    if not isinstance(program, nn.Module):
        return False
    if hasattr(program, "_orig_mod"):
        return True
    for part in program.modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            return True
    return False


def run_program(program: Program, batch: PaddedBatch) -> object:
    """Call a program with token ids, and with a mask and decoder ids if it takes them.

    A compiled Hugging Face model is asked for its hidden states.
    """
    with _naming_errors():
        if is_compiled(program):
            module: Any = program
            arguments = batch.arguments(getattr(module, "_orig_mod", module))
            return program(**arguments, output_hidden_states=True, return_dict=True)
        return program(batch.ids, **_named_arguments(program, batch))


@contextmanager
def _naming_errors() -> Iterator[None]:
    """Raise a PassError that quotes what the program raised."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        reason = f"it raised {type(error).__name__}: {str(error)[:500]}"
        remedy = "Call it by itself on token ids [1, token]."
        raise PassError("Cannot run the candidate", reason, remedy) from error


def _named_arguments(program: Program, batch: PaddedBatch) -> dict[str, Tensor]:
    function = program.forward if isinstance(program, nn.Module) else program
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        # Builtins have no signature to read.
        return {}
    offered = {"mask": batch.mask}
    if batch.targets is not None:
        offered["target"] = batch.targets.ids
    arguments: dict[str, Tensor] = {}
    for parameter in parameters:
        meaning = _meaning(parameter.name)
        is_variadic = parameter.kind.name.startswith("VAR_")
        if meaning in offered:
            arguments[parameter.name] = offered.pop(meaning)
        elif parameter.default is parameter.empty and not is_variadic:
            reason = f"it needs {parameter.name!r} as well as token ids"
            remedy = "Give a function of token ids that calls it."
            raise PassError("Cannot call the candidate", reason, remedy)
    return arguments


def _meaning(name: str) -> str:
    """Return whether a parameter is the mask or the decoder ids, by its name."""
    is_mask = "mask" in name
    is_target = any(word in name for word in TARGET_WORDS)
    if is_mask == is_target:
        return ""
    return "mask" if is_mask else "target"


def values_of(program: Program, batches: Sequence[PaddedBatch]) -> list[Value]:
    """Return the tensors with a row for each token of every text, in order."""
    if isinstance(program, type):
        reason = f"it is the class {program.__name__}"
        remedy = "Give an instance, or a function of token ids."
        raise ModuleError("Cannot compare the candidate", reason, remedy)
    texts = [_values_of_text(program, batch) for batch in batches]
    values = []
    for name, first in texts[0].items():
        rows = [text[name].rows for text in texts if name in text]
        widths = {part.shape[-1] for part in rows}
        if len(rows) == len(texts) and len(widths) == 1:
            values.append(Value(name, torch.cat(rows), first.tap))
    return values


def _values_of_text(program: Program, batch: PaddedBatch) -> dict[str, Value]:
    lengths = [batch.ids.shape[1]]
    if batch.targets is not None:
        lengths.append(batch.targets.ids.shape[1])
    returned: dict[str, Tensor] = {}

    def run() -> None:
        with _naming_errors():
            for name, tensor in named_tensors(run_program(program, batch)):
                # Copied at once: a generator may reuse one tensor for all layers.
                if set(lengths) & set(tensor.shape):
                    returned[name] = tensor.detach().to("cpu", copy=True)

    calls: list[ModuleCall] = []
    prefix = ""
    if isinstance(program, nn.Module) and not is_compiled(program):
        parts = dict(hooks.parts_of(program))
        del parts[""]
        calls = record_calls(parts, run)
        prefix = "output "
    else:
        with autograd.restored(), torch.no_grad():
            run()
    rows = _Rows(lengths)
    counts: Counter[tuple[str, hooks.Side]] = Counter()
    for path, side, state in _events(calls):
        tap = Tap(path, counts[path, side], side)
        counts[path, side] += 1
        if state is not None:
            rows.add(str(tap), state, tap)
    for name, tensor in returned.items():
        may_hold_layers = len(returned) == 1 or name == "hidden_states"
        rows.add_returned(f"{prefix}{name}", tensor, may_hold_layers=may_hold_layers)
    return rows.values


def _events(
    calls: Iterable[ModuleCall],
) -> Iterator[tuple[str, hooks.Side, Tensor | None]]:
    """Yield the inputs and outputs of modules in the order of time."""
    for call in calls:
        yield call.path, "input", call.state
        yield from _events(call.inner)
        yield call.path, "output", call.output


@dataclass
class _Rows:
    """Tensors of one text as rows; `lengths` are the tokens of each stack."""

    lengths: list[int]
    values: dict[str, Value] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, tap: Tap | None = None) -> None:
        """Keep a tensor that has a row for each token."""
        if not tensor.is_floating_point():
            return
        for tokens in self.lengths:
            layout = next(layouts(tensor, 1, tokens), None)
            if layout is None:
                continue
            if layout.flat or tensor.shape[layout.token] == tokens:
                rows = layout.states(tensor, tokens)[0].cpu()
                laid_out = None if tap is None else replace(tap, layout=layout)
                self.values[name] = Value(name, rows, laid_out)
                return

    def add_returned(self, name: str, tensor: Tensor, *, may_hold_layers: bool) -> None:
        """Keep a returned tensor, and its layers if it is [layer, token, width]."""
        self.add(name, tensor)
        if tensor.ndim == 4 and 1 in tensor.shape[:3]:
            tensor = tensor.squeeze(tensor.shape.index(1))
        elif tensor.ndim != 3 or not may_hold_layers or 1 in tensor.shape[:2]:
            return
        # If a text has as many tokens as there are layers, both orders are kept. Texts
        # of other lengths fit only one of them.
        if tensor.shape[1] in self.lengths:
            for layer, part in enumerate(tensor):
                self.add(f"{name}[{layer}]", part)
        if tensor.shape[0] in self.lengths:
            for layer, part in enumerate(tensor.unbind(1)):
                self.add(f"{name}[:, {layer}]", part)


def named_tensors(output: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and arrays that a program returned, by name or by place."""
    if is_dataclass(output) and not isinstance(output, Mapping | type):
        output = vars(output)
    if isinstance(output, Tensor):
        yield name or "output", _plain(output)
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_tensors(value, str(key))
    elif isinstance(output, tuple | list | Iterator):
        for place, value in enumerate(output):
            if place == MOST_ITEMS:
                reason = f"it gives more than {MOST_ITEMS:,} things for one text"
                remedy = "Give one tensor for each state, and stop."
                raise PassError("Cannot compare the candidate", reason, remedy)
            yield from named_tensors(value, f"{name}[{place}]" if name else str(place))
    elif hasattr(output, "__array__"):
        array = np.asarray(output)
        # numpy has no bfloat16: jax's comes as a dtype of kind V.
        if array.dtype.kind in "fV":
            if array.dtype not in (np.float16, np.float32, np.float64):
                array = array.astype(np.float32)
            yield name or "output", torch.tensor(array)


def _plain(tensor: Tensor) -> Tensor:
    """Return a dense tensor in a dtype that can be computed with."""
    if tensor.is_meta:
        reason = "it returned a tensor on the meta device, which holds no numbers"
        remedy = "Load its weights first."
        raise PassError("Cannot compare the candidate", reason, remedy)
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.float() if is_float8 else tensor
