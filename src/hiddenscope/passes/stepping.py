"""Stepping: call the blocks of a stack one at a time, on rows of one's own.

The model runs once over a text, and the arguments of every block are kept: its masks,
positions and rotary tables, as the model's own code made them. A block is then called
by itself on as many rows [row, token, width] as are wanted, while states inside it are
read or changed. Which arguments hold something for each row, a pass over two copies of
the text shows. Nothing is assumed of it: whoever steps through all blocks compares
what comes out with a whole pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hiddenscope.discovery import accepts
from hiddenscope.errors import Error, PassError, is_out_of_memory
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes.inputs import BATCH_TOKENS, Inputs, PassModel
from hiddenscope.passes.record import Calls, require_recordable, watch_tap
from hiddenscope.sites import Site

Change: TypeAlias = Callable[[Tensor], Tensor]
"""Returns what takes the place of the states [row, token, width] of a site."""


class Stepper:
    """The blocks of a model's only stack, with the arguments of one text's pass."""

    @autograd.without_grad
    def __init__(self, model: PassModel, inputs: Inputs) -> None:
        self.model = model
        self.tokens = inputs.lengths[0]
        self._arguments: dict[int, tuple[hooks.Args, dict[str, Any]]] = {}
        # By layer, the axis of the rows of each leaf of the arguments, None without.
        self._axes: dict[int, list[int | None]] = {}
        module = require_recordable(model.module)
        self._blocks = []
        watches = []
        for layer, tap in enumerate(model.anatomy.stacks[-1].proof.taps[1:], 1):
            if tap.call:
                raise PassError(
                    f"Cannot call the blocks of {model.anatomy.name} one by one",
                    f"{tap.path} is called more than once",
                    "Use hs.patch.",
                )
            block = module.get_submodule(tap.path)
            self._blocks.append(block)
            watches.append(hooks.Watch(block, "input", partial(self._keep, layer)))
        for copies in (2, 1):
            batch = inputs.some([0] * copies).pad(model)
            arguments = batch.arguments(module, masked=False)
            if "use_cache" in accepts(module):
                arguments["use_cache"] = False
            with model.lock, hooks.watching(watches):
                hooks.call_module(module, arguments)

    @property
    def rows_at_a_time(self) -> int:
        """Return how many rows are as many tokens as a batch has."""
        limit = BATCH_TOKENS.get(self.model.device.type, BATCH_TOKENS["cpu"])
        return max(1, limit // self.tokens)

    @autograd.without_grad
    def call(
        self,
        layer: int,
        rows: Tensor,
        read: Sequence[Site] = (),
        change: Mapping[Site, Change] | None = None,
        *,
        whole: bool = False,
    ) -> dict[Site, Tensor]:
        """Call the block below a layer on rows, and return the states that are read.

        They are [row, token, width], after the changes. The call ends when all are
        read, unless the `whole` block is wanted: what it gives is the state at its
        layer.
        """
        changes = change or {}
        waiting = {*read, *changes}
        states: dict[Site, Tensor] = {}

        def look(site: Site, layout: Any, tensor: Tensor) -> Tensor | None:
            seen = layout.states(tensor, self.tokens)
            new = changes[site](seen) if site in changes else None
            # The code of a block may change its tensor in place later.
            states[site] = seen.clone() if new is None else new
            waiting.discard(site)
            if not waiting and not whole:
                raise hooks.Stopped
            return None if new is None else layout.with_states(tensor, new)

        calls: Calls = {}
        module = self.model.module
        watches = []
        for site in sorted(waiting):
            tap = self.model.anatomy.tap(site)
            show = partial(look, site, tap.layout)
            watches.append(watch_tap(module, tap, site.stack, calls, show))
        axes = iter(self._axes[layer])
        args, kwargs = hooks.map_leaves(
            self._arguments[layer],
            lambda leaf: _repeated(leaf, next(axes, None), len(rows)),
        )
        args, kwargs = hooks.with_state_in(args, kwargs, rows)
        with self.model.lock, hooks.watching(watches), suppress(hooks.Stopped):
            try:
                output = hooks.first_tensor(self._blocks[layer - 1](*args, **kwargs))
            except Exception as error:
                # The model's own code may raise anything.
                if isinstance(error, Error) or is_out_of_memory(error):
                    raise
                raise PassError(
                    f"Cannot call the blocks of {self.model.anatomy.name} one by one",
                    f"block {layer} stopped with {type(error).__name__}: {error}",
                    "Use hs.patch.",
                ) from error
            assert output is not None, "every block gives a state"
            states[Site(layer)] = output
        if waiting:
            raise PassError(
                f"No state at {min(waiting)} of {self.model.anatomy.name}",
                "its block, called by itself, did not show it",
                "Use hs.patch.",
            )
        return states

    def _keep(self, layer: int, args: hooks.Args, kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a block; those of two copies of the text come first."""
        arguments = hooks.map_leaves((args, kwargs), _without_cache)
        both, one = _leaves(self._arguments.get(layer)), _leaves(arguments)
        self._axes[layer] = list(map(_axis_of_rows, both, one))
        self._arguments[layer] = arguments


def _without_cache(leaf: Any) -> Any:
    """Leave out a cache of transformers: a block would find earlier calls in it."""
    return None if hasattr(leaf, "get_seq_length") else leaf


def _leaves(arguments: Any) -> list[Any]:
    leaves: list[Any] = []
    hooks.map_leaves(arguments, leaves.append)
    return leaves


def _axis_of_rows(two: Any, one: Any) -> int | None:
    """Return the axis of a tensor that is twice as long for two rows as for one."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        for axis, (longer, length) in enumerate(zip(two.shape, one.shape, strict=True)):
            if longer == 2 * length > 0:
                return axis
    return None


def _repeated(leaf: Any, axis: int | None, rows: int) -> Any:
    """Repeat what a leaf of the arguments holds for one row."""
    return leaf if axis is None else torch.cat([leaf] * rows, axis)
