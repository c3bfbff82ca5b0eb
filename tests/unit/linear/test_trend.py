"""Trends: held against the textbook's prediction interval."""

import numpy as np
import pytest
from scipy import stats

from hiddenscope.linear.trend import degree_of, departure


@pytest.mark.parametrize("degree", [1, 2])
def test_a_departure_is_what_a_least_squares_prediction_says(degree: int) -> None:
    generator = np.random.default_rng(0)
    places = np.array([1.0, 2, 3, 5, 6, 7, 8, 10, 11])
    numbers = generator.normal(size=9) + places**degree
    last = departure(places, numbers, degree)
    fitted = np.polynomial.Polynomial.fit(places[:-1], numbers[:-1], degree)
    assert last.weights @ numbers == pytest.approx(numbers[-1] - fitted(places[-1]))
    residuals = numbers[:-1] - fitted(places[:-1])
    design = np.vander(places[:-1], degree + 1)
    at_last = np.vander(places[-1:], degree + 1)[0]
    leverage = at_last @ np.linalg.inv(design.T @ design) @ at_last
    assert last.freedom == 8 - degree - 1
    variance = residuals @ residuals / last.freedom * (1 + leverage)
    assert last.error == pytest.approx(np.sqrt(variance))


def test_a_trend_that_holds_has_no_departure() -> None:
    places = np.arange(1.0, 13)
    last = departure(places, 3 - places + places**2, 2)
    assert last.weights @ (3 - places + places**2) == pytest.approx(0, abs=1e-9)
    assert last.error == pytest.approx(0, abs=1e-9)


def test_its_squared_error_is_that_of_earlier_predictions() -> None:
    """Brown, Durbin and Evans (1975)."""
    generator = np.random.default_rng(1)
    places, numbers = np.arange(1.0, 15), generator.normal(size=14).cumsum()
    squares = []
    for count in range(3, 14):
        part = places[:count], numbers[:count]
        earlier = departure(*part, 1) if count > 3 else None
        design = np.vander(places[: count - 1], 2)
        at_last = np.vander(places[count - 1 : count], 2)[0]
        leverage = at_last @ np.linalg.inv(design.T @ design) @ at_last
        line = np.polyfit(places[: count - 1], numbers[: count - 1], 1)
        gap = numbers[count - 1] - np.polyval(line, places[count - 1])
        if earlier is not None:
            assert earlier.weights @ part[1] == pytest.approx(gap)
        squares.append(gap**2 / (1 + leverage))
    last = departure(places, numbers, 1)
    scale = last.error**2 / (1 + (last.weights[:-1] ** 2).sum())
    assert scale == pytest.approx(np.mean(squares))


def test_a_last_number_like_the_others_is_rarely_far_away() -> None:
    generator = np.random.default_rng(2)
    places, far = np.arange(1.0, 13), 0
    limit = stats.t.ppf(0.975, 8)
    for _ in range(1000):
        numbers = generator.normal(size=12)
        last = departure(places, numbers, 2)
        far += abs(last.weights @ numbers) > limit * last.error
    assert 30 <= far <= 70


def test_few_numbers_have_a_line_and_fewer_no_trend() -> None:
    assert [degree_of(count) for count in (3, 4, 9, 10)] == [None, 1, 1, 2]
