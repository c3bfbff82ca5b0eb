"""The only file that registers a hook or replaces a forward; it leaves nothing behind.

A watcher is called with what went in and what came out of one call of a module. What it
returns, if anything, takes the place of what it saw. Hooks and replaced forwards act
only in the thread that installed them, so that another thread may call the same module
meanwhile. They are removed when the `with` ends, however it ends. If Ctrl-C interrupts
the removal, the rest is removed when the context manager is garbage-collected, or at
the latest before the next pass.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from hiddenscope.modules import kernels

Side = Literal["input", "output"]


@dataclass(frozen=True)
class Watch:
    """Watch one side of a module: `seen(args, kwargs)` before its forward, or
    `seen(output)` after it.
    """

    module: nn.Module
    side: Side
    seen: Callable[..., Any]


class Stopped(BaseException):
    """Raised by a watcher when the pass has given all that was wanted; `run` catches it
    and nothing else may.
    """


class _Installation:
    """What one `with` installs: a list of steps, each of which can be undone at any
    time and any number of times.

    The steps are known before the first is made, so an interrupt at any bytecode leaves
    nothing that is not known.
    """

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = tuple(steps)

    def __enter__(self) -> None:
        remove_leftovers()
        _INSTALLED[id(self)] = weakref.ref(self), self._steps
        for step in self._steps:
            step.install()

    def __exit__(self, *error: object) -> None:
        self._remove()

    def __del__(self) -> None:
        self._remove()

    def _remove(self) -> None:
        for step in reversed(self._steps):
            step.remove()
        _INSTALLED.pop(id(self), None)


_INSTALLED: dict[int, tuple[weakref.ref[_Installation], tuple[_Step, ...]]] = {}


def remove_leftovers() -> None:
    """Remove what an interrupt has left of installations whose `with` is over."""
    for key, (owner, steps) in list(_INSTALLED.items()):
        if owner() is None:
            for step in reversed(steps):
                step.remove()
            _INSTALLED.pop(key, None)


class _Step(Protocol):
    """Something that an installation does, and undoes."""

    def install(self) -> None: ...
    def remove(self) -> None: ...


class _Hook:
    """One of our hooks on a module; it is found again by identity."""

    def __init__(self, watch: Watch) -> None:
        self.module, self.side, self.seen = watch.module, watch.side, watch.seen
        self.thread = threading.get_ident()

    def __call__(self, module: nn.Module, args: Any, more: Any = None) -> Any:
        if threading.get_ident() != self.thread:
            return None
        if self.side == "output":
            return self.seen(more)
        # torch gives no kwargs to a hook that is being put on or taken off while
        # another thread calls the module.
        return None if more is None else self.seen(args, more)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        # A copy of a module drops this hook, so nothing that it refers to needs
        # copying.
        return self

    def install(self) -> None:
        if self.side == "input":
            self.module.register_forward_pre_hook(self, with_kwargs=True)
        else:
            self.module.register_forward_hook(self)

    def remove(self) -> None:
        table = (
            self.module._forward_pre_hooks
            if self.side == "input"
            else self.module._forward_hooks
        )
        for key in [key for key, hook in list(table.items()) if hook is self]:
            table.pop(key, None)
            self.module._forward_pre_hooks_with_kwargs.pop(key, None)


def drop_own(part: nn.Module) -> None:
    """Drop our own hooks from a copy of a module: they watch the original."""
    for table in (part._forward_pre_hooks, part._forward_hooks):
        own_keys = [key for key, hook in table.items() if isinstance(hook, _Hook)]
        for key in own_keys:
            del table[key]
            part._forward_pre_hooks_with_kwargs.pop(key, None)


class _Forward(NamedTuple):
    """Another forward in the place of a module's own; what was there before comes back."""

    module: nn.Module
    forward: Callable[..., Any]
    before: Callable[..., Any] | None

    def install(self) -> None:
        self.module.forward = self.forward

    def remove(self) -> None:
        if vars(self.module).get("forward") is self.forward:
            if self.before is None:
                vars(self.module).pop("forward", None)
            else:
                self.module.forward = self.before


def watching(watches: Sequence[Watch]) -> _Installation:
    """Hold the watches while the body runs.

    >>> linear, outputs = nn.Linear(2, 2), []
    >>> with watching([Watch(linear, "output", outputs.append)]):
    ...     _ = linear(torch.zeros(1, 2))
    >>> len(outputs), len(linear._forward_hooks)
    (1, 0)
    """
    return _Installation([_Hook(watch) for watch in watches])


def _replacing(forwards: Mapping[nn.Module, Callable[..., Any]]) -> _Installation:
    steps = [
        _Forward(part, forward, vars(part).get("forward"))
        for part, forward in forwards.items()
    ]
    return _Installation(steps)


