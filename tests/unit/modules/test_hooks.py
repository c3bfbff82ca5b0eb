"""Hooks leave nothing behind, whatever interrupts them, and never touch the passes of
another thread.
"""

import random
import sys
import threading
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import overrides

import hiddenscope as hs
from fuzz.interrupts import FUNCTIONS, AtLine, AtPoint
from fuzz.questions import QUESTIONS, asked_model
from hiddenscope.catalog import ANALYSIS, PUBLIC
from hiddenscope.loading import open_source
from hiddenscope.model.model import _first_pass as first_pass
from hiddenscope.modules import hooks, installation, kernels
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.registry import IDS
from tests.slices import THOROUGH, sliced
from tests.untouched import (
    AtCall,
    assert_interrupts_leave_nothing,
    assert_never_changed,
    assert_others_get_their_numbers,
    modes,
    tracing,
)

ENDINGS = {"__exit__", "restoring", "_remove"}  # where a `with` begins to end

# At how many calls of a question another thread calls the module, and it is
# interrupted.
CALLS, INTERRUPTS = (30, 12) if THOROUGH else (15, 6)
FEW = ("capture", "edit", "resume", "patch", "lens")
# Tests/test_drift_hygiene.py asks that in every way.
MOST = sorted(set(QUESTIONS) - {"drift"})


def test_every_analysis_and_every_verb_is_asked() -> None:
    # Which run no model.
    verbs = {name for name in PUBLIC if name.islower()} - {
        "each_token",
        "open",
        "read",
        "story",
    }
    assert set(ANALYSIS) | verbs <= set(QUESTIONS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", sliced(MOST, 8))
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


def test_an_interrupt_as_no_grad_ends_in_a_recording_leaves_gradients_on() -> None:
    """torch asks the check of attention before it turns gradients on again."""
    model = asked_model()

    def ask() -> None:
        QUESTIONS["recording"](model)

    ask()  # what is tried once is tried now
    place = (kernels.__file__, "__torch_function__")
    counting = AtCall()
    with tracing(counting):
        ask()
    if place not in counting.calls:
        pytest.skip("attention on this device loses no NaN, so it is not checked")
    before = modes()
    with (
        pytest.raises(KeyboardInterrupt),
        tracing(AtCall(place, counting.calls[place])),
    ):
        ask()
    installation.remove_leftovers()  # as the next pass does first
    assert modes() == before


def interrupted(ask: Callable[[], Any], at: int) -> bool:
    """Ask, and be interrupted; whether that happened before the question was answered."""
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "name", ["capture", "edit", "resume", "patch", "capture inside"]
)
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    name: str, hanging: Callable[..., dict[str, Any]]
) -> None:
    model = hs.load((tiny_model("llama"), None))
    ask = QUESTIONS[name]
    ask(model)  # what is tried once is tried now
    before, expected = hanging(model.module), model.capture(IDS).values
    chance, stopped = random.Random(7), 0
    for at in [*range(1, 60), *(chance.randrange(60, 2000) for _ in range(60))]:
        stopped += interrupted(lambda: ask(model), at)
        installation.remove_leftovers()  # as the next pass does first
        assert hanging(model.module) == before, (
            f"interrupted at line {at} of those that were run"
        )
        assert model.lock.acquire(blocking=False)
        model.lock.release()
    assert stopped > 50
    assert torch.equal(model.capture(IDS).values, expected)


