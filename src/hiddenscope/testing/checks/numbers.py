"""Laws of numbers: precision, scale, units, and the end of the stack."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.interface import HEAD
from hiddenscope.testing.checks.law import (
    answer_to,
    fail,
    hold,
    law,
    none_of,
    only_if,
    usual_answer,
)
from hiddenscope.testing.comparing import differences, turned
from hiddenscope.testing.entries import ROUNDING, Entry, data_of, outcome
from hiddenscope.testing.models import PlainGPT
from hiddenscope.testing.subjects import Subject

# A bfloat16 has eight bits; sums of rounded states are off by several of them.
HALF = 0.25
# A share of this many answers or fewer moves in steps.
FEW = 32
# Powers of a factor that a number may grow with: a share by none, a norm by one.
RANKED = {"rank", "example", "neuron"}
POWERS = (-2, -1, 0, 1, 2)
INFORMATION = {"bits": math.log2, "nats": math.log}


@law()
def check_float64_agrees(entry: Entry, subject: Subject) -> None:
    """In float64 the numbers are the same but for rounding."""
    only_if(subject.dtype == torch.float32 and subject.castable, "it has one dtype")
    expected = usual_answer(entry, subject.in_float64)
    actual = usual_answer(entry, subject)
    none_of(
        differences(
            expected,
            turned(expected, actual, entry.up_to_sign),
            entry.tolerance,
            apart={*entry.measures_rounding, *_ranked_otherwise(expected, actual)},
            labels=False,
        ),
        "float32 against float64",
    )


def _ranked_otherwise(expected: Any, actual: Any) -> set[str]:
    """Return the variables along a rank at which rounding chose another of two that are
    as good as equal: those that say which was chosen differ.
    """
    first, second = data_of(expected), data_of(actual)
    dims = set[str]()
    for name, variable in first.data_vars.items():
        chosen = variable.dtype.kind in "iO" and name in second
        same = chosen and np.array_equal(variable.to_numpy(), second[name].to_numpy())
        if chosen and not same:
            dims |= RANKED & set(map(str, variable.dims))
    return {str(name) for name in first.data_vars if dims & set(first[name].dims)}


@law(slow=True)
def check_cuda_gives_what_the_cpu_gives(entry: Entry, subject: Subject) -> None:
    """On a GPU the numbers are those of the CPU but for rounding."""
    only_if(torch.cuda.is_available(), "there is no GPU")
    only_if(subject.dtype == torch.float32, "it is rounded more than devices differ")
    expected, there = usual_answer(entry, subject), outcome(entry, subject.on_gpu)
    if there.error is not None:
        raise there.error
    none_of(
        differences(
            expected,
            there.answer,
            entry.tolerance,
            apart=entry.measures_rounding,
            labels=False,
        ),
        "CUDA against the CPU",
    )


@law()
def check_bfloat16_agrees_or_is_refused(entry: Entry, subject: Subject) -> None:
    """In bfloat16 the numbers are near those of float32, or they are refused.

    Of a share of a few answers, one answer may tip: where two words are as likely but
    for rounding, bfloat16 decides between them by itself.
    """
    only_if(subject.dtype == torch.float32 and subject.castable, "it has one dtype")
    expected = usual_answer(entry, subject)
    came = outcome(entry, subject.in_bfloat16)
    if came.refused:
        return
    if came.error is not None:
        raise came.error
    data = data_of(expected)
    actual = turned(data, came.answer, entry.up_to_sign)
    hold(set(actual.data_vars) == set(data.data_vars), "bfloat16 has other variables")
    for name, variable in data.data_vars.items():
        other = actual[name]
        if variable.dtype.kind != "f" or variable.dims != other.dims:
            continue
        if name in (*entry.measures_rounding, *entry.fitted):
            continue
        if variable.shape != other.shape or not variable.size:
            continue
        _hold_near(str(name), variable.to_numpy(), other.to_numpy())


def _hold_near(name: str, expected: Any, actual: Any) -> None:
    """Hold that most numbers are near, as a share of their spread."""
    both = np.isfinite(expected) & np.isfinite(actual)
    only = np.isfinite(expected) ^ np.isfinite(actual)
    hold(
        only.sum() <= 0.1 * only.size,
        f"{name} in bfloat16 is NaN at {only.sum()} places",
    )
    if not both.any():
        return
    scale = np.abs(expected[both]).max()
    off = np.median(np.abs(expected[both] - actual[both]))
    step = _step(np.concatenate([expected[both], actual[both]]))
    hold(
        off <= max(HALF * scale, step) + 1e-6,
        f"{name} in bfloat16 is off by {off:.3g} of {scale:.3g} in the median",
    )


def _step(numbers: Any) -> float:
    """Return what one answer is of a share of a few: 0 of what is no such share."""
    for count in range(4, FEW + 1):
        parts = numbers * count
        if np.abs(parts - parts.round()).max() <= 1e-5:
            return 1 / count
    return 0.0


@law()
def check_scale_changes_nothing(entry: Entry, subject: Subject) -> None:
    """A residual stream that is multiplied through changes nothing but what is a norm:
    every variable is the same, or the same times one power of the factor.
    """
    only_if(subject.scaled, "its stream cannot be multiplied through")
    factor = 3.0
    actual = data_of(usual_answer(entry, subject.multiplied(factor)))
    expected = data_of(usual_answer(entry, subject.multiplied(1.0)))
    hold(set(actual.data_vars) == set(expected.data_vars), "other variables")
    for name, variable in expected.data_vars.items():
        if variable.dtype.kind == "f" and name not in entry.measures_rounding:
            off = _off_every_power(variable.to_numpy(), actual[name].to_numpy(), factor)
            hold(
                off <= 10 * entry.tolerance,
                f"{name} of a stream {factor:g} times as large is off by {off:.3g}",
            )


def _off_every_power(expected: Any, actual: Any, factor: float) -> float:
    """Return how far a number is from all that it may have become, as a share of the
    largest.
    """
    if expected.shape != actual.shape or not np.array_equal(
        np.isnan(expected), np.isnan(actual)
    ):
        return math.inf
    nearest = np.full(expected.shape, np.inf)
    for power in POWERS:
        grown = expected * factor**power
        scale = np.nanmax(np.abs(grown), initial=1e-12)
        nearest = np.fmin(nearest, np.abs(actual - grown) / scale)
    return float(nearest[~np.isnan(expected)].max(initial=0.0))


@law()
def check_units_of_information(entry: Entry, subject: Subject) -> None:
    """Where every word is as likely as every other, what is in bits is 0 or the
    logarithm of their number to base 2; what is in nats, that to base e. The log-odds
    of a word are those of one in that number.
    """
    data = data_of(usual_answer(entry, subject))
    names = {
        str(name): INFORMATION[variable.attrs["units"]]
        for name, variable in data.data_vars.items()
        if variable.attrs.get("units") in INFORMATION
    }
    for name, variable in data.data_vars.items():
        about = f"{name} {variable.attrs.get('long_name', '')}".lower()
        says = variable.attrs.get("units") or str(name) in names
        hold(says or "entropy" not in about, f"{name} does not say its units")
    only_if(names, "it tells nothing in bits or nats")
    only_if(subject.name != "plain", "it is proved by what the head makes of it")
    uniform, words = subject.uniform
    actual = data_of(usual_answer(entry, uniform))
    for name, logarithm in names.items():
        values = actual[name].to_numpy()
        values = values[np.isfinite(values)]
        may_be = [0.0, logarithm(words), -logarithm(words - 1)]
        off = np.min([abs(values - number) for number in may_be], axis=0)
        if off.size:
            hold(
                off.max() < 1e-3,
                f"{name} is {values[off.argmax()]:.4g} where all {words} words are as"
                f" likely: neither {logarithm(words):.4g} nor 0. Its units are others,"
                " or it is a mean of more than the tokens",
            )


@law()
def check_the_last_layer_is_final(entry: Entry, subject: Subject) -> None:
    """What is read of predictions at the last layer is read at `final`: a norm is
    neither left out nor applied twice.
    """
    whole = data_of(usual_answer(entry, subject)).data_vars.values()
    informed = any(part.attrs.get("units") in INFORMATION for part in whole)
    only_if(HEAD in entry.needs or informed, "it reads no predictions")
    only_if(entry.takes("sites") and entry.takes("texts"), "it reads no single states")
    last, final = subject.sites["last"], subject.sites["final"]
    first = data_of(answer_to(entry, subject, sites=last))
    only_if("token" in first.dims and "site" in first.dims, "it tells no single states")
    second = data_of(answer_to(entry, subject, sites=final))
    names = [str(name) for name in first.data_vars if "site" in first[name].dims]
    none_of(
        differences(
            first[names].drop_vars("site"), second[names].drop_vars("site"), ROUNDING
        ),
        f"{final} against {last}",
    )


@law()
def check_masked_words_are_no_nan(entry: Entry, subject: Subject) -> None:
    """Words that can never follow, with logits of minus infinity, make no NaN."""
    only_if(subject.name == "plain", "every word can follow")
    unmasked = replace(subject, build=partial(PlainGPT, masked=False))
    expected = data_of(usual_answer(entry, unmasked))
    actual = data_of(usual_answer(entry, subject))
    for name in expected.data_vars:
        if expected[name].dtype.kind == "f":
            pair = expected[name].isnull().sum(), actual[name].isnull().sum()
            hold(
                pair[0] == pair[1],
                f"{name} has {int(pair[1])} NaN, and without {int(pair[0])}",
            )


@law()
def check_numbers_are_in_range(entry: Entry, subject: Subject) -> None:
    """A probability, a share, a p-value and a correlation are what such can be; an
    interval holds its number.
    """
    answer = usual_answer(entry, subject)
    only_if(isinstance(answer, hs.Result), "it gives no Result")
    for name, variable in answer.data.data_vars.items():
        if variable.dtype.kind != "f" or not variable.size:
            continue
        values = variable.to_numpy()
        low, high = (
            np.nanmin(values, initial=np.inf),
            np.nanmax(values, initial=-np.inf),
        )
        bounds = bounds_of(str(name), variable.attrs)
        slack = 1e-5
        if low < bounds[0] - slack or high > bounds[1] + slack:
            fail(
                f"{name} is {low:.6g} to {high:.6g}, and can be"
                f" {bounds[0]} to {bounds[1]}"
            )


def bounds_of(name: str, attrs: Any) -> tuple[float, float]:
    """Return the least and the largest number that a variable can be, by its words."""
    words = f"{name} {attrs.get('long_name', '')}".lower()
    if attrs.get("meaning") == "diverging":
        return (-1.0, 1.0) if "cosine" in words else (-math.inf, math.inf)
    if (
        name in ("p", "accuracy")
        or name.endswith("_p")
        or words.startswith("probability")
    ):
        return 0.0, 1.0
    if "probability" in name or attrs.get("units") == "share of the prompts":
        return 0.0, 1.0
    if "cosine" in words:
        return -1.0, 1.0
    if "entropy" in name or name == "kl" or name.startswith("norm"):
        return 0.0, math.inf
    return -math.inf, math.inf
