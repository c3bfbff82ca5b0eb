"""Observe one pass: its states, their rounding, and the calls of modules.

States are shown to a visitor as they are computed. If the visitor returns other rows,
these replace the state for the rest of the pass. In this way every part of a candidate
starts from the reference's state, and what differs after it is that part's doing.

Rounding is measured on the reference itself. A private float64 copy of each block, and
of each module outside the blocks, runs on the same input as the original. The distance
of the original's output from the copy's is the noise of that part.

A recorded call holds copies of a module's arguments and outputs, and the calls inside
it. It can be repeated on another module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, Queue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.errors import Noise, gap
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.errors import first_line, is_out_of_memory
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.module_copy import float64_copy
from hiddenscope.passes import Inputs, PaddedBatch
from hiddenscope.sites import Site

# What kernels without float64, and modules that cannot be copied, raise.
FLOAT64_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError)
Returned = TypeVar("Returned")


@dataclass
class ObservedState:
    """The rows of real tokens at one site, their float64 values, and their noise."""

    name: str
    rows: Tensor
    exact: Tensor | None = None
    noise: Noise | None = None


Visitor = Callable[[ObservedState], Tensor | None]
"""Receives a state as it is computed; a returned tensor replaces the state."""


@dataclass
class Observed:
    """The states of one batch by name, the logits under `logits`, and the raw output.

    `notes` name the blocks whose noise could not be measured.
    """

    states: dict[str, ObservedState] = field(default_factory=dict)
    output: Tensor | None = None
    notes: list[str] = field(default_factory=list)

    def rows(self, name: str) -> Tensor:
        """Return the rows at a site."""
        return self.states[name].rows

    def keep(self, state: ObservedState) -> None:
        """Keep a state and replace nothing."""
        self.states[state.name] = state


def observe(
    model: LiveModel,
    inputs: Inputs,
    sites: Sequence[Site],
    *,
    visit: Visitor | None = None,
    noise: bool = False,
) -> Observed:
    """Run a batch of texts once and show every state to `visit`.

    Without a visitor the states are kept. With `noise` every part also runs in float64,
    which counts as a second pass.
    """
    observed = Observed()
    batch = model.batch(inputs)
    observation = _Observation(
        model, batch, sites, visit or observed.keep, observed.notes, noise
    )
    with hooks.watching(observation.watches()):
        output = model.run(batch)
    returned = hooks.first_tensor(output)
    if returned is not None:
        observed.output = returned.detach().to("cpu", copy=True)
    logits = output
    if isinstance(output, Mapping):
        logits = output.get(LOGITS)
    elif not isinstance(output, Tensor):
        logits = getattr(output, LOGITS, None)
    if logits is None and model.anatomy.makes_logits and not model.is_port:
        logits = hooks.logits_in(output)
    tokens = batch.of_stack("decoder").ids.shape
    if isinstance(logits, Tensor) and logits.shape[:-1] == tokens:
        observation.show_logits(logits)
    return observed


def rows_of(
    model: LiveModel, texts: Iterable[Inputs], sites: Sequence[Site]
) -> dict[str, Tensor]:
    """Run batches of texts, and return the rows of all of them by site."""
    passes = [observe(model, inputs, sites) for inputs in texts]
    rows = {}
    for name in passes[0].states:
        rows[name] = torch.cat([observed.rows(name) for observed in passes])
    return rows


@dataclass
class _Observation:
    """Shows the states of one pass to a visitor and inserts replacements.

    `exact_rows` holds float64 rows by site until the site is shown. `outside_calls` are
    the outputs of modules outside the blocks since the last site, and those of their
    float64 copies: their noise belongs to the next site.
    """

    model: LiveModel
    batch: PaddedBatch
    sites: Sequence[Site]
    visit: Visitor
    notes: list[str]
    measures_noise: bool
    exact_rows: dict[str, Tensor] = field(default_factory=dict)
    outside_calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def watches(self) -> list[hooks.Watch]:
        """Return a watch for the tap of every site, and for parts run in float64."""
        watches: list[hooks.Watch] = []
        if self.measures_noise:
            blocks = set(self.model.blocks.values())
            watches += map(self._watch_block, blocks)
            # The embeddings, the norms around the blocks, and the head.
            for path, part in self.model.outer_parts.items():
                is_leaf = bool(part._parameters) and not part._modules
                if is_leaf and path not in blocks:
                    watches += self._watch_outside(part)
        for site in self.sites:
            on_state = partial(self._on_state, site)
            watches.append(self.model.taps[site].watch(self.model.module, on_state))
        return watches

    def _watch_block(self, path: str) -> hooks.Watch:
        """Run a float64 copy of a block, which makes one layer in each of its calls."""
        model = self.model
        block = self.model.part(path)
        made = model.layers_of(path)
        layers = iter(made)

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            layer = next(layers, None)
            if layer is None:
                return
            taps = {}
            for site in self.sites:
                tap = model.taps[site]
                is_inside = f"{tap.path}.".startswith(f"{path}.")
                is_layer = (site.layer, site.stack) == (layer.layer, layer.stack)
                if is_layer and is_inside and tap.side == "output":
                    inner_path = tap.path[len(path) :].lstrip(".")
                    # The copy is called once: calls count as in the first layer.
                    first = replace(site, layer=made[0].layer, stack=made[0].stack)
                    call = model.taps[first].call
                    taps[site] = replace(tap, path=inner_path, call=call)
            try:
                exact = float64_copy(block)
                watches = [
                    tap.watch(exact, partial(self._add_exact, site))
                    for site, tap in taps.items()
                ]
                with hooks.watching(watches):
                    run_exactly(exact, args, kwargs)
            except FLOAT64_ERRORS as error:
                if is_out_of_memory(error):
                    raise
                self.notes.append(
                    "The noise of a block is the tolerance of its dtype where float64"
                    f" fails: {first_line(error)}"
                )

        return hooks.Watch(block, "input", before)

    def _watch_outside(self, part: nn.Module) -> list[hooks.Watch]:
        """Run a float64 copy of a module outside the blocks."""
        exact = None

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            nonlocal exact
            exact = None
            with tolerating(FLOAT64_ERRORS):
                output = run_exactly(float64_copy(part), args, kwargs)
                exact = hooks.first_tensor(output)

        def after(output: object) -> None:
            returned = hooks.first_tensor(output)
            if exact is None or returned is None or exact.shape != returned.shape:
                return
            self.outside_calls.append((returned, exact))

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]

    def _states_and_mask(self, site: Site, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [text, token, width] in a tensor, and the token mask."""
        batch = self.batch.of_stack(site.stack)
        states = self.model.taps[site].layout.states(tensor, batch.ids.shape[1])
        return states, batch.mask.bool().to(states.device)

    def _add_exact(self, site: Site, tensor: Tensor) -> None:
        """Keep the float64 rows of a site until the site is shown."""
        states, mask = self._states_and_mask(site, tensor)
        self.exact_rows[str(site)] = states[mask].detach().to("cpu", copy=True)

    def _on_state(self, site: Site, tensor: Tensor) -> Tensor | None:
        states, mask = self._states_and_mask(site, tensor)
        for returned, exact in self.outside_calls:
            if returned is tensor:
                self._add_exact(site, exact)
        replacement = self._show(str(site), states[mask], in_block=bool(site.layer))
        if replacement is None:
            return None
        changed = states.clone()
        changed[mask] = replacement.to(changed)
        return self.model.taps[site].layout.with_states(tensor, changed)

    def show_logits(self, logits: Tensor) -> None:
        """Show the logits of real tokens."""
        mask = self.batch.of_stack("decoder").mask.bool()
        for returned, exact in self.outside_calls:
            if returned.shape == logits.shape and torch.equal(returned, logits):
                self.exact_rows[LOGITS] = exact[mask].cpu()
        self._show(LOGITS, logits[mask], in_block=False)

    def _show(self, name: str, rows: Tensor, *, in_block: bool) -> Tensor | None:
        """Show the rows of a site with their noise, and return their replacement."""
        exact = self.exact_rows.pop(name, None)
        # A float64 kernel may fail on a fully masked row where the model's does not.
        if exact is not None and not exact.isfinite().all():
            exact = None
        state = ObservedState(name, rows.detach().to("cpu", copy=True), exact)
        if self.measures_noise:
            masks = masks_of(self.batch)
            gaps = [
                gap(real_rows(wide, masks), real_rows(returned, masks))
                for returned, wide in self.outside_calls
            ]
            if exact is not None:
                gaps.append(gap(exact, state.rows))
            state.noise = Noise.measured(gaps, rows.dtype)
            if exact is None and (in_block or not gaps):
                state.noise = Noise.assumed(rows.dtype)
        self.outside_calls = []
        return self.visit(state)


