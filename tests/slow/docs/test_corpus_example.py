"""Check what the corpus experiment prints where the truth is known."""

import runpy
import sys
from typing import Any

import numpy as np
import pytest

from tests.places import ROOT

EXAMPLES = ROOT / "examples"
TEXTS, QUERIES, NEIGHBOURS = 300, 60, 10


@pytest.fixture(scope="module")
def corpus() -> dict[str, Any]:
    """Read the script without running it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        names = runpy.run_path(str(EXAMPLES / "corpus.py"))
    finally:
        sys.path.remove(str(EXAMPLES))
    # Fewer shuffles: 60 runs in a few seconds.
    names["label_agreement"].__globals__["SHUFFLES"] = 199
    return names


def neighbourhoods(
    generator: np.random.Generator,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draw queries and their neighbours, some of which are everybody's neighbours."""
    hubs = generator.zipf(1.5, TEXTS).astype(float)
    numbers = generator.choice(TEXTS, QUERIES, replace=False)
    rows = []
    for number in numbers:
        weight = hubs.copy()
        weight[number] = 0
        share = weight / weight.sum()
        rows.append(generator.choice(TEXTS, NEIGHBOURS, replace=False, p=share))
    return np.array(rows), numbers


def test_labels_that_mean_nothing_stay_within_the_shuffled(
    corpus: dict[str, Any],
) -> None:
    generator = np.random.default_rng(7)
    outside = 0
    runs = 60
    for _ in range(runs):
        neighbours, numbers = neighbourhoods(generator)
        labels = generator.permutation(np.repeat(["a", "b"], TEXTS // 2))
        share, (low, high) = corpus["label_agreement"](neighbours, numbers, labels)
        outside += not low <= share <= high
    # 5% of 60 runs is 3; more than 8 happens by chance in less than one of 200.
    assert outside <= 8


def test_labels_of_neighbours_are_seen_where_they_agree(corpus: dict[str, Any]) -> None:
    generator = np.random.default_rng(8)
    neighbours, numbers = neighbourhoods(generator)
    labels = np.repeat(["a", "b"], TEXTS // 2)
    # Six in ten neighbours get a text with the label of the query's text.
    for row, number in zip(neighbours, numbers, strict=True):
        same = np.flatnonzero(labels == labels[number])
        row[:6] = generator.choice(same, 6)
    share, (low, high) = corpus["label_agreement"](neighbours, numbers, labels)
    assert share > high > low


def test_the_text_of_a_query_is_not_its_neighbour(corpus: dict[str, Any]) -> None:
    nearest = np.array([[3, *range(10, 20)], [*range(10, 21)]])
    others = corpus["without_source"](nearest, np.array([3, 99]))
    assert others.tolist() == [list(range(10, 20)), list(range(10, 20))]
