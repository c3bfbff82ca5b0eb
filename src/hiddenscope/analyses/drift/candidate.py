"""Run a candidate of somebody else's making, and list its tensors that have a row for
each token.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import ModuleCall, record_calls
from hiddenscope.analyses.drift.sides import is_compiled
from hiddenscope.discovery import Tap
from hiddenscope.discovery.taps import layouts
from hiddenscope.errors import Error, ModuleError, PassError
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes import PaddedBatch

MOST_ITEMS = 2000  # that an iterator may yield
TARGET_WORDS = ("decoder", "target", "tgt")


@dataclass
class Value:
    """A tensor of the candidate as rows [token, width]: its name, and where it is seen
    if it is a module's.
    """

    name: str
    rows: Tensor
    tap: Tap | None = None


@contextmanager
def naming_errors() -> Iterator[None]:
    """Raise a PassError that names what the candidate raised."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        reason = f"it raised {type(error).__name__}: {str(error)[:500]}"
        raise PassError(
            "Cannot run the candidate",
            reason,
            "Call it by itself on token ids [1, token].",
        ) from error


@dataclass(frozen=True)
class Runner:
    """Calls a module or a function of somebody else's with ids, and with a mask and a
    decoder's ids if it takes them.

    A compiled Hugging Face model is called as such, and asked for its hidden states.
    """

    function: Callable[..., Any]

    def __call__(self, batch: PaddedBatch) -> Any:
        """Run it on a batch."""
        function: Any = self.function
        with naming_errors():
            if is_compiled(function):
                inside = getattr(function, "_orig_mod", function)
                return function(
                    **batch.arguments(inside),
                    output_hidden_states=True,
                    return_dict=True,
                )
            return function(batch.ids, **self._named_arguments(batch))

    def of(self, module: nn.Module) -> Runner:
        """Make the same for a copy of the module."""
        return Runner(module)

    def _named_arguments(self, batch: PaddedBatch) -> dict[str, Tensor]:
        target = (
            self.function.forward
            if isinstance(self.function, nn.Module)
            else self.function
        )
        try:
            parameters = list(inspect.signature(target).parameters.values())[1:]
        except (TypeError, ValueError):  # a builtin has none that can be read
            return {}
        offered = {"mask": batch.mask}
        if batch.targets is not None:
            offered["target"] = batch.targets.ids
        arguments: dict[str, Tensor] = {}
        for parameter in parameters:
            meaning = _meaning(parameter.name)
            is_needed = (
                parameter.default is parameter.empty
                and not parameter.kind.name.startswith("VAR_")
            )
            if meaning in offered:
                arguments[parameter.name] = offered.pop(meaning)
            elif is_needed:
                reason = f"it needs {parameter.name!r} as well as token ids"
                raise PassError(
                    "Cannot call the candidate",
                    reason,
                    "Give a function of token ids that calls it.",
                )
        return arguments


def _meaning(name: str) -> str:
    """Tell by its name whether a parameter is the mask, or the decoder's ids."""
    is_target = any(word in name for word in TARGET_WORDS)
    if "mask" in name:
        return "" if is_target else "mask"
    return "target" if is_target else ""


def values_of(
    function: Callable[..., Any], batches: Sequence[PaddedBatch]
) -> list[Value]:
    """List the candidate's tensors with a row for each token of every text, in the
    order in which they are made.
    """
    if isinstance(function, type):
        remedy = "Give an instance, or a function of token ids."
        raise ModuleError(
            "Cannot compare the candidate",
            f"it is the class {function.__name__}",
            remedy,
        )
    texts = [_values_of_text(function, batch) for batch in batches]
    values = []
    for name, first in texts[0].items():
        rows = [text[name].rows for text in texts if name in text]
        widths = {part.shape[-1] for part in rows}
        if len(rows) == len(texts) and len(widths) == 1:
            values.append(Value(name, torch.cat(rows), first.tap))
    return values