def masks_of(batch: PaddedBatch) -> list[Tensor]:
    """Return the real-token mask of each stack of a batch."""
    stacks = [batch, batch.targets] if batch.targets is not None else [batch]
    return [stack.mask.bool() for stack in stacks]


def real_rows(tensor: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Flatten a tensor to rows [row, width], without padding where its shape allows."""
    for mask in masks:
        texts, tokens = mask.shape
        places = mask.to(tensor.device)
        count = int(places.sum())
        if tensor.ndim >= 2 and tensor.shape[:2] == mask.shape:
            return tensor[places].reshape(count, -1)
        # Routers and experts flatten texts and tokens into one axis.
        if tensor.ndim >= 2 and tensor.shape[0] == mask.numel():
            return tensor[places.flatten()].reshape(count, -1)
        # Attention heads stand before the tokens: [text, head, token, width].
        middle = list(tensor.shape[1:-1])
        if tensor.ndim >= 3 and tensor.shape[0] == texts and tokens in middle:
            by_token = tensor.movedim(1 + middle.index(tokens), 1)
            return by_token[places].reshape(count, -1)
    rows = tensor.shape[0] if tensor.ndim > 1 else 1
    return tensor.reshape(rows, -1)


class StateQueue:
    """Passes states from one pass to another, so that two layers' are in memory.

    The reference runs in a thread of its own and hands over one state at a time. The
    candidate takes each state when it has computed its own, and both continue.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._queue: Queue[ObservedState | None] = Queue(maxsize=1)
        # None is the end.
        self._states = iter(self._queue.get, None)
        self._is_closed = False

    def give(self, state: ObservedState | None) -> None:
        """Hand over a state once the last was taken; drop it if the queue is closed."""
        if state is not None:
            self.names.append(state.name)
        if not self._is_closed:
            self._queue.put(state)

    def take(self, name: str) -> ObservedState | None:
        """Return the state of this name and drop those before it.

        The result is None if the reference has ended without it.
        """
        for state in self._states:
            if state.name == name:
                return state
        return None

    def run_in_step(
        self, reference: Callable[[], object], candidate: Callable[[], Returned]
    ) -> Returned:
        """Run the reference in a thread and the candidate here.

        An error of either is raised here.
        """

        def run_reference() -> None:
            try:
                reference()
            finally:
                self.give(None)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run_reference)
            try:
                returned = candidate()
            finally:
                self._is_closed = True
                # The reference may be waiting for room.
                with suppress(Empty):
                    self._queue.get_nowait()
            running.result()
        return returned


