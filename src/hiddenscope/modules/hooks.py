"""The only file that hooks a module or replaces a forward; it leaves nothing behind.

A watcher is called with the input or the output of one call of a module. If it returns
something, that takes the place of the input or output. Hooks, replaced forwards and
modes act only in the thread that installed them, so that another thread may call the
same module meanwhile. They are removed when the `with` ends, however it ends.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, overrides
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from hiddenscope.errors import Error, PassError, is_out_of_memory
from hiddenscope.modules import calls, operations, weights
from hiddenscope.modules.installation import Installation, Step, remove_later

Side: TypeAlias = Literal["input", "output", "inside"]
Forward: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]

# The flag that transformers leaves on a part with hooks that report hidden states.
CAPTURING = "_output_capturing_hooks_installed"


class Stopped(BaseException):
    """Raised by a watcher to end a pass that has shown everything it was run for.

    Only `run` catches it.
    """


@dataclass(eq=False)
class Watch:
    """A callback on one side of a module, or inside it; a hook, known by identity.

    It is called as `callback(args, kwargs)` before the forward, as `callback(output)`
    after it, or inside it as an `OperationCallback` for each operation of its code.
    """

    module: nn.Module
    side: Side
    callback: Callable[..., Any]
    thread: int = field(default_factory=threading.get_ident)

    def __call__(self, module: nn.Module, args: Any, more: Any = None) -> Any:
        """Call back, as a hook of torch's, in the thread that made this."""
        if threading.get_ident() != self.thread:
            return None
        if self.side == "output":
            return self.callback(more)
        # torch passes no kwargs to a hook that is being put on or taken off while
        # another thread calls the module.
        return None if more is None else self.callback(args, more)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        # A copy of a module drops this hook, so nothing that it refers to needs
        # copying.
        return self

    def install(self) -> None:
        """Put the hook on."""
        if self.side == "input":
            self.module.register_forward_pre_hook(self, with_kwargs=True)
        else:
            self.module.register_forward_hook(self)

    def remove(self) -> None:
        """Take the hook off."""
        table = self.module._forward_hooks
        if self.side == "input":
            table = self.module._forward_pre_hooks
        for key, hook in list(table.items()):
            if hook is self:
                # The hook itself last: after an interrupt between the two it is still
                # found, and removed once more.
                self.module._forward_pre_hooks_with_kwargs.pop(key, None)
                table.pop(key, None)


def drop_hooks(part: nn.Module) -> None:
    """Drop our hooks from a copy of a module, because they watch the original."""
    for table in (part._forward_pre_hooks, part._forward_hooks):
        for key, hook in list(table.items()):
            if isinstance(hook, Watch):
                del table[key]
                part._forward_pre_hooks_with_kwargs.pop(key, None)


def watching(watches: Sequence[Watch]) -> Installation:
    """Hook the watches while the body runs.

    >>> linear, outputs = nn.Linear(2, 2), []
    >>> with watching([Watch(linear, "output", outputs.append)]):
    ...     _ = linear(torch.zeros(1, 2))
    >>> len(outputs), len(linear._forward_hooks)
    (1, 0)
    """
    steps: list[Step] = []
    inside = defaultdict(list)
    for watch in watches:
        if watch.side == "inside":
            inside[watch.module].append(watch.callback)
        else:
            steps.append(watch)
    for part, callbacks in inside.items():
        steps.append(_replaced(part, _with_operations(callbacks, part.forward)))
    return Installation(steps)


def _with_operations(
    callbacks: Sequence[operations.OperationCallback], forward: Forward
) -> Forward:
    """Return a forward whose operations are handed to the callbacks."""

    def call(*args: Any, **kwargs: Any) -> Any:
        step = _FunctionMode(operations.OperationMode(callbacks))
        try:
            with Installation([step]):
                return forward(*args, **kwargs)
        finally:
            # Ctrl-C may come after the mode is on the stack and before the `with`
            # begins, and again while the installation is freed.
            step.remove()

    return call


class _ReplacedForward(NamedTuple):
    """A replacement of a module's forward; `before` is the one that comes back."""

    module: nn.Module
    forward: Forward
    before: Forward | None

    def install(self) -> None:
        self.module.forward = self.forward

    def remove(self) -> None:
        if vars(self.module).get("forward") is not self.forward:
            return
        if self.before is None:
            vars(self.module).pop("forward", None)
        else:
            self.module.forward = self.before


def _replaced(part: nn.Module, replacement: Forward) -> _ReplacedForward:
    """Call another function in place of a module's forward, in this thread alone."""
    thread, original = threading.get_ident(), part.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    return _ReplacedForward(part, call, vars(part).get("forward"))


