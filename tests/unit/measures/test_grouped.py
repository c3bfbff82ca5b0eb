"""Shares and rank correlations of a few groups are bounded, and never certain."""

import numpy as np
import pytest

from hiddenscope.measures.grouped import SHARE, rank_ends, shares


@pytest.mark.parametrize("texts", [3, 5, 12, 40])
@pytest.mark.parametrize("tokens", [1, 12])
def test_intervals_of_shares_hold_them_and_stay_within_0_and_1(
    texts: int, tokens: int
) -> None:
    generator = np.random.default_rng(texts)
    held = []
    for _ in range(300):
        true = np.array([0.03, 0.3, 0.9])
        of_texts = generator.beta(3 * true, 3 * (1 - true), (texts, 3))
        values = generator.binomial(tokens, of_texts) / tokens
        for share, expected in zip(
            shares(values, np.arange(texts), 1), true, strict=True
        ):
            assert share.low is not None and share.high is not None
            assert 0 <= share.low <= share.value <= share.high <= 1
            assert share.high - share.low > 0.01
            held.append(share.low <= expected <= share.high)
    assert np.mean(held) >= 0.93


def test_copies_in_a_group_make_no_share_more_certain() -> None:
    values = np.random.default_rng(0).random((8, 2))
    (once, _), (twice, _) = (
        shares(np.repeat(values, count, 0), np.repeat(np.arange(8), count))
        for count in (1, 3)
    )
    assert twice.low == pytest.approx(once.low)
    assert twice.high == pytest.approx(once.high)


def test_more_columns_make_wider_intervals() -> None:
    values = np.random.default_rng(1).random((8, 4))
    alone, *_ = shares(values[:, :1], np.arange(8))
    together, *_ = shares(values, np.arange(8))
    assert together.low is not None and alone.low is not None
    assert together.low < alone.low


def test_a_rank_correlation_of_few_rows_is_uncertain() -> None:
    low, high = rank_ends(np.array([0.0, 1.0, -1.0]), 5)
    assert (low < np.array([-0.8, 0.5, -0.9])).all()
    assert (high <= 1).all() and (low >= -1).all()
    assert [end.tolist() for end in rank_ends(np.array([1.0]), 3)] == [[-1.0], [1.0]]
    wide, narrow = (rank_ends(np.array(0.3), rows) for rows in (10, 100))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_log_odds_come_back_at_their_bounds() -> None:
    ends = np.array([0.0, 0.2, 1.0])
    np.testing.assert_allclose(SHARE.back(SHARE.there(ends)), ends, atol=1e-9)
