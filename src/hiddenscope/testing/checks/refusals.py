"""Laws of refusals: invalid arguments end in an error of hiddenscope's own."""

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

# Invalid texts, each with a phrase of its error; an empty one fits any error.
INVALID_TEXTS: tuple[tuple[Any, str], ...] = (
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
# Invalid lists of texts, as long as any analysis asks, with a phrase of the error.
INVALID_LISTS: tuple[tuple[Any, str], ...] = (
    ([], ""),
    (["the one", [5, 6]] * 6, "strings only, or lists of token ids only"),
    ([5, "the one"] * 6, "strings only, or lists of token ids only"),
    (torch.full((12, 1), 5.0), "not a list of integers"),
    # Neither may be listed: memory ends before the first, and len() before the second.
    (range(10**12), IS_ENDLESS),
    (range(10**30), IS_ENDLESS),
    ([range(10**12)] * 12, IS_ENDLESS),
    ({"ids": [[5, 6]]}, "it has no input_ids, only ids"),
    (5, ""),
    (b"the one", "bytes"),
)
# A layer has a name, and no number.
INVALID_SITES: tuple[Any, ...] = (
    *(0, -1, np.int64(2), True, np.True_, 1.5),
    *("", (), b"final", "layer.40", "layer.1.attnn", "finl", "*" * 500, "\ud800"),
    *([], ["", None]),
)
# Unusual, but valid for some analyses: they are answered or refused.
UNUSUAL: tuple[Any, ...] = ([[5]], ["\u202e\0👩‍👧 \u0301\uffff"])
INVALID_IDS: tuple[Any, ...] = ([], [[]], [[10**6]], [[True]], [{}])
HOSTILE: tuple[Any, ...] = (
    *("", ["a", ""], [None], ["a", None], ["a", [5]], "\ud800 a", [""]),
    *(5, b"a", float("nan"), [[-1, 5]], [[5.0]], range(10**12)),
)
# Values that no parameter of a kind takes.
INVALID_VALUES: Mapping[str, tuple[Any, ...]] = {
    "integer": (2.5, "many", True),
    "choice": ("no such choice", 3),
    "text": INVALID_IDS,
    "texts": INVALID_IDS,
    "contrast": ([], None, [None], "a", 5, ["a", "b"]),
    "pairs": ([], None, [None], "a", 5, ["a", "b"], [1], "nowhere.csv"),
    "data": (
        *INVALID_IDS,
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
def check_invalid_values_are_refused(entry: Entry, subject: Subject) -> None:
    """Each parameter in turn is given invalid values of its kind, and the others what
    they are usually given: each is refused with our error, without a warning, and a
    wrong choice is quoted in it. Unusual values may be answered.
    """
    usual_answer(entry, subject)
    for parameter in entry.description.parameters:
        for value in _invalid_values(parameter):
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


def _invalid_values(parameter: Parameter) -> Iterator[Any]:
    """Yield invalid and unusual values of a parameter."""
    kind = parameter.kind
    may_be_none = not parameter.required and parameter.default is None
    for value in INVALID_VALUES.get(kind, ()):
        if value is not None or not may_be_none:
            yield value
    if kind in ("text", "texts"):
        yield from UNUSUAL
    # Answers may be one id, and targets are none where there is no decoder.
    if kind in ("text", "texts") and parameter.name not in ("answers", "targets"):
        yield from HOSTILE
    if kind == "integer" and parameter.least is not None:
        yield parameter.least - 1
    if kind in ("integer", "choice") and parameter.default is not None:
        yield None


@law()
def check_invalid_texts_are_refused(entry: Entry, subject: Subject) -> None:
    """An invalid text or list of texts is refused with the phrase of its fault."""
    only_if(rewritten(entry, subject, lambda text: text), "it takes no texts")
    usual_answer(entry, subject)
    window = subject.model.text_encoder.window
    for bad, said in INVALID_TEXTS:
        if bad is TOO_LONG and (window is None or window > len(bad)):
            continue
        came = outcome_of(partial(_ask_with, entry, subject, bad))
        _hold_refused(bad, came, said)
    if isinstance(entry.arguments(subject).get("texts"), list):
        for bad, said in INVALID_LISTS:
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
def check_invalid_sites_are_refused(entry: Entry, subject: Subject) -> None:
    """An invalid site is refused; for an integer the remedy names the layer that it may
    mean.
    """
    name = next((name for name in ("sites", "site") if entry.takes(name)), "")
    only_if(name, "it takes no sites")
    usual_answer(entry, subject)
    for bad in INVALID_SITES:
        came = outcome_of(partial(entry.run, subject, **{name: bad}))
        is_number = isinstance(bad, int | np.integer) and not isinstance(bad, bool)
        # Where a parameter takes sites alone, its type is checked first.
        is_type_error = "must be" in str(came.error)
        suggests = is_number and not is_type_error
        said = f"Did you mean 'layer.{bad}'?" if suggests else ""
        _hold_refused(bad, came, said)


def _hold_refused(bad: Any, came: Outcome, said: str) -> None:
    shown = repr(bad)[:40]
    hold(came.refused, f"{shown}: {came.error!r}")
    hold(said in str(came.error), f"{shown}: {came.error}")
