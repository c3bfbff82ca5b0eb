"""Laws of inputs: the same question in another form gets the same answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import xarray

import hiddenscope as hs
from hiddenscope.results.story import report_of
from hiddenscope.testing.checks.again import again
from hiddenscope.testing.checks.law import (
    answer_of,
    answer_to,
    hold,
    law,
    none_of,
    only_if,
    required_answer,
    result_of,
    usual_answer,
)
from hiddenscope.testing.comparing import differences, flat_facts
from hiddenscope.testing.entries import Entry, data_of, outcome_of
from hiddenscope.testing.subjects import Subject

TEXT_KINDS = ("text", "texts")
# Kinds of parameters whose copies are counted once.
REPEATED = ("contrast", "pairs", "data")
PROMPTS = ("clean", "corrupt", "base", "source")


def rewritten(
    entry: Entry, subject: Subject, write: Callable[[str], Any]
) -> Mapping[str, Any]:
    """Return the arguments that hold texts, with every text written another way."""
    changes: dict[str, Any] = {}
    for name, value in entry.arguments(subject).items():
        kind = entry.kinds.get(name)
        if isinstance(value, str) and kind == "text":
            changes[name] = [write(value)]
        elif kind in TEXT_KINDS and _are_strings(value):
            changes[name] = [write(text) for text in value]
        elif isinstance(value, hs.Contrast | hs.Interchange):
            changes[name] = _pair(value, write)
        elif kind in ("contrast", "pairs") and isinstance(value, Sequence):
            changes[name] = [_pair(pair, write) for pair in value]
    return changes


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _pair(pair: Any, write: Callable[[str], Any]) -> Any:
    prompts = {
        name: write(getattr(pair, name, "")) for name in PROMPTS if name in vars(pair)
    }
    return replace(pair, **prompts)


@law()
def check_ids_are_strings(entry: Entry, subject: Subject) -> None:
    """Token ids in place of strings give the same numbers, bit for bit."""
    changes = rewritten(
        entry, subject, lambda text: list(subject.model.encode(text).ids[0])
    )
    only_if(changes, "it takes no texts")
    actual = answer_to(entry, subject, **changes)
    none_of(differences(usual_answer(entry, subject), actual, labels=False), "ids")


@law()
def check_inputs_are_strings(entry: Entry, subject: Subject) -> None:
    """Texts that were encoded before give the same numbers, bit for bit."""
    arguments = entry.arguments(subject)
    names = [
        name
        for name, value in arguments.items()
        if entry.kinds.get(name) in TEXT_KINDS
        and name != "targets"
        and (isinstance(value, str) or _are_strings(value))
    ]
    only_if(names, "it takes no strings")
    targets = arguments.get("targets")
    changes: dict[str, Any] = {
        name: subject.model.encode(arguments[name], targets=targets) for name in names
    }
    if targets is not None:
        changes["targets"] = None
    actual = answer_to(entry, subject, **changes)
    none_of(differences(usual_answer(entry, subject), actual), "Inputs")


@law()
def check_a_chat_is_its_text(entry: Entry, subject: Subject) -> None:
    """A chat gives what the ids of its rendered text give."""
    kinds = set(entry.kinds.values())
    only_if(kinds & set(TEXT_KINDS), "it takes no texts")
    only_if(not kinds & {"contrast", "pairs"}, "its prompts are not chats")
    only_if(not subject.fills_in, "models that fill in have no chats")
    tokenizer = subject.tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    try:
        chats = rewritten(
            entry, subject, lambda text: [{"role": "user", "content": text}]
        )
        only_if(chats, "it takes no strings")
        ids = rewritten(
            entry,
            subject,
            lambda text: list(tokenizer(text, add_special_tokens=False).input_ids),
        )
        expected = answer_to(entry, subject, **ids)
        actual = answer_to(entry, subject, **chats)
    finally:
        tokenizer.chat_template = None
    none_of(differences(expected, actual, labels=False), "a chat")


@law()
def check_a_batch_is_its_texts(entry: Entry, subject: Subject) -> None:
    """Each text in a batch gets the numbers that it gets alone, but for rounding."""
    texts: Any = entry.arguments(subject).get("texts")
    only_if(_are_strings(texts), "it takes no texts")
    whole = data_of(usual_answer(entry, subject))
    only_if("text" in whole.coords or "text" in whole.dims, "it has no rows of texts")
    tolerance = max(entry.tolerance, subject.rounding)
    for number, text in enumerate(texts):
        alone = data_of(answer_to(entry, subject, texts=[text]))
        part = rows_of(whole, number)
        only_if(part is not None, "its rows are not those of texts")
        none_of(
            differences(
                part,
                rows_of(alone, 0),
                tolerance,
                apart=(*entry.of_all_texts, *entry.measures_rounding),
                labels=False,
            ),
            f"text {number} alone",
        )


def rows_of(data: xarray.Dataset, text: int) -> Any:
    """Return the variables of the tokens of a text, or of the text itself, or None."""
    along = "token" if "token" in data.dims else "text"
    if along == "token" and "text" in data.coords:
        mine = data["text"].values == text
    elif along == "text" and "text" in data.dims:
        mine = np.arange(data.sizes["text"]) == text
    else:
        return None
    part = data.isel({along: mine})
    return part[[name for name in part.data_vars if along in part[name].dims]]


@law()
def check_the_order_of_texts(entry: Entry, subject: Subject) -> None:
    """Texts in another order give the same, in that order."""
    arguments = entry.arguments(subject)
    texts: Any = arguments.get("texts")
    changes: dict[str, Any] = {"texts": texts[::-1]} if _are_strings(texts) else {}
    if isinstance(arguments.get("data"), tuple):
        texts, labels = arguments["data"]
        changes = {"data": (texts[::-1], labels[::-1])}
    only_if(changes and len(texts) > 1, "it takes no texts")
    whole = data_of(usual_answer(entry, subject))
    turned = data_of(required_answer(entry, subject, **changes))
    tolerance = max(entry.tolerance, subject.rounding)
    last = len(texts) - 1
    for number in range(len(texts)):
        first, second = rows_of(whole, number), rows_of(turned, last - number)
        if first is not None and first.data_vars:
            none_of(
                differences(first, second, tolerance, labels=False),
                f"text {number} reversed",
            )
    if entry.is_random:
        return
    of_all = [
        str(name)
        for name, variable in whole.data_vars.items()
        if set(variable.dims) <= {"site", "layer", "source_site"}
    ]
    none_of(differences(whole[of_all], turned[of_all], tolerance), "all texts reversed")


@law()
def check_copies_change_nothing(entry: Entry, subject: Subject) -> None:
    """Where copies are counted, adding some changes only that count, which is told."""
    first = result_of(entry, subject)
    copied = {
        name: _with_copies(value)
        for name, value in entry.arguments(subject).items()
        if entry.kinds.get(name) in REPEATED
    }
    only_if(copied, "it takes nothing that may come again")
    paired = {"contrast", "pairs"} & set(entry.kinds.values())
    counts = list(_counts_of_copies(report_of(first)))
    only_if(paired or counts, "it counts no copies")
    actual = required_answer(entry, subject, **copied)
    told = list(_counts_of_copies(report_of(actual)))
    hold(set(told) <= {2}, f"{told} copies are told, and there are 2")
    whole = [
        str(name)
        for name, variable in first.data.data_vars.items()
        if not {"text", "token"} & set(variable.dims)
    ]
    before, after = first.data[whole], actual.data[whole]
    differ = differences(before, after, entry.tolerance, apart=entry.of_copies_too)
    none_of(differ, "with copies")
    if paired:
        for fact, value in first.facts.items():
            if fact not in ("copies", "notes"):
                hold(actual.facts[fact] == value, f"facts.{fact} is other for copies")
        hold("cop" in " ".join(actual.facts["notes"]), "no note tells of the copies")


def _with_copies(value: Any) -> Any:
    """Return pairs or labelled texts of which two come again."""
    if isinstance(value, hs.Contrast):
        return [value] * 3
    if isinstance(value, tuple):
        return tuple(_with_copies(column) for column in value)
    return [*value, *value[:2]]


def _counts_of_copies(report: Any) -> Iterator[int]:
    """Yield the numbers of copies that a report has, wherever it has them."""
    if isinstance(report, list | tuple):
        for part in report:
            yield from _counts_of_copies(part)
    for field in fields(report) if is_dataclass(report) else ():
        value = getattr(report, field.name)
        if field.name == "copies":
            yield value or 0
        else:
            yield from _counts_of_copies(value)


@law()
def check_a_long_text_is_cut_when_asked(entry: Entry, subject: Subject) -> None:
    """A text of more tokens than the model takes is refused, and cut where the remedy
    is followed.
    """
    only_if(entry.takes("truncate"), "it cuts no texts")
    only_if(not subject.encoder_decoder, "its texts have two sides")
    window = subject.model.text_encoder.window or 0
    only_if(window, "it takes texts of any length")
    names = [name for name, kind in entry.kinds.items() if kind in TEXT_KINDS]
    only_if(names, "it takes no texts")
    name = names[0]
    expected = answer_to(entry, subject, **{name: [[5] * window]})
    long = {name: [[5] * (window + 1)]}
    came = outcome_of(lambda: entry.run(subject, **long))
    hold(came.refused, f"{window + 1} tokens are not refused: {came.error}")
    hold("truncate=True" in str(came.error), f"another remedy: {came.error}")
    actual = answer_to(entry, subject, **long, truncate=True)
    none_of(differences(expected, actual, labels=False), "a text that was cut")


@law()
def check_a_second_call(entry: Entry, subject: Subject) -> None:
    """A second call gives the same numbers, bit for bit, and the same words; no
    generator that everybody shares decides, or is moved.
    """
    first, second = usual_answer(entry, subject), again(entry, subject)
    actual = answer_of(second.outcome)
    none_of(differences(first, actual), "a second call")
    hold(not second.generators_moved, "a generator of the user's was moved")
    if isinstance(first, hs.Result):
        hold(first.facts == actual.facts, "a second call has other facts")
        hold(first.summary() == actual.summary(), "a second call says something else")


@law()
def check_the_seed_decides(entry: Entry, subject: Subject) -> None:
    """One seed gives one answer, and some other seed another."""
    only_if(entry.is_random, "it takes no seed")
    answer_to(entry, subject, **entry.seeded)
    first, again, *others = (
        required_answer(entry, subject, seed=seed, **entry.seeded)
        for seed in (5, 5, 6, 7)
    )
    none_of(differences(first, again), "with one seed twice")
    hold(any(_are_unlike(first, other) for other in others), "no seed changes it")


def _are_unlike(first: Any, other: Any) -> bool:
    """Tell whether two answers have other numbers or facts, beside the seed itself."""
    if differences(first, other):
        return True
    if not isinstance(first, hs.Result):
        return False
    facts, others = (dict(flat_facts(answer.facts)) for answer in (first, other))
    # By what is written: a NaN equals no NaN.
    unlike = {path for path in facts if repr(facts[path]) != repr(others.get(path))}
    return any(path.rpartition(".")[2] != "seed" for path in unlike)


@law()
def check_a_module_is_a_model(entry: Entry, subject: Subject) -> None:
    """A module with its tokenizer is taken as the loaded model is."""
    only_if(
        entry.arguments(subject)[entry.model_name] is subject.model, "it takes no model"
    )
    expected = usual_answer(entry, subject)
    pair = subject.module, subject.tokenizer
    actual = required_answer(entry, subject, **{entry.model_name: pair})
    none_of(differences(expected, actual), "a module")


@law()
def check_stored_states_are_the_model(entry: Entry, subject: Subject) -> None:
    """States that were captured before give what the live model gives."""
    only_if(entry.description.states, "it takes no stored states")
    arguments = entry.arguments(subject)
    texts = arguments.get("texts") or next(iter(arguments.get("data", [None])))
    only_if(texts is not None, "it takes no texts")
    only_if(not subject.encoder_decoder, "its states are those of two stacks")
    sites = arguments.get("sites") or arguments.get("site") or "layer.*,final"
    states = subject.model.capture(texts, sites)
    changes: dict[str, Any] = {entry.model_name: states}
    if "texts" in arguments:
        changes["texts"] = None
    if "data" in arguments:
        changes["data"] = arguments["data"][1]
    actual = answer_to(entry, subject, **changes)
    expected = usual_answer(entry, subject)
    differ = differences(expected, actual, entry.tolerance, labels=False)
    none_of(differ, "stored states")
