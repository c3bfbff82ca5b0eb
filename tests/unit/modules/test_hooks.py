"""Hooks leave nothing behind, whatever interrupts them, and never touch the passes of
another thread.

The long series of interrupts are slow.
"""

import random
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, overrides

import hiddenscope as hs
from hiddenscope.catalog import ANALYSIS, PUBLIC
from hiddenscope.loading import open_source
from hiddenscope.model.model import _first_pass as first_pass
from hiddenscope.modules import hooks, installation, operations
from hiddenscope.testing import tiny_model
from hiddenscope.testing.untouched import (
    AtCall,
    assert_interrupts_leave_nothing,
    assert_never_changed,
    assert_others_get_their_numbers,
    is_free,
    modes,
    tracing,
)
from labs.fuzz.interrupts import AtLine, AtPoint
from labs.fuzz.questions import QUESTIONS, asked_model
from tests.registry import IDS
from tests.slices import THOROUGH, sliced

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

Ask = Callable[[], Any]
Hanging = Callable[[nn.Module], dict[str, Any]]
# At how many calls of a question another thread calls the module, and it is
# interrupted.
CALLS, INTERRUPTS = (30, 12) if THOROUGH else (15, 6)
# tests/slow/faults/test_drift_hygiene.py asks drift in every way.
MOST = sorted(set(QUESTIONS) - {"drift"})


def some_fast(fast: list[Any], every: Collection[Any]) -> list[Any]:
    """Return all cases as parameters, of which all but some are slow."""
    others = [case for case in every if case not in fast]
    slow = [pytest.param(case, marks=pytest.mark.slow) for case in others]
    return [*fast, *slow]


def test_every_analysis_and_every_verb_is_asked() -> None:
    # Which run no model.
    silent = {"each_token", "open", "read", "story"}
    verbs = {name for name in PUBLIC if name.islower()} - silent
    assert set(ANALYSIS) | verbs <= set(QUESTIONS)


@pytest.mark.parametrize(
    "name", some_fast(["capture", "edit"], [*sliced(MOST, 8), "load"])
)
def test_a_question_leaves_the_module_alone(name: str) -> None:
    """At every instant, for another thread, and after an interrupt where any function
    begins.
    """
    model = asked_model()

    def ask() -> None:
        QUESTIONS[name](model)

    ask()  # what is tried once is tried now
    assert_never_changed(ask, [model.module])
    assert_others_get_their_numbers(ask, [model.module], calls=CALLS)
    assert_interrupts_leave_nothing(ask, [model.module], model, count=INTERRUPTS)


def test_an_interrupt_as_no_grad_ends_in_a_recording_leaves_gradients_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch asks the check of attention before it turns gradients on again."""
    monkeypatch.setattr(operations, "lost_inputs", lambda device, dtype: (0, 1))
    model = asked_model()

    def ask() -> None:
        QUESTIONS["recording"](model)

    ask()  # what is tried once is tried now
    place = (operations.__file__, "__torch_function__")
    counting = AtCall()
    with tracing(counting):
        ask()
    before, last = modes(), counting.calls[place]
    with pytest.raises(KeyboardInterrupt), tracing(AtCall(place, last)):
        ask()
    installation.remove_leftovers()  # as the next pass does first
    assert modes() == before


def interrupted(ask: Ask, at: int) -> bool:
    """Ask, and be interrupted at a line; tell whether that was before the answer."""
    interrupt = AtLine(at)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        ask()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return interrupt.left <= 0


@pytest.mark.parametrize(
    "name",
    some_fast(["capture", "edit"], ["resume", "patch", "capture inside"]),
)
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    name: str, hanging: Hanging
) -> None:
    model, ask = asked_model(), QUESTIONS[name]
    ask(model)  # what is tried once is tried now
    before, expected = hanging(model.module), model.capture(IDS).values
    chance, stopped = random.Random(7), 0
    for at in [*range(1, 60), *(chance.randrange(60, 2000) for _ in range(60))]:
        stopped += interrupted(lambda: ask(model), at)
        installation.remove_leftovers()  # as the next pass does first
        where = f"interrupted at line {at} of those that were run"
        assert hanging(model.module) == before, where
        assert is_free(model.lock), where
    assert stopped > 50
    assert torch.equal(model.capture(IDS).values, expected)


def points_of(ask: Ask) -> int:
    """Count the points of a question at which it can be interrupted."""
    with AtPoint(10**9) as interrupt:
        ask()
    return 10**9 - interrupt.left


def interrupted_twice(ask: Ask, at: int, again: int) -> bool:
    """Ask, and be interrupted at a point, and again while that unwinds; tell whether it
    was before the answer.
    """
    interrupt = AtPoint(at, again)
    try:
        with interrupt:
            ask()
    except KeyboardInterrupt:
        return True
    return interrupt.left <= 0


# "load" includes what transformers puts on a module when it is asked for hidden states,
# and "extract" a thread that writes.
TWICE = ["edit", "patch", "lens", "load", "extract"]


@pytest.mark.parametrize("name", some_fast(["capture", "edit inside"], TWICE))
def test_two_interrupts_leave_torch_as_it_was(name: str, hanging: Hanging) -> None:
    """The second comes at one of the first few functions that begin then."""
    model, ask = asked_model(), QUESTIONS[name]
    ask(model)  # what is tried once is tried now
    with torch.set_grad_enabled(not name.startswith("edit")):
        before, hooked = modes(), hanging(model.module)
        points, stopped = points_of(lambda: ask(model)), 0
        for at in range(1, points + 1, max(1, points // 25)):
            stopped += interrupted_twice(lambda: ask(model), at, again=at % 4)
            where = f"interrupted at point {at} and {at % 4} later"
            # torch itself puts a mode back when the traceback is freed, if it is
            # interrupted twice while the mode handles a call. Such a mode is over.
            left = overrides._get_current_function_mode_stack()
            assert all(mode.is_over for mode in left), where
            installation.remove_leftovers()  # as the next pass does first
            assert modes() == before, where
            assert hanging(model.module) == hooked, where
        assert stopped > 12


def test_an_interrupt_of_the_first_pass_of_a_folder_limits_nothing_later(
    tmp_path: Path,
) -> None:
    """The limit on the tensors of that pass is over when the pass is."""
    tiny_model("gpt2").save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = open_source(tmp_path)
    before = modes()
    points = points_of(lambda: first_pass(loaded))
    for at in sliced(range(1, points + 1), 24):
        interrupted_twice(lambda: first_pass(loaded), at, again=at % 3)
        installation.remove_leftovers()
        assert modes() == before, f"interrupted at point {at} and {at % 3} later"


def test_what_an_interrupt_leaves_is_gone_before_the_next_pass(
    hanging: Hanging,
) -> None:
    model = hs.load((tiny_model("gpt2"), None))
    before = hanging(model.module)
    left = hooks.watching([hooks.Watch(model.module, "output", lambda output: None)])
    left.__enter__()
    assert hanging(model.module) != before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation.Installation, "__exit__", lambda self, *error: None)
        del left  # its own removal is interrupted at once
    assert hanging(model.module) != before
    model.capture(IDS)
    assert hanging(model.module) == before


def test_a_generator_that_edits_may_be_closed_by_another_thread() -> None:
    model = hs.load((tiny_model("llama"), None))

    def edited() -> Any:
        with hs.editing(model, {"layer.1": hs.Scale(0.0)}):
            yield

    begun = edited()
    next(begun)
    assert not is_free(model.lock)
    thread = threading.Thread(target=begun.close)
    thread.start()
    thread.join()
    assert is_free(model.lock)
