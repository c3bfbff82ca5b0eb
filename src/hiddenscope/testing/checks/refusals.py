"""Laws of refusals: what is no value of a parameter is refused in our words."""

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from hiddenscope.interface import Parameter
from hiddenscope.testing.checks.inputs import rewritten
from hiddenscope.testing.checks.law import hold, law, only_if, usual_answer
from hiddenscope.testing.checks.outcomes import hold_ours
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
    *([], ["", None]),
)
# Of these some analyses can say something.
UNUSUAL: tuple[Any, ...] = ([[5]], ["\u202e\0👩‍👧 \u0301\uffff"])
NO_IDS: tuple[Any, ...] = ([], [[]], [[10**6]], [[True]], [{}])
HOSTILE: tuple[Any, ...] = (
    *("", ["a", ""], [None], ["a", None], ["a", [5]], "\ud800 a", [""]),
    *(5, b"a", float("nan"), [[-1, 5]], [[5.0]], range(10**12)),
)
# What is no value of any parameter of a kind.
NO_VALUES: Mapping[str, tuple[Any, ...]] = {
    "integer": (2.5, "many", True),
    "choice": ("no such choice", 3),
    "text": NO_IDS + UNUSUAL,
    "texts": NO_IDS + UNUSUAL,
    "contrast": ([], None, [None], "a", 5, ["a", "b"]),
    "pairs": ([], None, [None], "a", 5, ["a", "b"], [1], "nowhere.csv"),
    "data": (
        *NO_IDS,
        *HOSTILE,
        *(None, "nowhere.csv", ([], []), (["a", "b"], [0]), (["a"], [0], [0], [0])),
        *((["a", None] * 6, [0, 1] * 6), (["a", ""] * 6, [0, 1] * 6)),
    ),
    "direction": ("no direction", [float("nan")], 5),
    "dictionary": ("no/such/folder", "no-such-word"),
    "model": (3, "/no/such/folder"),
    "word": ({},),
    "words": ([3], 5),
    "path": (0, b"x", ".", "a\0b"),
    "flag": ("many",),
    "numbers": ("many", {}, []),
    "pooling": ("no pooling",),
    "sampling": (3,),
}


@law()
def check_no_value_is_taken_for_one(entry: Entry, subject: Subject) -> None:
    """What is no value of a parameter is refused in our words and without a warning,
    whatever else was asked: another kind of thing, an empty list, a number out of
    bounds, a word that is no choice, which is named. What is only unusual may be
    answered.
    """
    usual_answer(entry, subject)
    for parameter in entry.description.parameters:
        for value in _no_values(parameter):
            changes: dict[str, Any] = {parameter.name: value}
            if parameter.name == "texts" and entry.takes("targets"):
                changes |= subject.targets(len(value) if isinstance(value, list) else 1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                came = outcome_of(partial(entry.run, subject, **changes))
            where = f"{parameter.name}={value!r:.40}: "
            hold_ours(came, where, of_none=True)
            unusual = any(value is known for known in UNUSUAL)
            hold(came.refused or unusual, f"{where}it is answered")
            if parameter.kind in ("choice", "pooling") and isinstance(value, str):
                hold(str(value) in str(came.error), f"{where}{came.error}")


def _no_values(parameter: Parameter) -> Iterator[Any]:
    """Yield what is no value of a parameter."""
    kind = parameter.kind
    may_be_none = not parameter.required and parameter.default is None
    for value in NO_VALUES.get(kind, ()):
        if value is not None or not may_be_none:
            yield value
    # Answers may be one id, and targets are none where there is no decoder.
    if kind in ("text", "texts") and parameter.name not in ("answers", "targets"):
        yield from HOSTILE
    if kind == "integer" and parameter.least is not None:
        yield parameter.least - 1
    if kind in ("integer", "choice") and parameter.default is not None:
        yield None


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