def points_of(ask: Callable[[], Any], functions: Collection[str] = FUNCTIONS) -> int:
    """How many points a question has at which it can be interrupted."""
    with AtPoint(10**9, functions=functions) as interrupt:
        ask()
    return 10**9 - interrupt.left


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "grad"),
    [
        ("capture", True),
        ("edit", False),
        ("patch", True),
        ("lens", True),
        ("edit inside", False),
    ],
)
def test_two_interrupts_leave_torch_as_it_was(
    name: str, grad: bool, hanging: Callable[..., dict[str, Any]]
) -> None:
    """The second comes while the first unwinds, at one of the first few functions that
    begin then.
    """
    model = hs.load((tiny_model("llama"), None))
    ask = QUESTIONS[name]
    ask(model)  # what is tried once is tried now
    with torch.set_grad_enabled(grad):
        before, hooked = modes(), hanging(model.module)
        points, stopped = points_of(lambda: ask(model)), 0
        step = max(1, points // 25)
        for at in range(1, points + 1, step):
            stopped += interrupted_twice(lambda: ask(model), at, again=at % 4)
            # torch itself puts a mode back when the traceback is freed, if it is
            # interrupted twice while the mode handles a call. Such a mode is over.
            left = overrides._get_current_function_mode_stack()
            assert all(mode.is_over for mode in left)
            installation.remove_leftovers()  # as the next pass does first
            assert modes() == before, f"interrupted at point {at} and {at % 4} later"
            assert hanging(model.module) == hooked, (
                f"interrupted at point {at} and {at % 4} later"
            )
        assert stopped > 12


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("family", sliced(["t5", "gpt2"], 1))
def test_an_interrupted_load_leaves_nothing_on_the_module(
    family: str, hanging: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Neither what transformers puts there when it is asked for hidden states, nor a
    mode of torch.
    """
    module = tiny_model(family)
    module.save_pretrained(tmp_path)  # type: ignore[operator]
    before, hooked = modes(), hanging(module)
    points = points_of(lambda: hs.load((module, None)), ENDINGS)
    assert hanging(module) == hooked
    for at in sliced(range(1, points + 1), 8):
        interrupted_twice(lambda: hs.load((module, None)), at, at % 3, ENDINGS)
        assert modes() == before, f"interrupted at point {at} and {at % 3} later"
        installation.remove_leftovers()
        assert hanging(module) == hooked, (
            f"interrupted at point {at} and {at % 3} later"
        )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_extraction_leaves_torch_as_it_was(tmp_path: Path) -> None:
    """It uses as many threads as its plan says, and a thread that writes."""
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    engine = hs.Engine(threads=torch.get_num_threads() + 1)
    folders = (tmp_path / str(number) for number in count())

    def ask() -> None:
        hs.extract(
            model, ["The rest is here.", "A cat sat."], next(folders), engine=engine
        )

    ask()
    before, points = modes(), points_of(ask)
    for at in range(1, points + 1, max(1, points // 15)):
        interrupted_twice(ask, at, again=at % 3)
        assert modes() == before, f"interrupted at point {at} and {at % 3} later"


def interrupted_twice(
    ask: Callable[[], Any], at: int, again: int, functions: Collection[str] = FUNCTIONS
) -> bool:
    """Ask, and be interrupted; whether that happened before the question was answered."""
    interrupt = AtPoint(at, again, functions)
    try:
        with interrupt:
            ask()
    except KeyboardInterrupt:
        return True
    return interrupt.left <= 0


def test_what_an_interrupt_leaves_is_gone_before_the_next_pass(
    hanging: Callable[..., dict[str, Any]],
) -> None:
    model = hs.load((tiny_model("gpt2"), None))
    before = hanging(model.module)
    left = hooks.watching([hooks.Watch(model.module, "output", lambda output: None)])
    left.__enter__()
    assert hanging(model.module) != before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation.Installation, "_remove", lambda self: None)
        del left  # its own removal is interrupted at once
    assert hanging(model.module) != before
    model.capture(IDS)
    assert hanging(model.module) == before


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_passes_of_another_thread_are_its_own(family: str) -> None:
    module = tiny_model(family)
    model = hs.load((module, None))
    ids = torch.tensor(IDS)
    given = {"input_ids": ids} | (
        {"decoder_input_ids": ids} if model.encoder_decoder else {}
    )
    with torch.no_grad():
        expected = module(**given).logits
    done, wrong, passes = threading.Event(), [], []

    def user() -> None:
        while not done.is_set():
            try:
                with torch.no_grad():
                    passes.append(torch.equal(module(**given).logits, expected))
            except BaseException as error:
                wrong.append(error)

    thread = threading.Thread(target=user)
    thread.start()
    try:
        names = ["capture", "lens"] if family == "t5" else FEW
        for _ in range(3):
            for name in names:
                if family == "t5":
                    model.capture(IDS, targets=IDS)
                else:
                    QUESTIONS[name](model)
            hs.load((module, None))
    finally:
        done.set()
        thread.join()
    assert not wrong and len(passes) > 10 and all(passes)


def test_a_generator_that_edits_may_be_closed_by_another_thread() -> None:
    model = hs.load((tiny_model("llama"), None))

    def edited() -> Any:
        with hs.editing(model, {"layer.1": hs.Scale(0.0)}):
            yield

    begun = edited()
    next(begun)
    thread = threading.Thread(target=begun.close)
    thread.start()
    thread.join()
    taken: list[bool] = []
    other = threading.Thread(
        target=lambda: taken.append(model.lock.acquire(blocking=False))
    )
    other.start()
    other.join()
    assert taken == [True]