def skipping(skips: Mapping[nn.Module, Mapping[int, Any]]) -> _Installation:
    """Let some calls of modules give back the state that came in, while the body runs
    one pass in this thread.

    For each module: the numbers of the calls to skip, each with an output of the form
    that such a call gives, in which the state's place is taken by what came in.

    >>> linear = nn.Linear(2, 2)
    >>> with skipping({linear: {0: (torch.empty(0), None)}}):
    ...     linear(torch.ones(1, 2))
    (tensor([[1., 1.]]), None)
    >>> "forward" in vars(linear)
    False
    """
    thread = threading.get_ident()
    return _replacing(
        {
            part: _skipped(part.forward, outputs, thread)
            for part, outputs in skips.items()
        }
    )


def substituting(calls: Mapping[nn.Module, Callable[..., Any]]) -> _Installation:
    """Let other functions be called in the place of modules' own forwards, while the
    body runs in this thread.

    >>> linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> with substituting({linear: other.forward}):
    ...     bool((linear(torch.ones(1, 2)) == other(torch.ones(1, 2))).all())
    True
    """
    thread = threading.get_ident()

    def instead(
        own: Callable[..., Any], other: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (other if threading.get_ident() == thread else own)(*args, **kwargs)

        return call

    return _replacing(
        {part: instead(part.forward, other) for part, other in calls.items()}
    )


@dataclass(frozen=True)
class Join:
    """One call of a module in a batch that grows from block to block.

    The call runs on the first `rows` of `batch` rows; then `joined`, if any, is
    appended to its output. With no rows the module is not run, and `form` gives the
    structure of its output.
    """

    batch: int
    rows: int
    form: Any
    joined: Tensor | None = None


def joining(joins: Mapping[nn.Module, Mapping[int, Join]]) -> _Installation:
    """Let rows of a batch enter at different blocks, while the body runs one pass in
    this thread.

    A row costs nothing below the block at which it enters. For each module: the numbers
    of its calls, each with a Join.

    >>> linear = nn.Linear(2, 2)
    >>> with joining({linear: {0: Join(3, 1, torch.empty(0), torch.ones(2, 2))}}):
    ...     linear(torch.zeros(3, 2))[1:]
    tensor([[1., 1.],
            [1., 1.]], grad_fn=<SliceBackward0>)
    """
    thread = threading.get_ident()
    return _replacing(
        {part: _joined(part.forward, calls, thread) for part, calls in joins.items()}
    )


def _skipped(
    forward: Callable[..., Any], outputs: Mapping[int, Any], thread: int
) -> Callable[..., Any]:
    calls = itertools.count()

    def skip(*args: Any, **kwargs: Any) -> Any:
        call = next(calls) if threading.get_ident() == thread else -1
        state = state_in(args, kwargs) if call in outputs else None
        return (
            forward(*args, **kwargs)
            if state is None
            else with_first_tensor(outputs[call], state)
        )

    return skip


def _joined(
    forward: Callable[..., Any], joins: Mapping[int, Join], thread: int
) -> Callable[..., Any]:
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        join = joins.get(next(calls)) if threading.get_ident() == thread else None
        if join is None:
            return forward(*args, **kwargs)
        args, kwargs = (
            first_rows(args, join.batch, join.rows),
            first_rows(kwargs, join.batch, join.rows),
        )
        state = state_in(args, kwargs)
        if not join.rows and state is not None:
            output = with_first_tensor(join.form, state[:0])
        else:
            output = forward(*args, **kwargs)
        made = first_tensor(output)
        if join.joined is None or made is None:
            return output
        return with_first_tensor(output, torch.cat([made, join.joined.to(made)]))

    return call


def first_rows(value: Any, batch: int, rows: int) -> Any:
    """The same value with every tensor of a whole batch cut to its first rows; one with
    a single axis is no batch.
    """
    if isinstance(value, Tensor):
        return value[:rows] if value.ndim > 1 and len(value) == batch else value
    if type(value) is dict:
        return {name: first_rows(part, batch, rows) for name, part in value.items()}
    return (
        type(value)(first_rows(part, batch, rows) for part in value)
        if type(value) in (tuple, list)
        else value
    )


def form(output: Any) -> Any:
    """What a call gave, emptied: its structure with the state's place kept, and nothing
    else of its content.
    """
    state = first_tensor(output)
    return _each(
        output,
        lambda value: (
            state.new_empty(0) if state is not None and value is state else None
        ),
    )


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure of dicts, tuples and lists, with everything in it changed."""
    if isinstance(value, dict):
        kept = copy(value)
        for name in value:
            kept[name] = _each(value[name], change)
        return kept
    if isinstance(value, tuple | list):
        parts = [_each(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return change(value)


def run(module: nn.Module, inputs: Mapping[str, Any], *, finite: bool = True) -> Any:
    """Call the module; None if a watcher stopped the pass.

    Hidden states are reported only if `inputs` ask for them, whatever the configuration
    says: to report them, transformers registers hooks of its own. With `finite`, it
    raises where an attention kernel would silently turn a NaN or an infinity into
    finite numbers.
    """
    quiet = {"output_hidden_states": False, "return_dict": True}
    steps = _attention_steps(module)
    attention_kept = _Installation(steps) if steps else nullcontext()
    with attention_kept, finite_attention() if finite else nullcontext():
        try:
            return module(**{**quiet, **inputs})
        except Stopped:
            return None


@contextmanager
def finite_attention() -> Iterator[None]:
    """Raise NotFinite when the body ends, if this thread gave attention a NaN or an
    infinity that the kernel lost.

    >>> with finite_attention():
    ...     _ = nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 8))
    """
    check = kernels.AttentionCheck()
    with _Installation([check]):
        yield
    check.raise_if_lost()


class _Attention:
    """The attention of a part of BigBird, which turns it from sparse to full for good
    when it meets a short text.
    """

    def __init__(self, part: Any) -> None:
        self.part, self.kind, self.children = (
            part,
            part.attention_type,
            dict(part._modules),
        )
        self.restored = False

    def install(self) -> None:
        """Do nothing: the model changes it by itself."""

    def remove(self) -> None:
        # Only once: later the attention is the user's to change.
        if self.restored:
            return
        self.part.attention_type = self.kind
        for name, child in self.children.items():
            self.part._modules[name] = child
        self.restored = True


def _attention_steps(module: nn.Module) -> list[_Attention]:
    """Steps that turn BigBird's sparse attention on again when the body ends."""
    parts = [*_known_parts(module).switching, *([module] if _switches(module) else [])]
    return [_Attention(part) for part in parts]


