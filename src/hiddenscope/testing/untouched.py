"""Hold that a question leaves the user's modules alone: at every instant, for other
threads, and after an interrupt.
"""

import contextlib
import copy
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from queue import Empty, Queue
from types import FrameType
from typing import Any

import torch
import transformers
from torch import Tensor, nn, overrides
from torch.utils import _python_dispatch

import hiddenscope as hs
from hiddenscope.modules import hooks, installation

# At how many calls of a question it is interrupted, and the modules are called.
INTERRUPTS, CALLS = 20, 80
IDS = [[5, 6, 7, 8, 9]]

Ask = Callable[[], Any]
Place = tuple[str, str]
"""The file and the name of a function."""

PACKAGE = str(Path(hs.__file__).parent)
TRACED: tuple[str, ...] = (
    PACKAGE,
    str(Path(torch.__file__).parent / "nn"),
    str(Path(transformers.__file__).parent / "models"),
)
TRACED += (copy.__file__, contextlib.__file__)
# What puts something on a module, or something else in its place, is interrupted most.
WRITERS = (
    "hooks.py",
    "installation.py",
    "module_copy.py",
    "stateless.py",
    "_named_member_accessor.py",
    "operations.py",
    "autograd.py",
)


@cache
def is_traced(file: str) -> bool:
    """Tell whether a file is of those whose calls are looked at."""
    return file.startswith(TRACED)


