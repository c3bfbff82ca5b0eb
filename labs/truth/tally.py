"""Scorecards: how often an analysis is right on a model, and how far it is off.

A case is one input, pair or model that was asked about, never a cell of a grid: cells of
one case depend on each other. The programs are taken as they are. Intervals are those
of the cases that were drawn for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

# Of the normal distribution, for 95% intervals.
QUANTILE = 1.959964
RESAMPLES = 2_000

Interval = tuple[float, float]


@dataclass(frozen=True)
class Question:
    """What is asked of an analysis, and what it would score if it knew nothing.

    A `share` counts the cases that are right, a `mean` is one of numbers, and of
    `largest` numbers only the largest is told. Some are told program by program too.
    """

    analysis: str
    asked: str
    null: str
    kind: Literal["share", "mean", "largest"] = "share"
    by_program: bool = False


@dataclass
class Scorecard:
    """The answers of one model: a number for every case of every question."""

    cases: dict[Question, list[float]] = field(default_factory=dict)

    def count(self, question: Question, is_right: bool) -> None:
        """Count one case as right or wrong."""
        self.add(question, float(is_right))

    def add(self, question: Question, number: float) -> None:
        """Keep the number of one case."""
        self.cases.setdefault(question, []).append(float(number))


@dataclass(frozen=True)
class Score:
    """A question's answer over many cases, with its 95% interval."""

    question: Question
    cases: int
    value: float
    interval: Interval | None


def score(question: Question, cases: Sequence[float]) -> Score:
    """Sum up the cases of a question."""
    if question.kind == "largest":
        return Score(question, len(cases), max(cases), None)
    mean = float(np.mean(cases))
    if question.kind == "share":
        return Score(question, len(cases), mean, wilson(round(sum(cases)), len(cases)))
    return Score(question, len(cases), mean, _bootstrap(cases))


def wilson(hits: int, total: int) -> Interval:
    """Return Wilson's 95% interval of a share.

    >>> low, high = wilson(95, 100)
    >>> round(low, 3), round(high, 3)
    (0.888, 0.978)
    """
    share = hits / total
    square = QUANTILE**2
    scale = 1 + square / total
    centre = (share + square / (2 * total)) / scale
    spread = share * (1 - share) / total + square / (4 * total**2)
    half = QUANTILE * math.sqrt(spread) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def _bootstrap(cases: Sequence[float]) -> Interval:
    """Return the 95% interval of a mean over cases, by drawing them again."""
    chance = np.random.default_rng(0)
    numbers = np.asarray(cases)
    drawn = chance.integers(len(numbers), size=(RESAMPLES, len(numbers)))
    low, high = np.quantile(numbers[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
