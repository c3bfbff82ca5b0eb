"""Streaming: two passes in step, so that no more than two layers' states are held at any time.

The reference runs in a thread of its own and hands over one state after another; the candidate takes each where it has
its own, compares the two, and both go on. The candidate is run twice, once as it is and once on the reference's states,
and the reference twice beside it. What is inherited is not told apart then: that takes both passes at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.drift.measured import (
    Errors,
    add_consequences,
    cells,
    empty,
    main_site,
    not_finite,
    ordered,
    passes_of,
    places_of,
    stack_of,
    unchanged,
)
from hiddenscope.analyses.drift.observe import LOGITS, Gap, Live, Noise, Observed, gap, observe
from hiddenscope.analyses.drift.sides import alike, not_wider
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

WAIT = 0.05  # seconds between looks at whether the other side is still there


class QueuedState(NamedTuple):
    """A state on its way from the reference to the candidate."""

    name: str
    rows: Tensor
    noise: Noise | None


class StateQueue:
    """A queue that passes states from one thread to another, one at a time."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.failure: BaseException | None = None
        self._queue: Queue[QueuedState] = Queue(maxsize=1)
        self._ended, self._closed = Event(), Event()

    def give(self, name: str, rows: Tensor, noise: Noise | None) -> None:
        """Hand over a state, once the one before was taken; nothing once the other side has gone."""
        self.given.append(name)
        while not self._closed.is_set():
            try:
                self._queue.put(QueuedState(name, rows, noise), timeout=WAIT)
                return
            except Full:
                continue

    def take(self, name: str) -> QueuedState | None:
        """The state of this name; those before it are let go. None if the reference has ended without it."""
        while not (self._ended.is_set() and self._queue.empty()):
            try:
                state = self._queue.get(timeout=WAIT)
            except Empty:
                continue
            if state.name == name:
                return state
        return None

    def beside(self, run: Callable[[], object], own: Callable[[], Observed]) -> Observed:
        """Run the reference in a thread and the candidate here; an error of either is raised here."""

        def other() -> None:
            try:
                run()
            except BaseException as error:
                self.failure = error
            finally:
                self._ended.set()

        thread = Thread(target=other, daemon=True)
        thread.start()
        try:
            seen = own()
        finally:
            self._closed.set()
            thread.join()
        if self.failure is not None:
            raise self.failure
        return seen


def of_live_streamed(reference: Live, model: Model, candidate: Live, inputs: Inputs) -> Errors:
    """Two live models, compared as `of_live` does, with two layers' states in memory."""
    errors = empty(inputs, reference)
    if candidate.module is reference.module:  # two threads must not run one module while its weights are exchanged
        candidate = replace(candidate, module=copy.deepcopy(candidate.module))
    rounded = not_wider(candidate, reference)
    working = alike(reference, rounded)
    names = ("dtype", candidate.dtype != reference.dtype), ("kernel", working.kernel != reference.kernel)
    errors.sources = ["float64", *(name for name, differs in names if differs)]
    sites = [site for site in reference.sites() if site in candidate.taps]
    batches = list(inputs.batches(model))
    with progress.track("Comparing", total=len(batches)) as advance:
        for texts, batch in reversed(batches):
            places = places_of(inputs, texts, errors.tokens)
            shown = not_finite(inputs, texts, model)
            whole = _whole(errors, (reference, candidate), batch, sites, places, shown)
            _equal(errors, (working, rounded), batch, sites, places)
            if errors.observing_changed_nothing is None:
                errors.observing_changed_nothing = unchanged(candidate, batch, whole)
            advance(1)
    errors.passes = passes_of((reference, working), (candidate, rounded), len(batches))
    ordered(errors, sites)
    return errors


def _whole(
    errors: Errors,
    sides: tuple[Live, Live],
    batch: Inputs,
    sites: Sequence[Site],
    places: Mapping[str | None, Sequence[int]],
    check: Callable[[str, str, Tensor], None],
) -> Observed:
    """Both as they are: what differs in whole passes."""
    queue = StateQueue()
    layers = [site for site in sites if not site.part]

    def compare(name: str, rows: Tensor, _: Noise | None) -> None:
        state = queue.take(name)
        if state is None or state.rows.shape != rows.shape:
            return
        check("reference", name, state.rows)
        check("candidate", name, rows)
        for measure, values in cells(state.rows, rows).items():
            errors.put(name, measure, places[stack_of(name, errors.tokens)], values)
        if name == LOGITS:
            add_consequences(errors, state.rows, rows)

    return queue.beside(
        lambda: observe(sides[0], batch, layers, sink=queue.give),
        lambda: observe(sides[1], batch, layers, sink=compare),
    )


def _equal(
    errors: Errors,
    sides: tuple[Live, Live],
    batch: Inputs,
    sites: Sequence[Site],
    places: Mapping[str | None, Sequence[int]],
) -> None:
    """The candidate on the reference's states: what each part does by itself."""
    queue = StateQueue()
    taken: set[str] = set()

    def compare(name: str, rows: Tensor, _: Noise | None) -> Tensor | None:
        state = queue.take(name)
        if state is None or state.noise is None or state.rows.shape != rows.shape:
            return None
        taken.add(name)
        local = gap(state.rows, rows)
        errors.judge(main_site(name), local, state.noise, batch)
        if name != main_site(name):
            return None
        errors.put(name, "local", places[stack_of(name, errors.tokens)], local.rows)
        return state.rows

    queue.beside(
        lambda: observe(sides[0], batch, sites, noise=True, sink=queue.give),
        lambda: observe(sides[1], batch, sites, sink=compare),
    )
    _judge_missing(errors, queue.given, taken, sides[1], batch)


def _judge_missing(errors: Errors, given: Sequence[str], taken: Collection[str], side: Live, batch: Inputs) -> None:
    """A layer that the candidate never reaches is infinitely far off, unless it is only seen as it enters a block."""
    entries = {str(site) for site, tap in side.taps.items() if tap.side == "input"}
    for name in given:
        if name == main_site(name) and name not in taken and name not in entries and name != LOGITS:
            far = Gap(torch.full((1,), torch.inf), torch.inf)
            errors.judge(name, far, Noise.assumed(side.dtype), batch)