@contextmanager
def tracing(tracer: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Trace this thread, and those that it starts, while the body runs."""
    before = sys.gettrace(), threading.gettrace()
    threading.settrace(tracer)
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])


class Instants:
    """Call `look` at every line of ours, and wherever a traced function of others
    begins.
    """

    def __init__(self, look: Callable[[FrameType], None]) -> None:
        self.look = look

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Look, as `sys.settrace` asks at every event."""
        file = frame.f_code.co_filename
        if not is_traced(file):
            return None
        if event in ("call", "line"):
            self.look(frame)
        return self if file.startswith(PACKAGE) else None


def assert_never_changed(ask: Ask, modules: Sequence[nn.Module]) -> None:
    """Ask, and look at every instant whether each weight is the tensor that it was, in
    every part, and each setting.
    """
    tensors: list[tuple[dict[str, Any], str, Tensor]] = []
    configs: dict[int, Any] = {}
    parts = list(chain.from_iterable(module.modules() for module in modules))
    for part in parts:
        for table in (part._parameters, part._buffers):
            tensors += [
                (table, name, tensor)
                for name, tensor in table.items()
                if tensor is not None
            ]
        if hasattr(part, "config"):
            configs[id(part.config)] = part.config

    def now() -> list[Any]:
        seen: list[Any] = []
        for table, name, tensor in tensors:
            seen += (
                id(table.get(name)),
                tensor.data_ptr(),
                tensor.dtype,
                tensor._version,
            )
        seen += [config._attn_implementation_internal for config in configs.values()]
        return [*seen, *[part.training for part in parts]]

    before = now()
    changes: list[str] = []

    def look(frame: FrameType) -> None:
        if not changes and now() != before:
            changes.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    with tracing(Instants(look)):
        ask()
    assert not changes, (
        f"a weight or a setting of the user's was another at {changes[0]}"
    )


def assert_others_get_their_numbers(
    ask: Ask, modules: Sequence[nn.Module], calls: int = CALLS
) -> None:
    """Ask, and let another thread call each module at so many instants: it gets its own
    numbers, bit for bit.
    """
    ids = torch.tensor(IDS)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [module(input_ids=ids).logits for module in modules]

    expected = run()
    wanted: Queue[str | None] = Queue()
    answered: Queue[None] = Queue()
    wrong: list[str] = []

    def user() -> None:
        while (place := wanted.get()) is not None:
            try:
                results = run()
                if not all(map(torch.equal, results, expected)):
                    wrong.append(f"other numbers at {place}")
            except Exception as error:
                wrong.append(f"{error!r} at {place}")
            answered.put(None)

    instants = Counter[str]()
    with tracing(Instants(lambda frame: instants.update(["all"]))):
        ask()
    step = max(1, instants["all"] // calls)

    def look(frame: FrameType) -> None:
        instants["now"] += 1
        if instants["now"] % step == 0 and not wrong:
            wanted.put(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            # A lock of ours that the other thread waits for is given back only when
            # this one goes on.
            with contextlib.suppress(Empty):
                answered.get(timeout=2)

    thread = threading.Thread(target=user)
    thread.start()
    try:
        with tracing(Instants(look)):
            ask()
    finally:
        wanted.put(None)
        thread.join()
    assert not wrong, wrong[0]
    assert instants["now"] // step >= min(calls, instants["all"]) // 2


def modes() -> list[Any]:
    """List what of torch is set for this thread, or for everybody."""
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        stack,
        overrides._get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
    ]


class AtCall:
    """Raise KeyboardInterrupt where a function begins for the so-manyth time.

    That is where Python looks for signals. Without a place it counts the calls.
    """

    def __init__(self, place: Place | None = None, number: int = 0) -> None:
        self.place, self.left, self.calls = place, number, Counter[Place]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count a call, and raise at the one that was chosen."""
        file = frame.f_code.co_filename
        if (
            not is_traced(file)
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        place = file, frame.f_code.co_name
        self.calls[place] += 1
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def _interrupts(ask: Ask, chance: random.Random, count: int) -> list[tuple[Place, int]]:
    """Choose where to interrupt: each function that writes, at its first, its last and
    two other calls; and others.
    """
    counting = AtCall()
    with tracing(counting):
        ask()
    chosen: list[tuple[Place, int]] = []
    others: list[tuple[Place, int]] = []
    for place, calls in sorted(counting.calls.items()):
        numbers = {1, calls, chance.randint(1, calls), chance.randint(1, calls)}
        is_writer = Path(place[0]).name in WRITERS
        (chosen if is_writer else others).extend(
            (place, number) for number in sorted(numbers)
        )
    half = count // 2
    return chance.sample(chosen, min(half, len(chosen))) + chance.sample(
        others, min(count - half, len(others))
    )


def assert_interrupts_leave_nothing(
    ask: Ask, modules: Sequence[nn.Module], model: hs.Model, count: int = INTERRUPTS
) -> None:
    """Interrupt a question at so many of its calls: modules, modes of torch, threads
    and the lock are as before.
    """
    ask()  # what is tried once is tried now
    before = [state_of(module) for module in modules]
    torch_before, threads = modes(), set(threading.enumerate())
    stopped = 0
    for place, number in _interrupts(ask, random.Random(7), count):
        where = f"interrupted at call {number} of {place[1]} in {place[0]}"
        try:
            with tracing(AtCall(place, number)):
                ask()
        except KeyboardInterrupt:
            stopped += 1
        for thread in set(threading.enumerate()) - threads:
            thread.join(timeout=20)
            assert not thread.is_alive(), f"a thread is left, {where}"
        installation.remove_leftovers()  # as the next pass does first
        assert modes() == torch_before, where
        for module, state in zip(modules, before, strict=True):
            now = state_of(module)
            changed = [name for name in state | now if state.get(name) != now.get(name)]
            assert not changed, f"{changed} of {type(module).__name__}, {where}"
        assert is_free(model.lock), where
    assert stopped > count // 3


def is_free(lock: Any) -> bool:
    """Tell whether another thread can take a lock: the one that holds it always can."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def state_of(module: nn.Module) -> dict[str, Any]:
    """Describe all of a module that a question may not change, to be compared with what
    it is later.

    Weights are described by the tensor object, its memory, its dtype and its bytes.
    """
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs")):
                state[f"{path} {name}"] = list(value)
        for name in ("training", "forward", "_output_capturing_hooks_installed"):
            state[f"{path} {name}"] = vars(part).get(name)
        for name, child in part._modules.items():
            state[f"{path} child {name}"] = id(child)
        config = getattr(part, "config", None)
        if config is not None:
            state[f"{path} config"] = repr(sorted(vars(config).items(), key=str))
    for path, weight in hooks.parts_of(module).items():
        for name, tensor in (weight._parameters | weight._buffers).items():
            if tensor is not None:
                state[f"{path} weight {name}"] = _weight(tensor)
    return state


def _weight(tensor: Tensor) -> tuple[Any, ...]:
    values = tensor.detach()
    inner = [values]
    # A quantised weight is a tensor of its library's own, made of plain ones.
    if hasattr(values, "__tensor_flatten__"):
        inner = [getattr(values, name) for name in values.__tensor_flatten__()[0]]
    held = [part.cpu().flatten().view(torch.uint8).numpy().tobytes() for part in inner]
    return (
        id(tensor),
        inner[0].data_ptr(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.grad,
        hash(tuple(held)),
    )
