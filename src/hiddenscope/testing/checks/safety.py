"""Laws of safety: nothing of the user's is changed, and other threads see their own."""

import threading
from typing import Any

import torch

import hiddenscope as hs
from hiddenscope.testing.checks.again import again
from hiddenscope.testing.checks.law import (
    hold,
    law,
    none_of,
    only_if,
    required_answer,
    usual_answer,
)
from hiddenscope.testing.comparing import differences
from hiddenscope.testing.entries import Entry
from hiddenscope.testing.subjects import Subject
from hiddenscope.testing.untouched import (
    assert_interrupts_leave_nothing,
    assert_never_changed,
    assert_others_get_their_numbers,
    modes,
    state_of,
)


class Stopped(Exception):
    """What a module of the user's raises in the middle of a pass."""


@law()
def check_nothing_is_changed(entry: Entry, subject: Subject) -> None:
    """After a call every weight, mode, hook and setting is as it was."""
    second = again(entry, subject)
    none_of(second.changed, "of the module")
    hold(not second.modes_changed, "a mode of torch was changed")


@law()
def check_an_error_inside_changes_nothing(entry: Entry, subject: Subject) -> None:
    """An exception in the middle of a pass leaves everything as it was."""
    expected = usual_answer(entry, subject)
    before, torch_before = state_of(subject.module), modes()
    parts = [part for part in subject.module.modules() if not list(part.children())]

    def stop(*_: Any) -> None:
        raise Stopped

    handle = parts[len(parts) // 2].register_forward_hook(stop)
    try:
        entry.run(subject)
    except (Stopped, hs.errors.Error):
        pass
    finally:
        handle.remove()
    none_of(_changed(before, state_of(subject.module)), "of the module")
    hold(modes() == torch_before, "a mode of torch was changed")
    none_of(differences(expected, required_answer(entry, subject)), "after an error")


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before | after if before.get(name) != after.get(name)]


@law()
def check_gradients_may_be_off(entry: Entry, subject: Subject) -> None:
    """Under torch.no_grad() the numbers are the same, and it stays switched off."""
    expected = usual_answer(entry, subject)
    with torch.no_grad():
        found = required_answer(entry, subject)
        hold(not torch.is_grad_enabled(), "gradients were left switched on")
    none_of(differences(expected, found), "without gradients")
    with torch.inference_mode():
        found = required_answer(entry, subject)
        hold(torch.is_inference_mode_enabled(), "inference mode was left")
    none_of(differences(expected, found), "in inference mode")
    weights = subject.module.named_parameters()
    none_of(
        [name for name, weight in weights if weight.grad is not None],
        "a gradient is left on",
    )


@law()
def check_a_thread_beside_a_pass(entry: Entry, subject: Subject) -> None:
    """Another thread that calls the module in the middle of passes gets its own
    numbers, bit for bit, and the analysis those that it gets alone.
    """
    only_if(not subject.encoder_decoder, "its module takes two texts")
    alone = usual_answer(entry, subject)
    ids = torch.tensor([[5, 6, 7, 8]], device=subject.device)

    def run() -> Any:
        with torch.no_grad():
            output = subject.module(ids)
        return getattr(output, "logits", output)

    expected, asking = run(), threading.get_ident()
    wrong: list[str] = []
    calls = 0

    def compare() -> None:
        try:
            if not torch.equal(run(), expected):
                wrong.append("other numbers")
        except Exception as error:
            wrong.append(repr(error))

    def beside(*_: Any) -> None:
        nonlocal calls
        calls += threading.get_ident() == asking
        # In the first passes, and in fewer and fewer of the later ones.
        if threading.get_ident() == asking and calls & (calls - 1) == 0:
            thread = threading.Thread(target=compare)
            thread.start()
            thread.join()

    parts = [part for part in subject.module.modules() if not list(part.children())]
    handle = parts[len(parts) // 2].register_forward_hook(beside)
    try:
        found = required_answer(entry, subject)
    finally:
        handle.remove()
    none_of(wrong, "a thread in the middle of a pass")
    none_of(differences(alone, found, entry.tolerance), "beside another thread")


@law(slow=True)
def check_two_threads_get_the_same(entry: Entry, subject: Subject) -> None:
    """Two threads that ask at once get what one gets."""
    expected = usual_answer(entry, subject)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(required_answer(entry, subject)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hold(len(found) == len(threads), "a thread ended in an error")
    for answer in found:
        none_of(differences(expected, answer), "beside another thread")


@law(slow=True)
def check_nothing_is_changed_at_any_instant(entry: Entry, subject: Subject) -> None:
    """At no line is a weight, a mode or a setting another."""
    usual_answer(entry, subject)
    assert_never_changed(lambda: required_answer(entry, subject), [subject.module])


@law(slow=True)
def check_another_thread_sees_its_own_numbers(entry: Entry, subject: Subject) -> None:
    """A thread that calls the module meanwhile gets its own numbers, bit for bit."""
    only_if(not subject.encoder_decoder, "its module takes two texts")
    usual_answer(entry, subject)
    assert_others_get_their_numbers(
        lambda: required_answer(entry, subject), [subject.module]
    )


@law(slow=True)
def check_an_interrupt_changes_nothing(entry: Entry, subject: Subject) -> None:
    """Ctrl-C at any call leaves nothing behind."""
    usual_answer(entry, subject)
    assert_interrupts_leave_nothing(
        lambda: required_answer(entry, subject), [subject.module], subject.model
    )