class _CapturingHooks:
    """The hooks and the flag that transformers puts on a part when it is asked for
    hidden states, for good.
    """

    FLAG = "_output_capturing_hooks_installed"

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.had_flag = self.FLAG in vars(part)
        self.before = set(part._forward_hooks)
        self.removed = False

    def install(self) -> None:
        """Do nothing: transformers registers them in the first such pass."""

    def remove(self) -> None:
        # Only once: later they may be there for a pass of the user's.
        if self.removed:
            return
        for key, hook in list(self.part._forward_hooks.items()):
            if key not in self.before and _is_of_transformers(hook):
                self.part._forward_hooks.pop(key, None)
        if not self.had_flag:
            vars(self.part).pop(self.FLAG, None)
        self.removed = True


def as_it_was(module: nn.Module) -> _Installation:
    """Remove what transformers puts on a module while the body runs, when it is asked
    for hidden states.
    """
    capturing = map(_CapturingHooks, module.modules())
    return _Installation([*capturing, *_attention_steps(module)])


class _DispatchMode:
    """A mode of torch's dispatcher in this thread. One that cannot be taken off the
    stack is over all the same.
    """

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.thread = threading.get_ident()

    def install(self) -> None:
        self.mode.__enter__()

    def remove(self) -> None:
        self.mode.is_over = True
        on_top = _python_dispatch._get_current_dispatch_mode() is self.mode
        if threading.get_ident() != self.thread or not on_top:
            return
        try:
            self.mode.__exit__(None, None, None)
        # An interrupt came when its flags had been taken back, and the mode itself had
        # not.
        except IndexError:
            _python_dispatch._pop_mode()


class _Threads:
    """Another number of threads for each operation of torch."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.before: int | None = None

    def install(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def remove(self) -> None:
        if self.before is not None:
            torch.set_num_threads(self.before)
            self.before = None


def threads(count: int) -> _Installation:
    """Let each operation of torch use so many threads while the body runs."""
    return _Installation([_Threads(count)])


def dispatching(mode: Any) -> _Installation:
    """Hold a mode of torch's dispatcher, such as a `SizeLimit`, while the body runs;
    `is_over` tells it of the end.
    """
    return _Installation([_DispatchMode(mode)])


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate moves weights in and out around each call, so that a pass must
    not be left half-way.
    """
    parts = (module, *_known_parts(module).by_path.values())
    hooked = any("_hf_hook" in part.__dict__ for part in parts)
    return hooked and any(
        getattr(hook, "offload", False) for hook in _accelerate_hooks(module)
    )


