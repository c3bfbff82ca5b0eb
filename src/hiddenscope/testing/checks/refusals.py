"""Laws of refusals: what is no text and no site is refused in our words."""

from functools import partial
from typing import Any

import numpy as np
import torch

from hiddenscope.testing.checks.inputs import rewritten
from hiddenscope.testing.checks.law import hold, law, only_if, usual_answer
from hiddenscope.testing.entries import Entry, Outcome, outcome_of
from hiddenscope.testing.subjects import Subject

TOO_LONG = [5] * 100_000

# What is no text, and what is said of it.
NO_TEXTS: tuple[tuple[Any, str], ...] = (
    ("", "it is empty"),
    (" \n\t\u3000", "it is only white space"),
    ("the \ud800 one", "character 4 is a lone surrogate"),
    ([5, 6, 7, 8, -1], "id -1 is outside the vocabulary of "),
    ([5, 6, 7, 8, 2**70], "outside the vocabulary of "),
    ([], "it has no tokens"),
    ([True, False], "list"),
    ([5.0, 6.5], "list"),
    ([[5, 6]], "list"),
    (None, ""),
    (b"the one", "bytes"),
    (TOO_LONG, "takes at most "),
)
IS_ENDLESS = "a range has more than 4,194,304 items"
# What are no texts, where several may be given: enough of them for any analysis.
NO_LISTS: tuple[tuple[Any, str], ...] = (
    ([], ""),
    (["the one", [5, 6]] * 6, "strings only, or lists of token ids only"),
    ([5, "the one"] * 6, "strings only, or lists of token ids only"),
    (torch.full((12, 1), 5.0), "not a list of integers"),
    # No memory holds the one, and no list is as long as the other.
    (range(10**12), IS_ENDLESS),
    (range(10**30), IS_ENDLESS),
    ([range(10**12)] * 12, IS_ENDLESS),
    ({"ids": [[5, 6]]}, "it has no input_ids, only ids"),
    (5, ""),
    (b"the one", "bytes"),
)
# A layer has a name, and no number.
NO_SITES: tuple[Any, ...] = (
    *(0, -1, np.int64(2), True, np.True_, 1.5),
    *("", (), b"final", "layer.40", "layer.1.attnn", "finl", "*" * 500, "\ud800"),
)


@law()
def check_no_texts_are_refused(entry: Entry, subject: Subject) -> None:
    """What is no text is refused, and the error says what is wrong with it."""
    only_if(rewritten(entry, subject, lambda text: text), "it takes no texts")
    usual_answer(entry, subject)
    window = subject.model.text_encoder.window
    for bad, said in NO_TEXTS:
        if bad is TOO_LONG and (window is None or window > len(bad)):
            continue
        came = outcome_of(partial(_ask_with, entry, subject, bad))
        _hold_refused(bad, came, said)
    if isinstance(entry.arguments(subject).get("texts"), list):
        for bad, said in NO_LISTS:
            came = outcome_of(partial(entry.run, subject, texts=bad))
            _hold_refused(bad, came, said)


def _ask_with(entry: Entry, subject: Subject, bad: Any) -> Any:
    """Ask with the first of all texts and prompts replaced."""
    written: list[Any] = []

    def write(text: str) -> Any:
        written.append(text)
        if len(written) == 1:
            return bad
        # Beside ids there may be no strings.
        return list(subject.model.encode(text).ids[0]) if type(bad) is list else text

    return entry.run(subject, **rewritten(entry, subject, write))


@law()
def check_no_sites_are_refused(entry: Entry, subject: Subject) -> None:
    """What is no site is refused, and a number is told which layer it may mean."""
    name = next((name for name in ("sites", "site") if entry.takes(name)), "")
    only_if(name, "it takes no sites")
    usual_answer(entry, subject)
    for bad in NO_SITES:
        came = outcome_of(partial(entry.run, subject, **{name: bad}))
        is_number = isinstance(bad, int | np.integer) and not isinstance(bad, bool)
        is_told = "must be" in str(came.error)
        said = f"Did you mean 'layer.{bad}'?" if is_number and not is_told else ""
        _hold_refused(bad, came, said)


def _hold_refused(bad: Any, came: Outcome, said: str) -> None:
    shown = repr(bad)[:40]
    hold(came.refused, f"{shown}: {came.error!r}")
    hold(said in str(came.error), f"{shown}: {came.error}")
