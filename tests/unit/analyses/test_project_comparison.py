"""Two datasets compared: plain loops as the oracle, and laws of what must not move the
verdict.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.measures.comparison import Difference, Parts, Sets, compared
from hiddenscope.results import views_of
from hiddenscope.results.pictures import Lines
from tests.registry import tiny

NAMES = ["cat", "dog", "hat", "mat", "bone", "river", "stone", "light"]
TEXTS = [f"The {name} sees the {other}" for name in NAMES for other in ("sun", "sea")]
LABELS = [name for name in ("a", "b") for _ in range(8)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def pairs(
    groups: int = 24, per_group: int = 1, tight: float = 1.0, seed: int = 0
) -> tuple[list[Tensor], Sets]:
    """Pairs of rows that have much in common, of which the first kind may be tighter;
    the kinds lie far apart and differ in scale.
    """
    number = np.repeat(np.arange(groups), per_group)
    shared = noise(2, len(number), 6, seed=seed)
    sides = []
    for kind in (0, 1):
        rows = shared + noise(*shared.shape, seed=seed + 1000 * (1 + kind))
        rows *= 1 if kind else tight
        rows[:, :, 0] += 4.0 * torch.from_numpy(number % 2)
        sides.append(rows * (1 + 9 * kind) + 50 * kind)
    sets = np.repeat([0, 1], len(number))
    both = np.tile(number, 2)
    return list(torch.cat(sides, 1)), Sets(sets, both % 2, both)


def dispersion_by_hand(rows: np.ndarray, classes: np.ndarray) -> float:
    means = [rows[classes == code].mean(0) for code in np.unique(classes)]
    squares = 0.0
    for row, code in zip(rows, classes, strict=True):
        squares += sum((row - means[code]) ** 2)
    within = (squares / (len(rows) - len(means))) ** 0.5
    distances = []
    for first in range(len(means)):
        for second in range(first):
            distances.append(sum((means[first] - means[second]) ** 2) ** 0.5)
    return float(np.log(within / np.mean(distances)))


def neighbour_by_hand(rows: np.ndarray, classes: np.ndarray, groups: Any) -> float:
    shares = []
    for row in range(len(rows)):
        distances = {}
        for other in range(len(rows)):
            if groups[other] != groups[row]:
                distances[other] = round(sum((rows[row] - rows[other]) ** 2), 9)
        nearest = min(distances.values())
        near = [other for other, distance in distances.items() if distance == nearest]
        shares.append(np.mean([classes[other] == classes[row] for other in near]))
    return float(np.mean(shares))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_numbers_are_those_of_plain_loops(classes: int, rounded: bool) -> None:
    (site, _), sets = pairs(12, 2)
    sets = sets._replace(classes=sets.groups % classes)
    if rounded:
        # Many rows are equally near.
        site = (site / 4).round()
    parts = Parts(sets, 19, 0)
    numbers = compared([site], sets, parts)
    for number, name in ((0, "first"), (1, "second")):
        rows = site.numpy()[sets.sets == number]
        inside = sets.members(number)
        expected = dispersion_by_hand(rows, inside.classes)
        assert getattr(numbers["dispersion"], name)[0] == pytest.approx(expected)
        expected = neighbour_by_hand(rows, inside.classes, inside.groups)
        assert getattr(numbers["neighbour"], name)[0] == pytest.approx(expected)


def test_the_p_value_is_that_of_swapped_pairs_one_by_one() -> None:
    """Jackknife pseudo-values, their swaps and studentised differences, in loops."""
    sites, sets = pairs(10)
    parts = Parts(sets, 63, 3)
    largest = np.zeros(len(parts.sets))
    by_site = []
    for site in sites:
        values = np.zeros((2, 10))
        for kind in (0, 1):
            inside = sets.members(kind)
            rows = site.numpy()[sets.sets == kind]
            whole = dispersion_by_hand(rows, inside.classes)
            without = []
            for group in range(10):
                left = inside.groups != group
                without.append(dispersion_by_hand(rows[left], inside.classes[left]))
            values[kind] = whole + 9 * (np.mean(without) - np.array(without))
        statistics = []
        for labelling in parts.sets:
            # Parts stand in the order of groups, that of the first set first.
            flipped = labelling.reshape(10, 2)[:, 0] == 1
            differences = np.where(flipped, -1, 1) * (values[0] - values[1])
            error = differences.std() / 10**0.5
            statistics.append(abs(differences.mean()) / error)
        by_site.append(statistics)
        largest = np.maximum(largest, statistics)
    expected = [np.mean(largest >= row[0] - 1e-9) for row in by_site]
    np.testing.assert_allclose(compared(sites, sets, parts)["dispersion"].p, expected)


def test_what_must_not_move_the_comparison_does_not() -> None:
    sites, sets = pairs(20, tight=0.6)
    turned = torch.linalg.qr(noise(6, 6, seed=9))[0]
    parts = Parts(sets, 199, 0)
    plain = compared(sites, sets, parts)
    rotated = compared([7.0 * site @ turned + 3.0 for site in sites], sets, parts)
    # Either set may be moved and scaled by itself.
    moved = [site.clone() for site in sites]
    for site in moved:
        site[:20] = 0.1 * site[:20] - 8
    others = [rotated, compared(moved, sets, parts)]
    for name, numbers in plain.items():
        for other in others:
            for field in Difference._fields:
                np.testing.assert_allclose(
                    getattr(numbers, field), getattr(other[name], field), rtol=1e-6
                )
    swapped = sets._replace(sets=1 - sets.sets)
    mirrored = compared(sites, swapped, Parts(swapped, 199, 0))
    for name, numbers in plain.items():
        np.testing.assert_allclose(numbers.value, -mirrored[name].value)
        np.testing.assert_allclose(numbers.p, mirrored[name].p, atol=0.05)


def test_a_planted_difference_is_seen_and_its_interval_leaves_zero_out() -> None:
    sites, sets = pairs(40, tight=0.4)
    parts = Parts(sets, 199, 0)
    numbers = compared(sites, sets, parts)["dispersion"]
    assert parts.pairs == 40 and (numbers.p <= 0.01).all()
    assert (numbers.high < 0).all()
    # The test and the interval agree.
    for seed in range(3):
        sites, sets = pairs(16, tight=0.7, seed=seed)
        both = compared(sites, sets, Parts(sets, 399, seed))
        looser = both["dispersion"]
        outside = (looser.low > 0) | (looser.high < 0)
        assert (outside == (looser.p <= 0.05)).all()
        # How far neighbours may differ is known only where nothing differs.
        assert np.isnan(both["neighbour"].low).all()


def test_groups_swap_as_a_whole_and_labels_stay() -> None:
    _, sets = pairs(8, 3)
    parts = Parts(sets, 50, 0)
    rows = parts.sets[:, parts.of_row]
    assert parts.pairs == 8 and parts.sets.shape == (51, 16)
    for labelling in rows:
        for group in range(8):
            inside = sets.groups == group
            changed = labelling[inside] != sets.sets[inside]
            assert changed.all() or not changed.any()
    # Without pairs, texts of a class change places, and every set keeps its size.
    apart = sets._replace(groups=np.arange(len(sets.groups)))
    alone = Parts(apart, 50, 0)
    assert alone.pairs == 0 and alone.smallest_p is not None
    for labelling in alone.sets:
        for code in (0, 1):
            inside = apart.classes == code
            assert labelling[inside].sum() == apart.sets[inside].sum()


def test_where_all_states_are_equal_there_is_no_number() -> None:
    (site, _), sets = pairs(10)
    equal = site.clone()
    equal[:10] = 1.0
    numbers = compared([equal, site], sets, Parts(sets, 99, 0))
    for measure in numbers.values():
        for field in ("first", "value", "low", "high", "p"):
            assert np.isnan(getattr(measure, field)[0])
        assert np.isfinite(measure.p[1])


def test_few_pairs_say_that_nothing_can_be_shown() -> None:
    sites, sets = pairs(4, tight=0.1)
    parts = Parts(sets, 999, 0)
    assert parts.smallest_p == pytest.approx(1 / 8, abs=0.04)
    assert np.isnan(compared(sites, sets, parts)["dispersion"].low).all()


# --- The analysis


def labelled(
    end: str = "", labels: Any = LABELS, group: Any = range(16)
) -> hs.texts.Labelled:
    return hs.read(
        ([text + end for text in TEXTS], labels), group=group and list(group)
    )


def projected(first: Any, second: Any) -> hs.Result:
    data = {"short": first, "long": second}
    return hs.project(tiny("llama"), data, method="pca", sites="layer.0,layer.2")


def test_two_datasets_are_compared_and_the_findings_say_how() -> None:
    result = projected(labelled(), labelled(" and the mat"))
    (record,) = result.facts["comparisons"]
    assert (record["first"], record["second"]) == ("short", "long")
    assert record["pairs"] == record["groups"] == 16
    dispersion = result.data["dispersion"]
    # The last token is the same in all texts of "long", so that layer.0 is one point.
    assert np.isnan(dispersion.sel(dataset="long").values[0])
    assert np.isnan(result.data["dispersion_ratio_p"].values[0])
    ratio = result.data["dispersion_ratio"].values[1]
    assert ratio == pytest.approx(float(dispersion[0, 1] / dispersion[1, 1]))
    shares = result.data["neighbour"].values[:, 1]
    difference = result.data["neighbour_difference"].values[1]
    assert difference == pytest.approx(shares[0] - shares[1])
    assert record["dispersion"]["difference"] == pytest.approx(ratio)
    said = result.summary()
    assert "the two sides of 16 pairs were swapped" in said
    titles = [view.title for view in views_of(result) if isinstance(view, Lines)]
    assert any("The dispersion of “short”, divided by" in title for title in titles)
    # The same texts without groups have no pairs.
    apart = projected(labelled(group=None), labelled(" and the mat", group=None))
    assert apart.facts["comparisons"][0]["pairs"] == 0
    assert "32 groups of texts without a pair changed places" in apart.summary()


def test_a_list_of_datasets_is_named_by_place() -> None:
    data = [labelled(), labelled(" and the mat")]
    result = hs.project(tiny("llama"), data, method="pca", sites="layer.2")
    assert len(result.facts["comparisons"]) == 1
    assert list(result.data["dataset"].values) == ["the texts (0)", "the texts (1)"]


UNCOMPARED: list[tuple[Any, Any, str]] = [
    (
        labelled(),
        labelled(".", ["a"] * 8 + ["c"] * 8),
        "only one of them has “b” and “c”",
    ),
    (
        labelled("", ["a"] * 16),
        labelled(".", ["a"] * 16),
        "all points are of one class",
    ),
    (
        labelled("", ["a"] * 15 + ["b"]),
        labelled("!", ["a"] * 15 + ["b"]),
        "fewer than two independent texts",
    ),
    (
        labelled(),
        labelled(".", LABELS[::-1]),
        "other labels in “short” than in “long”",
    ),
]


@pytest.mark.parametrize(("first", "second", "why"), UNCOMPARED)
def test_datasets_that_cannot_be_compared_say_why(
    first: Any, second: Any, why: str
) -> None:
    result = projected(first, second)
    assert "comparisons" not in result.facts
    assert why in result.facts["not_compared"]
    assert f"not compared: {result.facts['not_compared']}." in result.summary()
