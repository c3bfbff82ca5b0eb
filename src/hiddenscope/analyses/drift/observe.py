"""Observe one pass: its states, replacements for them, and the rounding of every part.

States are shown to a visitor as they are computed. If the visitor returns other rows,
these replace the state for the rest of the pass. In this way every part of a candidate
starts from the reference's state, and what differs after it is that part's doing.

Rounding is measured on the reference itself. A private float64 copy of each block, and
of each module outside the blocks, runs on the same input as the original. The distance
of the original's output from the copy's is the noise of that part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import (
    raise_if_out_of_memory,
    run_exactly,
    run_in_float64,
)
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.analyses.drift.noise import Noise, gap
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import float64_copy
from hiddenscope.passes import Inputs, PaddedBatch
from hiddenscope.sites import Site

# What kernels without float64, and modules that cannot be copied, raise.
FLOAT64_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError)


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
    watches = observation.watches()
    if noise:
        watches = [*_ExactParts(observation).watches(), *watches]
    model.passes += 2 if noise else 1
    with hooks.watching(watches):
        output = model.run(batch)
    returned = hooks.first_tensor(output)
    if returned is not None:
        observed.output = returned.detach().to("cpu", copy=True)
    logits = _logits(output)
    if logits is None and model.anatomy.makes_logits and not model.is_port:
        logits = hooks.logits_in(output)
    if logits is not None and logits.shape[:-1] == batch.of_stack("decoder").ids.shape:
        observation.show_logits(logits)
    return observed


def _logits(output: object) -> Tensor | None:
    logits = output
    if isinstance(output, Mapping):
        logits = output.get(LOGITS)
    elif not isinstance(output, Tensor):
        logits = getattr(output, LOGITS, None)
    return logits if isinstance(logits, Tensor) else None


class _OutsideCall(NamedTuple):
    """The outputs of a module outside the blocks and of its float64 copy."""

    returned: Tensor
    exact: Tensor


@dataclass
class _Observation:
    """Shows the states of one pass to a visitor and inserts replacements.

    `exact_rows` holds float64 rows by site until the site is shown. `outside_calls` are
    the calls outside the blocks since the last site: their noise belongs to the next.
    """

    model: LiveModel
    batch: PaddedBatch
    sites: Sequence[Site]
    visit: Visitor
    notes: list[str]
    measures_noise: bool
    exact_rows: dict[str, Tensor] = field(default_factory=dict)
    outside_calls: list[_OutsideCall] = field(default_factory=list)

    def watches(self) -> list[hooks.Watch]:
        """Return a watch for the tap of every site."""
        watches = []
        for site in self.sites:
            tap = self.model.taps[site]
            watches.append(tap.watch(self.model.module, partial(self._on_state, site)))
        return watches

    def states_and_mask(self, site: Site, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [text, token, width] in a tensor, and the token mask."""
        batch = self.batch.of_stack(site.stack)
        states = self.model.taps[site].layout.states(tensor, batch.ids.shape[1])
        return states, batch.mask.bool().to(states.device)

    def add_exact(self, site: Site, tensor: Tensor) -> None:
        """Keep the float64 rows of a site until the site is shown."""
        states, mask = self.states_and_mask(site, tensor)
        self.exact_rows[str(site)] = states[mask].detach().to("cpu", copy=True)

    def _on_state(self, site: Site, tensor: Tensor) -> Tensor | None:
        states, mask = self.states_and_mask(site, tensor)
        for call in self.outside_calls:
            if call.returned is tensor:
                self.add_exact(site, call.exact)
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
        if exact is not None and not bool(exact.isfinite().all()):
            exact = None
        state = ObservedState(name, rows.detach().to("cpu", copy=True), exact)
        if self.measures_noise:
            state.noise = self._noise(state, in_block)
        self.outside_calls = []
        return self.visit(state)

    def _noise(self, state: ObservedState, in_block: bool) -> Noise:
        masks = masks_of(self.batch)
        gaps = []
        for returned, exact in self.outside_calls:
            gaps.append(gap(real_rows(exact, masks), real_rows(returned, masks)))
        if state.exact is not None:
            gaps.append(gap(state.exact, state.rows))
        elif in_block or not gaps:
            return Noise.assumed(state.rows.dtype)
        return Noise.measured(gaps, state.rows.dtype)


class _ExactParts:
    """Runs float64 copies of each block and of each module outside the blocks."""

    def __init__(self, observation: _Observation) -> None:
        self.observation = observation
        self.model = observation.model

    def watches(self) -> list[hooks.Watch]:
        """Return watches for the blocks, the embeddings, outer norms and the head."""
        layers_of: dict[str, list[Site]] = defaultdict(list)
        for site, path in self.model.blocks.items():
            layers_of[path].append(site)
        watches = [self._on_block(path, layers) for path, layers in layers_of.items()]
        inside_blocks = tuple(f"{path}." for path in layers_of)
        for path, part in hooks.parts_of(self.model.module).items():
            is_leaf = bool(part._parameters) and not part._modules
            if is_leaf and not f"{path}.".startswith(inside_blocks):
                watches += self._on_outside_module(part)
        return watches

    def _on_block(self, path: str, layers: Sequence[Site]) -> hooks.Watch:
        """Watch a block that makes these layers, one in each of its calls."""
        block = self.model.part(path)
        remaining = list(layers)

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not remaining:
                return
            layer = remaining.pop(0)
            try:
                exact = float64_copy(block)
                with hooks.watching(self._watches_inside(exact, path, layer)):
                    run_exactly(exact, args, kwargs)
            except FLOAT64_ERRORS as error:
                raise_if_out_of_memory(error)
                reason = str(error).partition("\n")[0]
                self.observation.notes.append(
                    "The noise of a block is the tolerance of its dtype where float64"
                    f" fails: {reason}"
                )

        return hooks.Watch(block, "input", before)

    def _watches_inside(
        self, exact: nn.Module, path: str, layer: Site
    ) -> list[hooks.Watch]:
        """Return watches for the states that the copy of a layer's block computes."""
        watches = []
        for site in self.observation.sites:
            tap = self.model.taps[site]
            is_inside = tap.path == path or tap.path.startswith(f"{path}.")
            is_layer = (site.layer, site.stack) == (layer.layer, layer.stack)
            if is_layer and is_inside and tap.side == "output":
                part = exact.get_submodule(tap.path[len(path) :].lstrip("."))
                watches.append(
                    hooks.Watch(part, "output", partial(self._on_exact_output, site))
                )
        return watches

    def _on_exact_output(self, site: Site, output: object) -> None:
        tensor = hooks.first_tensor(output)
        if tensor is not None:
            self.observation.add_exact(site, tensor)

    def _on_outside_module(self, part: nn.Module) -> list[hooks.Watch]:
        exact: Tensor | None = None

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            nonlocal exact
            try:
                exact = hooks.first_tensor(run_in_float64(part, args, kwargs))
            except FLOAT64_ERRORS as error:
                raise_if_out_of_memory(error)
                exact = None

        def after(output: object) -> None:
            returned = hooks.first_tensor(output)
            if exact is None or returned is None or exact.shape != returned.shape:
                return
            self.observation.outside_calls.append(_OutsideCall(returned, exact))

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]


def masks_of(batch: PaddedBatch) -> list[Tensor]:
    """Return the real-token mask of each stack of a batch."""
    masks = [batch.mask.bool()]
    if batch.targets is not None:
        masks.append(batch.targets.mask.bool())
    return masks


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