def _values_of_text(
    function: Callable[..., Any], batch: PaddedBatch
) -> dict[str, Value]:
    stacks = [batch] if batch.targets is None else [batch, batch.targets]
    lengths = [stack.ids.shape[1] for stack in stacks]
    returned: dict[str, Tensor] = {}
    calls: list[ModuleCall] = []

    def run() -> None:
        with naming_errors():
            for name, tensor in named_tensors(Runner(function)(batch)):
                # Copied at once: a generator may use one tensor for all layers.
                if set(lengths) & set(tensor.shape):
                    returned[name] = tensor.detach().to("cpu", copy=True)

    is_module = isinstance(function, nn.Module) and not is_compiled(function)
    if isinstance(function, nn.Module) and is_module:
        parts = dict(hooks.parts_of(function))
        del parts[""]
        calls = record_calls(parts, run)
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
        is_alone = len(returned) == 1 or name == "hidden_states"
        rows.add_returned(
            f"output {name}" if is_module else name, tensor, is_alone=is_alone
        )
    return rows.values


def _events(
    calls: Iterable[ModuleCall],
) -> Iterator[tuple[str, hooks.Side, Tensor | None]]:
    """List what modules are given and give, in the order of time."""
    for call in calls:
        yield call.path, "input", call.state
        yield from _events(call.inner)
        yield call.path, "output", call.output


@dataclass
class _Rows:
    """Keeps the tensors of one text as rows, wherever their shape allows it; `lengths`
    counts the tokens of stacks.
    """

    lengths: list[int]
    values: dict[str, Value] = dataclasses.field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, tap: Tap | None = None) -> None:
        """Keep a tensor that has a row for each token."""
        if not tensor.is_floating_point():
            return
        for tokens in self.lengths:
            layout = next(layouts(tensor, 1, tokens), None)
            if layout is not None and (
                layout.flat or tensor.shape[layout.token] == tokens
            ):
                rows = layout.states(tensor, tokens)[0].cpu()
                self.values[name] = Value(
                    name, rows, tap and dataclasses.replace(tap, layout=layout)
                )
                return

    def add_returned(self, name: str, tensor: Tensor, *, is_alone: bool) -> None:
        """Keep what was returned, and the layers in it if it may hold several: [layer,
        token, width] in some order.
        """
        self.add(name, tensor)
        if tensor.ndim == 4 and 1 in tensor.shape[:3]:
            tensor = tensor.squeeze(tensor.shape.index(1))
        elif tensor.ndim != 3 or not is_alone or 1 in tensor.shape[:2]:
            return
        # Both are kept where there are as many layers as tokens in a text; one of them
        # fits other texts too.
        if tensor.shape[1] in self.lengths:
            for layer, part in enumerate(tensor):
                self.add(f"{name}[{layer}]", part)
        if tensor.shape[0] in self.lengths:
            for layer, part in enumerate(tensor.unbind(1)):
                self.add(f"{name}[:, {layer}]", part)


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """List the tensors and arrays that a function returned or yields, by name or by
    place.
    """
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping | type):
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
                raise PassError(
                    "Cannot compare the candidate",
                    reason,
                    "Give one tensor for each state, and stop.",
                )
            yield from named_tensors(value, f"{name}[{place}]" if name else str(place))
    elif hasattr(output, "__array__"):
        array = np.asarray(output)
        # numpy knows bfloat16 as a kind of its own.
        if array.dtype.kind in "fV":
            is_known = array.dtype in (np.float16, np.float32, np.float64)
            yield (
                name or "output",
                torch.tensor(array if is_known else array.astype(np.float32)),
            )


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that can be computed with."""
    if tensor.is_meta:
        reason = "it returned a tensor on the meta device, which holds no numbers"
        raise PassError(
            "Cannot compare the candidate", reason, "Load its weights first."
        )
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.float() if is_float8 else tensor
