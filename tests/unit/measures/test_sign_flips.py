"""The test of many means holds its level, and is what it says."""

from itertools import product

import numpy as np
import pytest

from hiddenscope.measures import permutations
from hiddenscope.measures.permutations import corrected_sign_flip_p


def by_hand(differences: np.ndarray) -> list[float]:
    """Flip all signs one after another."""
    sizes = np.sqrt((differences**2).sum(0))
    observed = differences.sum(0) / sizes
    largest = []
    for signs in product([1, -1], repeat=len(differences)):
        flipped = np.array(signs)[:, None] * differences
        largest.append((flipped.sum(0) / sizes).max())
    return [float(np.mean(np.array(largest) >= one - 1e-9)) for one in observed]


def test_all_signs_are_flipped_or_some_at_random(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many are held at a time changes nothing."""
    differences = np.random.default_rng(0).standard_normal((7, 5)) + 0.4
    expected = by_hand(differences)
    found = corrected_sign_flip_p(differences)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    monkeypatch.setattr(permutations, "BLOCK", 7)
    np.testing.assert_array_equal(corrected_sign_flip_p(differences), found)
    monkeypatch.undo()
    monkeypatch.setattr(permutations, "MOST_EXACT", 6)
    drawn = corrected_sign_flip_p(differences)
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=0.02)


def test_a_column_without_numbers_has_no_p_and_changes_none() -> None:
    differences = np.random.default_rng(0).standard_normal((8, 3))
    found = corrected_sign_flip_p(np.insert(differences, 1, np.nan, axis=1))
    assert np.isnan(found[1])
    np.testing.assert_array_equal(found[[0, 2, 3]], corrected_sign_flip_p(differences))


def test_equal_columns_need_no_correction_and_zeros_are_nothing() -> None:
    column = np.random.default_rng(1).standard_normal((8, 1)) + 1
    alone = corrected_sign_flip_p(column)[0]
    together = corrected_sign_flip_p(np.hstack([column] * 5 + [np.zeros((8, 1))]))
    np.testing.assert_allclose(together[:5], alone)
    assert together[5] > 0.5


def test_noise_is_called_larger_than_zero_in_one_of_twenty_cases() -> None:
    """Columns of very different sizes, which depend on each other."""
    generator = np.random.default_rng(3)
    wrong = 0
    runs = 400
    for _ in range(runs):
        common = generator.standard_normal((8, 1))
        noise = common + generator.standard_normal((8, 20))
        p = corrected_sign_flip_p(noise * 10.0 ** np.arange(20))
        wrong += bool((p < 0.05).any())
    assert 0.01 < wrong / runs < 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5
