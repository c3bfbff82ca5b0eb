"""Laws of outcomes: an answer, or a refusal that is true."""

import traceback
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from torch import nn

import hiddenscope as hs
from hiddenscope.testing.checks.law import (
    answer_to,
    fail,
    hold,
    law,
    only_if,
    result_of,
    usual_answer,
)
from hiddenscope.testing.entries import Entry, Outcome, data_of, outcome, outcome_of
from hiddenscope.testing.subjects import Subject


def hold_ours(came: Outcome, where: str = "", *, of_none: bool = False) -> None:
    """Hold that a question came to an answer, or to an error in three parts, of which
    one may speak of None where it may be given.
    """
    error = came.error
    if error is None:
        return
    if not isinstance(error, hs.errors.Error):
        place = traceback.extract_tb(error.__traceback__)[-1]
        fail(
            f"{where}{type(error).__name__}: {str(error)[:200]}"
            f" ({place.filename.rpartition('/')[2]}:{place.lineno})"
        )
    for part in (error.problem, error.reason, error.remedy):
        says = part and (of_none or "None" not in part)
        hold(says, f"{where}an error that says nothing: {error}")
    hold(error.remedy.endswith((".", "?")), f"{where}no sentence: {error.remedy}")


def counted_passes(
    module: nn.Module, ask: Callable[[], Any]
) -> tuple[Exception | None, int]:
    """Ask, and return the error that came of it and how many passes were run."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handle = module.register_forward_pre_hook(count)
    try:
        ask()
    except Exception as error:
        return error, passes
    finally:
        handle.remove()
    return None, passes


@law()
def check_gives_an_answer_or_our_error(entry: Entry, subject: Subject) -> None:
    """The usual question is answered, or refused in our words."""
    hold_ours(outcome(entry, subject))


@law()
def check_every_kind_of_site(entry: Entry, subject: Subject) -> None:
    """At a layer, `final`, a part, a head, a neuron, in each stack: the sites that were
    asked are answered, or they are refused in our words.
    """
    name = next((name for name in ("sites", "site") if entry.takes(name)), "")
    only_if(name, "it takes no sites")
    for site in subject.sites.values():
        came = outcome_of(partial(entry.run, subject, **{name: site}))
        hold_ours(came, f"at {site}: ")
        if isinstance(came.answer, hs.Result) and "site" in came.answer.data.coords:
            found = {str(name) for name in np.ravel(came.answer.data["site"].values)}
            hold(site in found, f"{site} was asked, and {sorted(found)} are told")


@law()
def check_sites_are_those_asked(entry: Entry, subject: Subject) -> None:
    """A pattern of sites is answered at every site that it names: `final` too."""
    only_if(entry.takes("sites"), "it takes no sites")
    pattern = f"{subject.prefix}layer.*,{subject.prefix}final"
    data = data_of(answer_to(entry, subject, sites=pattern))
    only_if("site" in data.coords and data["site"].ndim == 1, "it tells no sites")
    expected = set(map(str, subject.model.anatomy.select(pattern)))
    found = set(map(str, data["site"].values))
    hold(expected <= found, f"{sorted(expected - found)} are missing")
    # The logits are told beside the states, and are none.
    hold(found <= expected | {"logits"}, f"{sorted(found - expected)} were not asked")


@law()
def check_every_token_is_told(entry: Entry, subject: Subject) -> None:
    """Every token of every text is there, once and in order; padding never is."""
    data = data_of(usual_answer(entry, subject))
    only_if({"token", "id", "text"} <= set(data.coords), "it tells no tokens of texts")
    only_if(data["id"].dims == ("token",), "its tokens are others")
    texts: Any = entry.arguments(subject).get("texts")
    only_if(texts is not None, "it takes no texts")
    encoded = subject.model.encode(texts)
    expected = list(chain.from_iterable(encoded.ids))
    if encoded.targets is not None or len(data["id"]) > len(expected):
        only_if(not subject.encoder_decoder, "its texts have two sides")
    hold(
        data["id"].values.tolist() == expected, "its tokens are not those of the texts"
    )


@law()
def check_texts_are_those_asked(entry: Entry, subject: Subject) -> None:
    """The texts that a result says it is of are those that were given, in order, and
    no targets.
    """
    attributes = data_of(usual_answer(entry, subject)).attrs
    texts: Any = entry.arguments(subject).get("texts")
    only_if(isinstance(texts, list) and isinstance(texts[0], str), "it takes others")
    for name, value in attributes.items():
        if name == "texts":
            hold(list(value) == texts, f"it is said to be of {value}")
        if name == "targets":
            hold(list(value) != texts, "its targets are said to be its texts")


@law()
def check_needs_are_refused_in_one_voice(entry: Entry, subject: Subject) -> None:
    """A model that lacks what is declared is refused before any pass, and no other."""
    came = outcome(entry, subject)
    anatomy = subject.model.anatomy
    lacking = [need for need in entry.needs if not need.is_met(anatomy)]
    voices = [need.reason for need in entry.needs]
    if not lacking:
        said = "" if came.error is None else str(came.error)
        for voice in voices:
            hold(voice not in said, f"{said!r}, though nothing is lacking")
        return
    error, passes = counted_passes(subject.module, lambda: entry.run(subject))
    hold(isinstance(error, hs.errors.Error), f"{lacking[0].reason}, and is answered")
    hold(any(need.reason in str(error) for need in lacking), f"another voice: {error}")
    hold(passes == 0, f"{passes} passes were run before it was refused")


@law()
def check_numbers_are_finite(entry: Entry, subject: Subject) -> None:
    """No number is infinite, and none is missing everywhere along a whole variable."""
    data = result_of(entry, subject).data
    for name, variable in data.data_vars.items():
        if variable.dtype.kind != "f" or not variable.size:
            continue
        values = variable.to_numpy()
        hold(not np.isinf(values).any(), f"{name} has an infinity")