def substituting(forwards: Mapping[nn.Module, Forward]) -> Installation:
    """Call other functions in place of the modules' forwards while the body runs.

    >>> linear, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> with substituting({linear: other.forward}):
    ...     bool((linear(torch.ones(1, 2)) == other(torch.ones(1, 2))).all())
    True
    """
    return Installation([_replaced(part, new) for part, new in forwards.items()])


def skipping(skips: Mapping[nn.Module, Mapping[int, Any]]) -> Installation:
    """Let some calls of modules hand on their input state, for one pass in the body.

    `skips` maps each module to the numbers of the calls to skip, each with the form of
    the output of such a call (see `form`), which is returned around the input state.

    >>> linear = nn.Linear(2, 2)
    >>> with skipping({linear: {0: (torch.empty(0), None)}}):
    ...     linear(torch.ones(1, 2))
    (tensor([[1., 1.]]), None)
    >>> "forward" in vars(linear)
    False
    """

    def skip(form: Any, forward: Forward, args: Args, kwargs: Any) -> Any:
        state = state_in(args, kwargs)
        if state is None:
            return forward(*args, **kwargs)
        return with_first_tensor(form, state)

    return _in_calls(skips, skip)


def _in_calls(
    calls: Mapping[nn.Module, Mapping[int, Any]],
    act: Callable[[Any, Forward, Args, dict[str, Any]], Any],
) -> Installation:
    """Act in place of some calls of modules, each with what `calls` has for it."""

    def acting(of_calls: Mapping[int, Any], forward: Forward) -> Forward:
        numbers = itertools.count()

        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            if number not in of_calls:
                return forward(*args, **kwargs)
            return act(of_calls[number], forward, args, kwargs)

        return call

    return substituting(
        {part: acting(of_calls, part.forward) for part, of_calls in calls.items()}
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


def joining(joins: Mapping[nn.Module, Mapping[int, Join]]) -> Installation:
    """Let rows of a batch enter at different blocks, for one pass in the body.

    A row costs nothing below the block at which it enters. `joins` maps each module to
    the numbers of its calls, each with a Join.

    >>> linear = nn.Linear(2, 2)
    >>> with joining({linear: {0: Join(3, 1, torch.empty(0), torch.ones(2, 2))}}):
    ...     linear(torch.zeros(3, 2))[1:]
    tensor([[1., 1.],
            [1., 1.]], grad_fn=<SliceBackward0>)
    """

    def run(join: Join, forward: Forward, args: Args, kwargs: Any) -> Any:
        args = first_rows(args, join.batch, join.rows)
        kwargs = first_rows(kwargs, join.batch, join.rows)
        state = state_in(args, kwargs)
        if not join.rows and state is not None:
            output = with_first_tensor(join.form, state[:0])
        else:
            output = forward(*args, **kwargs)
        rows = first_tensor(output)
        if join.joined is None or rows is None:
            return output
        return with_first_tensor(output, torch.cat([rows, join.joined.to(rows)]))

    return _in_calls(joins, run)


def call_module(
    module: nn.Module, inputs: Mapping[str, Any], *, finite: bool = True
) -> Any:
    """Call the module and return its output, or None if a watcher stopped the pass.

    With `finite`, raise NotFinite where an attention kernel would silently turn a NaN
    or an infinity into finite numbers.
    """
    # To report hidden states, transformers registers hooks of its own. So they are
    # reported only if `inputs` ask for them, whatever the configuration says.
    args, kwargs = calls.call_arguments(
        module, inputs, output_hidden_states=False, return_dict=True
    )
    steps = list(_switched_attention(module))
    restored = Installation(steps) if steps else nullcontext()
    checked = finite_attention(module) if finite else nullcontext()
    with restored, checked:
        try:
            return module(*args, **kwargs)
        except Stopped:
            return None
        except Exception as error:
            # Code of the user's own may assert what a text has to be.
            is_ours = isinstance(error, Error) or is_out_of_memory(error)
            if is_ours or calls.plain_parameters(module) is None:
                raise
            texts, tokens = inputs["input_ids"].shape
            raise PassError(
                f"Cannot run {type(module).__name__} on {texts} texts of {tokens}"
                " tokens",
                f"its forward stopped with {type(error).__name__}: {error}",
                "Give shorter texts if it takes no longer ones.",
            ) from error


# The largest query or key of a checked pass, as a share of what its dtype holds: where
# it is smaller than this, no other text makes it overflow. float16 has no such room.
ROOM = 2.0**-64
# By module, the weights whose attention had room, and in how many blocks.
_WITH_ROOM: WeakKeyDictionary[nn.Module, tuple[object, int]] = WeakKeyDictionary()


def finite_attention(
    module: nn.Module, *, shown: int | None = None
) -> AbstractContextManager[None]:
    """Raise NotFinite after a pass whose attention received a NaN that the kernel lost.

    Only calls in this thread are checked. Where no kernel that the module may run loses
    its inputs, nothing is installed.

    Nor is it where the caller looks at the states of all tokens after this many blocks,
    if they are `shown`, and the first pass over these weights left room: what is not
    finite in a state then stays in it up to there, and queries and keys that are
    computed from finite states and finite weights are finite. Hooks of a user, and
    changes, might have it otherwise.

    >>> with finite_attention(nn.Linear(2, 2)):
    ...     _ = nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 8))
    """
    if shown is not None and _is_untouched(module):
        versions, blocks = _WITH_ROOM.get(module, (None, 0))
        if shown <= blocks and weights.FINITE.get(module) is versions:
            return nullcontext()
    known = _known_parts(module)
    if not (known.has_foreign_code or operations.may_call_sdpa(module)):
        return nullcontext()
    devices = {tensor.device for tensor in weights.tensors_of(module)}
    # Weights that accelerate has offloaded are on no device that computes.
    devices.add(input_device(module))
    if not any(operations.loses_inputs(device) for device in devices):
        return nullcontext()
    return _checked_attention(module, shown)


@contextmanager
def _checked_attention(module: nn.Module, shown: int | None) -> Iterator[None]:
    check = operations.AttentionCheck()
    with Installation([_FunctionMode(check)]):
        yield
    if check.largest_share() < ROOM and shown is not None:
        _WITH_ROOM[module] = weights.FINITE.get(module), shown


def _is_untouched(module: nn.Module) -> bool:
    """Tell whether nothing hooks a module's parts, replaces a forward or autocasts."""
    known = _known_parts(module)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return False
    if any("forward" in vars(part) for part in (module, *known.by_path.values())):
        return False
    return next(_hooks_on(module), None) is None


@dataclass(eq=False)
class _FunctionMode:
    """One of our modes on this thread's stack of function modes."""

    mode: operations.AttentionCheck | operations.OperationMode
    thread: int = field(default_factory=threading.get_ident)

    def install(self) -> None:
        # An earlier mode could not be taken off if its `with` ended in another thread.
        top = _top_function_mode()
        while isinstance(top, _OUR_MODES) and top.is_over:
            overrides._pop_mode()  # type: ignore[no-untyped-call]
            top = _top_function_mode()
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        # A mode that cannot be taken off the stack lets everything through from now on.
        was_over, self.mode.is_over = self.mode.is_over, True
        if threading.get_ident() != self.thread:
            return
        if _top_function_mode() is self.mode:
            overrides._pop_mode()  # type: ignore[no-untyped-call]
        elif not was_over:
            # torch takes a mode off its stack while the mode handles a call. If Ctrl-C
            # interrupts that, torch puts the mode back when the traceback is freed.
            remove_later(self)


_OUR_MODES = (operations.AttentionCheck, operations.OperationMode)


def _top_function_mode() -> object:
    return overrides._get_current_function_mode()  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class _DispatchMode:
    """A mode on this thread's stack of dispatch modes."""

    mode: Any
    thread: int = field(default_factory=threading.get_ident)

    def install(self) -> None:
        self.mode.__enter__()

    def remove(self) -> None:
        # A mode that cannot be taken off the stack lets everything through from now on.
        self.mode.is_over = True
        on_top = _python_dispatch._get_current_dispatch_mode() is self.mode
        if threading.get_ident() != self.thread or not on_top:
            return
        try:
            self.mode.__exit__(None, None, None)
        except IndexError:
            # An interrupt came after torch had reset the mode's flags and before it
            # took the mode off the stack.
            _python_dispatch._pop_mode()


def dispatching(mode: TorchDispatchMode) -> Installation:
    """Enter a dispatch mode, such as a `SizeLimit`, while the body runs.

    Its attribute `is_over` is set when the body ends.
    """
    return Installation([_DispatchMode(mode)])


@dataclass(eq=False)
class _Threads:
    """A different number of threads for each operation of torch."""

    count: int
    before: int | None = None

    def install(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def remove(self) -> None:
        if self.before is not None:
            torch.set_num_threads(self.before)
            self.before = None


def threads(count: int) -> Installation:
    """Let each operation of torch use this many threads while the body runs."""
    return Installation([_Threads(count)])


@dataclass(eq=False)
class _Afterwards:
    """What is undone once, after a pass in which a model changes itself for good."""

    undo: Callable[[], None]
    is_undone: bool = False

    def install(self) -> None:
        """Do nothing: the model itself makes the change."""

    def remove(self) -> None:
        # Only once: later it is the user's to change.
        if not self.is_undone:
            self.undo()
            self.is_undone = True


def _switched_attention(module: nn.Module) -> Iterator[_Afterwards]:
    """Yield the steps that switch BigBird's sparse attention on again.

    BigBird switches to full attention when it meets a short text, and never back.
    """

    def switch_back(part: Any, kind: str, children: Mapping[str, Any]) -> None:
        part.attention_type = kind
        for name, child in children.items():
            part._modules[name] = child

    for part in _known_parts(module).switching:
        kind, children = part.attention_type, dict(part._modules)
        yield _Afterwards(partial(switch_back, part, kind, children))


def restoring(module: nn.Module) -> Installation:
    """Undo what a pass of transformers changes on a module for good.

    These are the output-capturing hooks and the flag that transformers leaves on a part
    that is first called with output_hidden_states=True, and the attention type of
    BigBird.
    """

    def without_hooks(part: nn.Module, had_flag: bool, before: set[int]) -> None:
        for key, hook in list(part._forward_hooks.items()):
            if key not in before and _is_of_transformers(hook):
                part._forward_hooks.pop(key, None)
        if not had_flag:
            vars(part).pop(CAPTURING, None)

    steps = []
    for part in module.modules():
        had_flag, before = CAPTURING in vars(part), set(part._forward_hooks)
        steps.append(_Afterwards(partial(without_hooks, part, had_flag, before)))
    return Installation([*steps, *_switched_attention(module)])


def foreign_hooks(module: nn.Module) -> tuple[int, ...]:
    """Return torch's numbers of the hooks on the module that are not ours.

    The hooks by which transformers reports hidden states are left out: they change
    nothing.

    >>> linear = nn.Linear(2, 2)
    >>> handle = linear.register_forward_hook(lambda *call: None)
    >>> foreign_hooks(linear) == (handle.id,)
    True
    """
    numbers = [
        number for number, hook in _hooks_on(module) if not isinstance(hook, Watch)
    ]
    return tuple(numbers)


def _hooks_on(module: nn.Module) -> Iterator[tuple[int, object]]:
    """Yield the hooks on a module's parts with torch's numbers, but transformers'."""
    for table in filter(None, _known_parts(module).hooks):
        for number, hook in list(table.items()):
            if not _is_of_transformers(hook):
                yield number, hook


def _is_of_transformers(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def is_offloaded(module: nn.Module) -> bool:
    """Tell whether accelerate moves weights in and out around each call.

    Such a pass must not be stopped half-way.
    """
    if not is_dispatched(module):
        return False
    for part in parts_of(module).values():
        hooks = weights.accelerate_hooks(part)
        if any(getattr(hook, "offload", False) for hook in hooks):
            return True
    return False


def is_dispatched(module: nn.Module) -> bool:
    """Tell whether accelerate has placed the parts of a module on devices."""
    parts = (module, *_known_parts(module).by_path.values())
    return any("_hf_hook" in part.__dict__ for part in parts)


def input_device(module: nn.Module) -> torch.device:
    """Return the device of a module's inputs: that of its first weight.

    If all weights are offloaded, it is the device that accelerate brings them to.
    """
    for weight in module.parameters():
        if not weight.is_meta:
            return weight.device
    for part in parts_of(module).values():
        device = weights.execution_device(part)
        if device is not None:
            return device
    return torch.device("meta")


class _Parts(NamedTuple):
    """The parts of a module by path, without the module itself.

    `switching` are those that switch their attention type for good, the module itself
    among them. `children` are the
    children of each part as they were, and `hooks` the hook tables of all parts.
    `has_foreign_code` says that some part comes from outside transformers, or is
    torch's multi-head attention, and so may call attention on its own terms.
    """

    by_path: dict[str, nn.Module]
    switching: list[Any]
    children: list[tuple[dict[str, nn.Module | None], list[nn.Module | None]]]
    hooks: list[dict[int, Callable[..., Any]]]
    has_foreign_code: bool


_PARTS: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()


def _known_parts(module: nn.Module) -> _Parts:
    # Walking through a deep module takes longer than launching one of its blocks, so
    # its parts are listed once.
    known = _PARTS.get(module)
    if known is not None:
        return known
    by_path = dict(module.named_modules())
    by_path = {path: part for path, part in by_path.items() if part is not module}
    children, switching = [], []
    tables: list[dict[int, Callable[..., Any]]] = []
    for part in (module, *by_path.values()):
        if part._modules:
            children.append((part._modules, [*part._modules.values()]))
        tables += [part._forward_pre_hooks, part._forward_hooks]
        if hasattr(type(part), "set_attention_type"):
            switching.append(part)
    has_foreign_code = False
    for part in by_path.values():
        is_known = type(part).__module__.startswith(("torch.", "transformers."))
        if not is_known or isinstance(part, nn.MultiheadAttention):
            has_foreign_code = True
    _PARTS[module] = _Parts(by_path, switching, children, tables, has_foreign_code)
    return _PARTS[module]


def parts_of(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return every part by its path, the module itself included.

    The parts are listed again if one of them has been replaced.
    """
    known = _PARTS.get(module)
    if known is not None:
        for current, before in known.children:
            if [*current.values()] != before:
                del _PARTS[module]
                break
    return {"": module, **_known_parts(module).by_path}


# The state of a call is the first floating tensor in its arguments or its output,
# however transformers nests it: in tuples, lists, dicts or model outputs.


def first_tensor(value: Any, *, axes: int = 0) -> Tensor | None:
    """Return the first floating tensor in a nested value; None if it has none.

    It has at least this many axes.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.ndim >= axes:
                return value
        elif isinstance(value, Mapping):
            waiting += [*value.values()][::-1]
        elif isinstance(value, tuple | list):
            waiting += value[::-1]
    return None


def logits_in(output: Any) -> Tensor | None:
    """Return the logits of a module that makes some, from its output.

    A module in plain PyTorch need not name them: they are the first that is no loss.

    >>> logits_in((torch.tensor(0.5), torch.zeros(1, 2))).shape
    torch.Size([1, 2])
    """
    named = getattr(output, "logits", None)
    if isinstance(output, Mapping):
        named = output.get("logits")
    return named if isinstance(named, Tensor) else first_tensor(output, axes=2)


def state_in(args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return the state that enters a block.

    It is the first floating tensor of args, else of `hidden_states`, else of kwargs.
    """
    return first_tensor((args, kwargs.get("hidden_states"), kwargs))


def with_first_tensor(value: Any, tensor: Tensor) -> Any:
    """Return a copy of a nested value with its first floating tensor replaced.

    It is replaced wherever it occurs.

    >>> with_first_tensor((None, torch.zeros(1), "rest"), torch.ones(1))
    (None, tensor([1.]), 'rest')
    """
    first = first_tensor(value)
    return map_leaves(value, lambda leaf: tensor if leaf is first else leaf)


def with_state_in(
    args: Args, kwargs: dict[str, Any], state: Tensor
) -> tuple[Args, dict[str, Any]]:
    """Return the arguments of a block with its state replaced wherever it occurs.

    Funnel passes a block its state three times, as queries, keys and values.

    >>> state, mask = torch.zeros(1), torch.zeros(1)
    >>> with_state_in((state, mask), {"value": state}, torch.ones(1))
    ((tensor([1.]), tensor([0.])), {'value': tensor([1.])})
    """
    before = state_in(args, kwargs)
    changed: tuple[Args, dict[str, Any]] = map_leaves(
        (args, kwargs), lambda leaf: state if leaf is before else leaf
    )
    return changed


def form(output: Any) -> Any:
    """Return the structure of an output, with an empty tensor for its state.

    Everything else in it becomes None.
    """
    state = first_tensor(output)

    def emptied(leaf: Any) -> Tensor | None:
        if state is None or leaf is not state:
            return None
        return state.new_empty(0)

    return map_leaves(output, emptied)


def first_rows(value: Any, batch: int, rows: int) -> Any:
    """Cut every tensor of a whole batch in a nested value to its first rows.

    A tensor with a single axis is taken for no batch.
    """

    def cut(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.ndim > 1 and len(leaf) == batch
        return leaf[:rows] if is_batch else leaf

    return map_leaves(value, cut)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to everything inside nested dicts, tuples and lists."""
    if isinstance(value, dict):
        changed = copy(value)
        for name in value:
            changed[name] = map_leaves(value[name], function)
        return changed
    if isinstance(value, tuple | list):
        parts = [map_leaves(part, function) for part in value]
        # A named tuple takes its parts one by one.
        is_named = hasattr(value, "_fields")
        return type(value)(*parts) if is_named else type(value)(parts)
    return function(value)
