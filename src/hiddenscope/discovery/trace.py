"""Trace: one pass with every call of every submodule recorded, and where states are.

A hidden state is read at a tap: the input or output of one call of a module. The layout
of its tensor says which axis is the text and which the token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.errors import PassError
from hiddenscope.modules import autograd, calls, hooks, operations


@dataclass(frozen=True)
class Layout:
    """Which axis of a tensor is the text and which the token.

    All other axes together are the width. A block may work on more rows than there are
    tokens: padding behind the text (`at_end=False`), or rows before it, such as a
    prompt of its own (`at_end=True`). `flat` means that texts and tokens share one
    axis. The state is `scale` times what the tensor holds: Granite multiplies what a
    branch gives before it is added.

    >>> import torch
    >>> Layout(text=1, token=0).states(torch.zeros(7, 2, 64), tokens=7).shape
    torch.Size([2, 7, 64])
    """

    text: int = 0
    token: int = 1
    at_end: bool = False
    flat: bool = False
    scale: float = 1.0

    def texts(self, tensor: Tensor, tokens: int) -> int:
        """Return the number of texts in a tensor, each of `tokens` tokens."""
        return tensor.shape[0] // tokens if self.flat else tensor.shape[self.text]

    def length(self, tensor: Tensor) -> int:
        """Return the number of tokens of each text in a tensor."""
        return tensor.shape[1] if self.flat else tensor.shape[self.token]

    def states(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the tensor as [text, token, width], without a copy where possible."""
        if self.scale != 1:
            tensor = tensor * self.scale
        if self.flat:
            return tensor.reshape(-1, tokens, tensor.shape[-1])
        if (self.text, self.token) != (0, 1):
            tensor = tensor.movedim((self.text, self.token), (0, 1))
        if tensor.ndim > 3:
            tensor = tensor.flatten(2)
        extra = tensor.shape[1] - tokens
        if not extra:
            return tensor
        return tensor[:, extra:] if self.at_end else tensor[:, :tokens]

    def gradients(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the gradient by the tensor as that by the states, likewise."""
        return replace(self, scale=1 / self.scale).states(tensor, tokens)

    def with_states(self, tensor: Tensor, states: Tensor) -> Tensor:
        """Return a copy of the tensor that holds other states [text, token, width].

        >>> import torch
        >>> states = torch.tensor([[[5.0], [6.0]]])
        >>> Layout(text=1, token=0).with_states(torch.zeros(2, 1, 1), states).flatten()
        tensor([5., 6.])
        """
        if self.scale != 1:
            # What is the same is not rounded again.
            before = self.states(tensor, states.shape[1])
            plain = replace(self, scale=1.0)
            unscaled = torch.where(
                states == before,
                plain.states(tensor, states.shape[1]),
                states / self.scale,
            )
            return plain.with_states(tensor, unscaled)
        if self.flat:
            return states.reshape(tensor.shape).clone()
        new = tensor.clone()
        rows = new.movedim((self.text, self.token), (0, 1))
        tokens = states.shape[1]
        extra = rows.shape[1] - tokens
        rows = rows[:, extra:] if self.at_end and extra else rows[:, :tokens]
        rows.copy_(states.reshape(rows.shape))
        return new


PLAIN = Layout()


def layouts(tensor: Tensor, texts: int, tokens: int) -> Iterator[Layout]:
    """Yield every layout in which a tensor holds a state for each token of the texts.

    Axes as long as the tokens come before longer ones.
    """
    shape = tensor.shape
    if tensor.ndim == 2 and shape[0] == texts * tokens:
        yield Layout(flat=True)
    if tensor.ndim < 3:
        return
    axes = range(tensor.ndim)
    for token in sorted(axes, key=lambda axis: (shape[axis] != tokens, axis)):
        for text in axes:
            if text == token or shape[text] != texts or shape[token] < tokens:
                continue
            yield Layout(text, token)
            if shape[token] > tokens:
                yield Layout(text, token, at_end=True)


@dataclass(frozen=True)
class Tap:
    """Where a hidden state can be read.

    That is the path of a module, the number of its call in a pass, and its input or its
    output.
    """

    path: str
    call: int
    side: hooks.Side
    layout: Layout = PLAIN

    def read(self, *arguments: Any) -> Tensor | None:
        """Return the tensor of the state, from the arguments of a hook on this side."""
        if self.side == "input":
            return hooks.state_in(*arguments)
        return hooks.first_tensor(arguments[0])

    def written(self, tensor: Tensor, *arguments: Any) -> Any:
        """Return the input or output of a hook with another tensor for the state."""
        if self.side == "output":
            return hooks.with_first_tensor(arguments[0], tensor)
        return hooks.with_state_in(arguments[0], arguments[1], tensor)

    def watch(
        self,
        module: nn.Module,
        callback: Callable[[Tensor], Tensor | None],
        number_call: Callable[[], int] | None = None,
    ) -> hooks.Watch:
        """Return a watch that calls back with the tensor.

        A tensor that the callback returns takes its place. Calls of the module are
        numbered from 0 on, those of one pass unless `number_call` does it.
        """
        number = number_call or count().__next__

        def at_call(*arguments: Any) -> Any:
            if number() != self.call:
                return None
            tensor = self.read(*arguments)
            if tensor is None:
                reason = "it holds no tensor"
                raise PassError(f"No state at the {self}", reason, "Report this model.")
            new = callback(tensor)
            return None if new is None else self.written(new, *arguments)

        return hooks.Watch(module.get_submodule(self.path), self.side, at_call)

    def __str__(self) -> str:
        again = f" (call {self.call + 1})" if self.call else ""
        return f"{self.side} of {self.path or 'the module'}{again}"


def arguments(
    module: nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    targets: Tensor | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments for one pass over `ids` [text, token].

    `targets` are the decoder ids of an encoder-decoder.
    """
    keywords: dict[str, Any] = {"input_ids": ids}
    parameters = calls.plain_parameters(module)
    if parameters is not None:
        given_too = calls.GIVEN_IDS_TOO.get(type(calls.below_wrapper(module)))
        if given_too is not None:
            keywords[given_too] = ids
        return keywords
    names = calls.accepts(module)
    if "attention_mask" in names:
        keywords["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    # Some take a cache, and hand on whether there is to be one.
    if "use_cache" in names or {"past_key_values", "kwargs"} <= names:
        keywords["use_cache"] = False
    # The layout models want a box for each token.
    if "bbox" in names:
        boxes = torch.zeros(*ids.shape, 4, dtype=torch.long, device=ids.device)
        keywords["bbox"] = boxes
    if targets is not None:
        keywords["decoder_input_ids"] = targets
    return keywords


@dataclass
class Call:
    """One call of one submodule: the states that went in and came out, and when.

    Times are ticks of the pass.
    """

    path: str
    number: int
    entered: int
    into: Tensor | None
    left: int = -1
    out: Tensor | None = None

    def contains(self, other: Call) -> bool:
        """Tell whether another call is made inside this one, or is this one."""
        return self.entered <= other.entered and other.left <= self.left


@dataclass(frozen=True)
class OperationPlace:
    """An operation in a pass.

    It is the `number`th of its kind in the `call`th call of the module at `path`.
    """

    path: str
    call: int
    kind: operations.OperationKind
    number: int


@dataclass
class TracedOperation:
    """One attention, product or softmax, with copies of what it was made of.

    Its place is in the innermost module that makes it.
    """

    kind: operations.OperationKind
    time: int
    place: OperationPlace
    operands: tuple[Tensor, ...]
    output: Tensor


@dataclass
class Trace:
    """The calls of one pass in order, and the states that Hugging Face reports.

    `operations` are recorded only where they are asked for.
    """

    inputs: Mapping[str, Any]
    texts: int
    tokens: int
    output: Any = None
    calls: list[Call] = field(default_factory=list)
    reported_inside: list[tuple[Tensor, ...]] = field(default_factory=list)
    last_hidden_states: list[Tensor] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)

    def reports(self) -> list[tuple[Tensor, ...]]:
        """Return Hugging Face's tuples of hidden states.

        They are the model's own, or, where it returns none, its submodules'.
        """
        return _hidden_states(self.output) or self.reported_inside

    def within(self, outer: Call) -> Trace:
        """Return the part of the trace inside one call, the call itself included."""
        inner = list(filter(outer.contains, self.calls))
        operations = [
            operation
            for operation in self.operations
            if outer.entered < operation.time < outer.left
        ]
        return replace(self, calls=inner, operations=operations)

    def call_at(self, tap: Tap) -> Call:
        """Return the call that a tap reads."""
        for call in self.calls:
            if call.path == tap.path and call.number == tap.call:
                return call
        raise AssertionError(f"{tap} is in every pass")

    def states_at(self, tap: Tap) -> Tensor:
        """Return the states at a tap [text, token, width]."""
        call = self.call_at(tap)
        tensor = call.into if tap.side == "input" else call.out
        assert tensor is not None, "a tap has a state in every pass"
        return tap.layout.states(tensor, self.tokens)


def trace(
    module: nn.Module, inputs: Mapping[str, Any], *, with_operations: bool = False
) -> Trace:
    """Run the module once and record each call of each submodule, with its states.

    With `with_operations`, attention calls, products and softmaxes are recorded too.
    """
    texts, tokens = inputs["input_ids"].shape
    traced = Trace(inputs, texts, tokens)
    clock = count()
    counts: Counter[str] = Counter()
    open_calls = []

    def watch(path: str, part: nn.Module) -> list[hooks.Watch]:
        def before(args: hooks.Args, kwargs: hooks.Kwargs) -> None:
            state = _copy(hooks.state_in(args, kwargs))
            call = Call(path, counts[path], next(clock), state)
            counts[path] += 1
            open_calls.append(call)
            traced.calls.append(call)

        def after(output: Any) -> None:
            call = open_calls.pop()
            call.left = next(clock)
            call.out = _copy(hooks.first_tensor(output))
            if isinstance(output, Mapping):
                for name, value in output.items():
                    if name.endswith("last_hidden_state") and isinstance(value, Tensor):
                        traced.last_hidden_states.append(value)
                traced.reported_inside += _hidden_states(output)

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]

    operation_counts: Counter[tuple[int, operations.OperationKind]] = Counter()

    def record(operation: operations.Operation, run: operations.RunOperation) -> Any:
        innermost = open_calls[-1]
        number = operation_counts[innermost.entered, operation.kind]
        operation_counts.update((call.entered, operation.kind) for call in open_calls)
        place = OperationPlace(innermost.path, innermost.number, operation.kind, number)
        operands: tuple[Tensor, ...] = ()
        # The weights of experts are large, and no state of a token.
        if not any(map(_is_weight, operation.operands)):
            operands = tuple(part.detach().clone() for part in operation.operands)
        output = run(operation)
        if isinstance(output, Tensor):
            copy = output.detach().clone()
            traced.operations.append(
                TracedOperation(operation.kind, next(clock), place, operands, copy)
            )
        return output

    watches = []
    for path, part in module.named_modules():
        watches += watch(path, part)
    if with_operations:
        watches.append(hooks.Watch(module, "inside", record))
    with (
        autograd.restored(),
        torch.no_grad(),
        hooks.restoring(module),
        hooks.watching(watches),
    ):
        args, kwargs = calls.call_arguments(
            module, inputs, output_hidden_states=True, return_dict=True
        )
        traced.output = module(*args, **kwargs)
    return traced


def _hidden_states(output: Any) -> list[tuple[Tensor, ...]]:
    """Return the tuples of hidden states in a module's output.

    Their names are `hidden_states`, `encoder_hidden_states` and the like.
    """
    if not isinstance(output, Mapping):
        return []
    reports = []
    for name, value in output.items():
        if name.endswith("hidden_states") and isinstance(value, tuple | list):
            entries = [hooks.first_tensor(entry) for entry in value]
            tensors = tuple(entry for entry in entries if entry is not None)
            if tensors and len(tensors) == len(entries):
                reports.append(tensors)
    return reports


def _is_weight(tensor: Tensor) -> bool:
    return any(isinstance(part, nn.Parameter) for part in (tensor, tensor._base))


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
