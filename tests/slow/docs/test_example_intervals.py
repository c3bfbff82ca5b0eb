"""Check the intervals that the experiments print, where the truth is known."""

import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.places import ROOT

EXAMPLES = ROOT / "examples"
RUNS = 1_000
TOPICS, PER_TOPIC = 12, 6

Draw = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]


def noise(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw differences whose mean is zero, one for each of 24 texts."""
    return rng.normal(size=24), np.arange(24)


def skewed(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw log ratios with a long tail: a few prompts move much more than others."""
    return rng.gamma(2.0, size=24) - 2.0, np.arange(24)


def grouped(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw successes whose probability belongs to a topic; on average it is a half."""
    topics = np.repeat(np.arange(TOPICS), PER_TOPIC)
    chance = rng.beta(1.5, 1.5, size=TOPICS)
    return (rng.random(len(topics)) < chance[topics]).astype(float), topics


@pytest.fixture(scope="module", autouse=True)
def _examples_on_the_path() -> None:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))


def coverage(draw: Draw, truth: float, *, by_text: bool = False) -> float:
    """Return the share of intervals that hold the true mean."""
    from intervals import mean_interval

    rng = np.random.default_rng(0)
    held = 0
    for _ in range(RUNS):
        values, groups = draw(rng)
        mean = mean_interval(values, None if by_text else groups)
        held += mean.low <= truth <= mean.high
    return held / RUNS


@pytest.mark.parametrize(
    ("draw", "truth"), [(noise, 0.0), (skewed, 0.0), (grouped, 0.5)]
)
def test_intervals_hold_the_truth(draw: Draw, truth: float) -> None:
    assert 0.92 < coverage(draw, truth) < 0.98


def test_a_planted_effect_is_not_taken_for_none() -> None:
    shifted = coverage(lambda rng: (rng.normal(1.0, size=24), np.arange(24)), 0.0)
    assert shifted < 0.05


def test_texts_of_a_topic_are_not_independent() -> None:
    assert coverage(grouped, 0.5, by_text=True) < 0.9