@dataclass(eq=False)
class ModuleCall:
    """One call of a module, with copies of its arguments and returned tensors."""

    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    inner: list[ModuleCall] = field(default_factory=list)

    @property
    def state(self) -> Tensor | None:
        """Return the hidden state among its arguments."""
        return hooks.state_in(self.args, self.kwargs)

    def with_state(self, state: Tensor) -> ModuleCall:
        """Return the same call with another hidden state."""
        args, kwargs = hooks.with_state_in(self.args, self.kwargs, state)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def output(self) -> Tensor | None:
        """Return the first floating-point tensor that it returned."""
        return hooks.first_tensor(self.outputs)

    def walk(self) -> Iterator[ModuleCall]:
        """Yield this call and all calls inside it, in the order in which they began."""
        yield self
        for call in self.inner:
            yield from call.walk()

    def leaves(self) -> list[ModuleCall]:
        """Return the calls that made no further calls."""
        return [call for call in self.walk() if not call.inner]

    def repeat(self, module: nn.Module, device: torch.device) -> object:
        """Call another module with the same arguments, moved to its device."""

        # Always a copy: some modules write into their arguments.
        def move(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, copy=True)

        args, kwargs = map_tensors((self.args, self.kwargs), move)
        with autograd.restored(), torch.no_grad():
            return module(*args, **kwargs)


def record_calls(
    parts: Mapping[str, nn.Module],
    run: Callable[[], object],
    *,
    opaque: Collection[str] = (),
) -> list[ModuleCall]:
    """Run a function and return the outermost calls of some modules.

    Each holds the calls made inside it. Of `opaque` modules neither arguments nor
    outputs are recorded.
    """
    outermost: list[ModuleCall] = []
    running: list[ModuleCall] = []

    def enter(path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = ModuleCall(path)
        # One state that is given as queries, keys and values stays one.
        copies: dict[int, Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), clone(tensor))

        if path not in opaque:
            call.args, call.kwargs = map_tensors((args, dict(kwargs)), copy)
        siblings = running[-1].inner if running else outermost
        siblings.append(call)
        running.append(call)

    def leave(output: object) -> None:
        call = running.pop()
        if call.path not in opaque:
            call.outputs = [clone(tensor) for tensor in tensors_in(output)]

    watches = []
    for path, part in parts.items():
        watches.append(hooks.Watch(part, "input", partial(enter, path)))
        watches.append(hooks.Watch(part, "output", leave))
    with autograd.restored(), torch.no_grad(), hooks.watching(watches):
        run()
    return outermost


def parts_inside(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return a module at a path and all modules inside it, by their full paths."""
    return {f"{path}.{name}".strip("."): part for name, part in module.named_modules()}


def run_exactly(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> object:
    """Run a float64 module on copies of arguments of any dtype."""
    args, kwargs = map_tensors((args, dict(kwargs)), to_float64)
    with autograd.restored(), torch.no_grad():
        return module(*args, **kwargs)


@contextmanager
def tolerating(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Leave a block on some errors, unless they say that memory ran out.

    torch raises a RuntimeError for it too, which would pass for a module that does not
    take its arguments, or that cannot run in float64.
    """
    try:
        yield
    except errors as error:
        if is_out_of_memory(error):
            raise


def clone(tensor: Tensor) -> Tensor:
    """Copy a tensor without its autograd history."""
    return tensor.detach().clone()


def to_float64(tensor: Tensor) -> Tensor:
    """Copy a tensor, widened to float64 if it is a floating-point tensor."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype, copy=True)


def tensors_in(value: object) -> list[Tensor]:
    """List every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    tensors = []
    if isinstance(value, tuple | list):
        for part in value:
            tensors += tensors_in(part)
    return tensors


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor in nested arguments; other objects stay as they are."""

    def change_leaf(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return hooks.map_leaves(value, change_leaf)