def input_device(module: nn.Module) -> torch.device:
    """Where a module's inputs go: where its first weight is, or, if all are offloaded,
    where they are brought to.
    """
    for weight in module.parameters():
        if not weight.is_meta:
            return weight.device
    devices = [
        getattr(hook, "execution_device", None) for hook in _accelerate_hooks(module)
    ]
    return next(
        (torch.device(device) for device in devices if device is not None),
        torch.device("meta"),
    )


def _accelerate_hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate's own making, which hang on a part one by one or several
    in a row.
    """
    for part in parts_of(module).values():
        hook = vars(part).get("_hf_hook")
        yield from getattr(hook, "hooks", [hook])


class _Parts(NamedTuple):
    """The parts of a module by path, without itself, and those of them that switch
    their attention for good.

    `children` are the children of each part that has any, as they were found; `hooks`
    are the tables of all hooks.
    """

    by_path: dict[str, nn.Module]
    switching: list[nn.Module]
    children: list[tuple[dict[str, nn.Module | None], list[nn.Module | None]]]
    hooks: list[dict[int, Callable[..., Any]]]


_PARTS: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()


def _known_parts(module: nn.Module) -> _Parts:
    """Every part, found once: a walk through a deep module takes longer than launching
    a block of it.
    """
    known = _PARTS.get(module)
    if known is None:
        by_path = {
            path: part for path, part in module.named_modules() if part is not module
        }
        parts = [module, *by_path.values()]
        children = [
            (part._modules, [*part._modules.values()])
            for part in parts
            if part._modules
        ]
        tables = [
            table
            for part in parts
            for table in (part._forward_pre_hooks, part._forward_hooks)
        ]
        known = _PARTS[module] = _Parts(
            by_path, list(filter(_switches, by_path.values())), children, tables
        )
    return known


def _switches(part: nn.Module) -> bool:
    return hasattr(type(part), "set_attention_type")  # BigBird


def parts_of(module: nn.Module) -> Mapping[str, nn.Module]:
    """Every part by its path, the module itself among them; found anew if somebody has
    exchanged one.
    """
    known = _PARTS.get(module)
    if known is not None and any(
        [*now.values()] != then for now, then in known.children
    ):
        del _PARTS[module]
    return {"": module, **_known_parts(module).by_path}


def hooks_of_others(module: nn.Module) -> tuple[int, ...]:
    """The numbers that torch gave to the hooks which somebody else has put on the
    module or its parts.

    The hooks by which transformers reports hidden states are left out: they change
    nothing.

    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_hook(lambda *seen: None)
    >>> hooks_of_others(linear) == (handle.id,)
    True
    """
    tables = [table for table in _known_parts(module).hooks if table]
    found = [(number, hook) for table in tables for number, hook in list(table.items())]
    return tuple(
        number
        for number, hook in found
        if not isinstance(hook, _Hook) and not _is_of_transformers(hook)
    )


def _is_of_transformers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def first_tensor(value: Any) -> Tensor | None:
    """The first floating tensor in what a module was given or gave back, wherever it is
    nested.
    """
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, tuple | list)
        else ()
    )
    for part in parts:
        found = first_tensor(part)
        if found is not None:
            return found
    return None


def state_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The state that enters a block: the first floating tensor of args, else of
    `hidden_states`, else of kwargs.
    """
    found = first_tensor(args)
    if found is None:
        found = first_tensor(kwargs.get("hidden_states"))
    return first_tensor(kwargs) if found is None else found


def with_first_tensor(value: Any, new: Tensor) -> Any:
    """The same value with its first floating tensor exchanged; what was given is not
    changed.

    >>> with_first_tensor((None, torch.zeros(1), "rest"), torch.ones(1))
    (None, tensor([1.]), 'rest')
    """
    if isinstance(value, Tensor):
        return new
    if isinstance(value, Mapping):
        changed = copy(value)
        key = next(key for key, part in value.items() if first_tensor(part) is not None)
        changed[key] = with_first_tensor(value[key], new)  # type: ignore[index]
        return changed
    at = next(i for i, part in enumerate(value) if first_tensor(part) is not None)
    parts = [*value[:at], with_first_tensor(value[at], new), *value[at + 1 :]]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def with_state_in(
    args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with the state that enters exchanged, wherever that tensor is
    among them.

    Funnel gives a block its state three times, as queries, keys and values.

    >>> state, mask = torch.zeros(1), torch.zeros(1)
    >>> with_state_in((state, mask), {"value": state}, torch.ones(1))
    ((tensor([1.]), tensor([0.])), {'value': tensor([1.])})
    """
    state = state_in(args, kwargs)
    exchanged: tuple[tuple[Any, ...], dict[str, Any]] = _each(
        (args, kwargs), lambda value: new if value is state else value
    )
    return exchanged
