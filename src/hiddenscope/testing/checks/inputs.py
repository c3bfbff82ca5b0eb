"""Laws of inputs: what is the same question has the same answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray

import hiddenscope as hs
from hiddenscope.testing.checks.law import (
    answered,
    asked,
    hold,
    law,
    none_of,
    only_if,
)
from hiddenscope.testing.comparing import differences
from hiddenscope.testing.entries import Entry, data_of, outcome_of
from hiddenscope.testing.subjects import Subject

# A batch may round otherwise than a text alone.
BATCH = 1e-4
TEXT_KINDS = ("text", "texts")
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
    found = asked(entry, subject, **changes)
    none_of(differences(answered(entry, subject), found, labels=False), "ids")


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
    found = asked(entry, subject, **changes)
    none_of(differences(answered(entry, subject), found), "Inputs")


@law()
def check_a_chat_is_its_text(entry: Entry, subject: Subject) -> None:
    """A chat gives what the ids of its rendered text give."""
    kinds = set(entry.kinds.values())
    only_if(kinds & set(TEXT_KINDS), "it takes no texts")
    tokenizer = subject.tokenizer
    only_if(not subject.fills_in, "nobody chats with it")
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
        if entry.kinds.keys() & {"contrasts", "pairs"}:
            only_if(False, "its prompts are no chats")
        expected, found = asked(entry, subject, **ids), asked(entry, subject, **chats)
    finally:
        tokenizer.chat_template = None
    none_of(differences(expected, found, labels=False), "a chat")


@law()
def check_a_batch_is_its_texts(entry: Entry, subject: Subject) -> None:
    """What is told of each token in a batch is told of it alone."""
    texts: Any = entry.arguments(subject).get("texts")
    only_if(_are_strings(texts), "it takes no texts")
    whole = data_of(answered(entry, subject))
    only_if(
        "text" in whole.coords or "text" in whole.dims, "it tells nothing of a text"
    )
    tolerance = max(BATCH, subject.rounding)
    for number, text in enumerate(texts):
        alone = data_of(asked(entry, subject, texts=[text]))
        part = rows_of(whole, number)
        only_if(part is not None, "it tells nothing of a text")
        none_of(
            differences(
                part,
                rows_of(alone, 0),
                tolerance,
                apart=entry.of_all_texts,
                labels=False,
            ),
            f"text {number} alone",
        )


def rows_of(data: xarray.Dataset, text: int) -> Any:
    """Return what is told of the tokens of a text, or of the text itself."""
    along = "token" if "token" in data.dims else "text"
    if along == "token" and "text" in data.coords:
        mine = data["text"].values == text
    elif along in data.dims:
        mine = np.arange(data.sizes["text"]) == text
    else:
        return None
    part = data.isel({along: mine})
    return part[[name for name in part.data_vars if along in part[name].dims]]


@law()
def check_the_order_of_texts(entry: Entry, subject: Subject) -> None:
    """Texts in another order give the same, in that order."""
    texts: Any = entry.arguments(subject).get("texts")
    only_if(_are_strings(texts) and len(texts) > 1, "it takes no texts")
    whole = data_of(answered(entry, subject))
    turned = data_of(asked(entry, subject, texts=texts[::-1]))
    tolerance = max(BATCH, subject.rounding)
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
def check_a_long_text_is_cut_when_asked(entry: Entry, subject: Subject) -> None:
    """A text of more tokens than the model takes is refused, and cut where the remedy
    is followed.
    """
    only_if(entry.takes("truncate"), "it cuts no texts")
    only_if(not subject.encoder_decoder, "its texts have two sides")
    window = subject.model.text_encoder.window
    only_if(window, "it takes texts of any length")
    names = [name for name, kind in entry.kinds.items() if kind in TEXT_KINDS]
    only_if(names, "it takes no texts")
    name = names[0]
    expected = asked(entry, subject, **{name: [[5] * window]})
    long = {name: [[5] * (window + 1)]}
    came = outcome_of(lambda: entry.run(subject, **long))
    hold(came.refused, f"{window + 1} tokens are not refused: {came.error}")
    hold("truncate=True" in str(came.error), f"another remedy: {came.error}")
    found = asked(entry, subject, **long, truncate=True)
    none_of(differences(expected, found, labels=False), "a text that was cut")


@law()
def check_a_second_call(entry: Entry, subject: Subject) -> None:
    """A second call gives the same numbers, bit for bit, and the same words."""
    first, second = answered(entry, subject), asked(entry, subject)
    none_of(differences(first, second), "a second call")
    if isinstance(first, hs.Result):
        hold(first.facts == second.facts, "a second call has other facts")
        hold(first.summary() == second.summary(), "a second call says something else")


@law()
def check_the_seed_decides(entry: Entry, subject: Subject) -> None:
    """No generator of the user's decides, or is moved; a seed does."""
    first = answered(entry, subject)
    before = torch.get_rng_state()
    torch.manual_seed(991)
    np.random.seed(992)
    moved = _generators()
    try:
        again = asked(entry, subject)
        after = _generators()
    finally:
        torch.set_rng_state(before)
        np.random.seed(0)
    none_of(differences(first, again), "with other global seeds")
    hold(moved == after, "a generator of the user's was moved")
    if entry.is_random:
        same = asked(entry, subject, seed=5)
        none_of(differences(same, asked(entry, subject, seed=5)), "with one seed twice")


def _generators() -> tuple[bytes, str]:
    """Return the states of the generators that everybody shares."""
    return torch.get_rng_state().numpy().tobytes(), str(np.random.get_state())


@law()
def check_a_module_is_a_model(entry: Entry, subject: Subject) -> None:
    """A module with its tokenizer is taken as the loaded model is."""
    only_if(
        entry.arguments(subject)[entry.model_name] is subject.model, "it takes no model"
    )
    pair = subject.module, subject.tokenizer
    found = asked(entry, subject, **{entry.model_name: pair})
    none_of(differences(answered(entry, subject), found), "a module")


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
    found = asked(entry, subject, **changes)
    none_of(
        differences(answered(entry, subject), found, entry.tolerance, labels=False),
        "stored states",
    )
