"""Check the interval that the experiments print, on noise and on a planted mean."""

import sys

import numpy as np
import pytest

from tests.places import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from over_texts import mean_over_texts

TEXTS, LAYERS, TRIALS = 24, 15, 2_000


@pytest.mark.parametrize("planted", [0.0, 0.3])
def test_the_interval_holds_the_mean_as_often_as_it_says(planted: float) -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(TEXTS, TRIALS))
    mean = mean_over_texts(planted + noise)
    held = (mean.low <= planted) & (planted <= mean.high)
    # Three standard errors of a share of 0.95 over 2,000 trials are 0.015.
    assert 0.935 <= held.mean() <= 0.965


def test_skewed_numbers_such_as_kl_are_held_nearly_as_often() -> None:
    generator = np.random.default_rng(1)
    # Gamma with shape 4: its skewness is 1.
    numbers = generator.gamma(4.0, size=(TEXTS, TRIALS))
    mean = mean_over_texts(numbers)
    held = (mean.low <= 4) & (mean.high >= 4)
    assert 0.92 <= held.mean() <= 0.965


def test_all_layers_are_held_together() -> None:
    generator = np.random.default_rng(2)
    # Neighbouring layers are alike, as in a model: half of the noise is the text's own.
    shared = generator.normal(size=(TEXTS, 1, TRIALS))
    noise = shared + generator.normal(size=(TEXTS, LAYERS, TRIALS))
    mean = mean_over_texts(noise, comparisons=LAYERS)
    held = ((mean.low <= 0) & (mean.high >= 0)).all(0)
    assert held.mean() >= 0.935


def test_a_planted_difference_is_seen() -> None:
    generator = np.random.default_rng(3)
    # Twelve standard errors of the mean over 24 texts are 2.4 standard deviations.
    mean = mean_over_texts(2.4 + generator.normal(size=(TEXTS, TRIALS)), LAYERS)
    assert (mean.low > 0).mean() > 0.99
