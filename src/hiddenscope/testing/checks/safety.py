"""Laws of safety: nothing of the user's is changed, and other threads see their own."""

import threading
from typing import Any

import torch

import hiddenscope as hs
from hiddenscope.testing.checks.inputs import BATCH
from hiddenscope.testing.checks.law import (
    answered,
    asked_again,
    hold,
    law,
    none_of,
    only_if,
)
from hiddenscope.testing.comparing import differences
from hiddenscope.testing.entries import Entry
from hiddenscope.testing.passes import graded_passes
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
    answered(entry, subject)  # what is tried once has been tried
    before, torch_before = state_of(subject.module), modes()
    asked_again(entry, subject)
    none_of(_changed(before, state_of(subject.module)), "of the module")
    hold(modes() == torch_before, "a mode of torch was changed")


@law()
def check_an_error_inside_changes_nothing(entry: Entry, subject: Subject) -> None:
    """An exception in the middle of a pass leaves everything as it was."""
    expected = answered(entry, subject)
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
    none_of(differences(expected, asked_again(entry, subject)), "after an error")


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before | after if before.get(name) != after.get(name)]


@law()
def check_gradients_are_asked_for(entry: Entry, subject: Subject) -> None:
    """No pass records gradients under no_grad but those of an analysis that needs them,
    and no gradient is left on a weight.
    """
    answered(entry, subject)
    with torch.enable_grad():
        graded_passes(subject.module, lambda: asked_again(entry, subject))
        hold(torch.is_grad_enabled(), "gradients were switched off")
    with torch.no_grad():
        asked_again(entry, subject)
        hold(not torch.is_grad_enabled(), "gradients were left switched on")
    left = [
        name
        for name, weight in subject.module.named_parameters()
        if weight.grad is not None
    ]
    none_of(left, "a gradient is left on")


@law()
def check_a_thread_beside_a_pass(entry: Entry, subject: Subject) -> None:
    """Another thread that calls the module in the middle of passes gets its own
    numbers, bit for bit, and the analysis those that it gets alone.
    """
    only_if(not subject.encoder_decoder, "its module takes two texts")
    alone = answered(entry, subject)
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
        found = asked_again(entry, subject)
    finally:
        handle.remove()
    none_of(wrong, "a thread in the middle of a pass")
    none_of(differences(alone, found, BATCH), "beside another thread")


@law(dear=True)
def check_two_threads_get_the_same(entry: Entry, subject: Subject) -> None:
    """Two threads that ask at once get what one gets."""
    expected = answered(entry, subject)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(asked_again(entry, subject)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hold(len(found) == len(threads), "a thread ended in an error")
    for answer in found:
        none_of(differences(expected, answer), "beside another thread")


@law(dear=True)
def check_nothing_is_changed_at_any_instant(entry: Entry, subject: Subject) -> None:
    """At no line is a weight, a mode or a setting another."""
    answered(entry, subject)
    assert_never_changed(lambda: asked_again(entry, subject), [subject.module])


@law(dear=True)
def check_another_thread_sees_its_own_numbers(entry: Entry, subject: Subject) -> None:
    """A thread that calls the module meanwhile gets its own numbers, bit for bit."""
    only_if(not subject.encoder_decoder, "its module takes two texts")
    answered(entry, subject)
    assert_others_get_their_numbers(
        lambda: asked_again(entry, subject), [subject.module]
    )


@law(dear=True)
def check_an_interrupt_changes_nothing(entry: Entry, subject: Subject) -> None:
    """Ctrl-C at any call leaves nothing behind."""
    answered(entry, subject)
    assert_interrupts_leave_nothing(
        lambda: asked_again(entry, subject), [subject.module], subject.model
    )
