"""Check the numbers that the experiments print, where the truth is known."""

import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.places import ROOT

EXAMPLES = ROOT / "examples"
TEXTS, LAYERS, TRIALS = 24, 15, 2_000
RUNS = 1_000

Draw = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module", autouse=True)
def _examples_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


# --- The mean over texts


def held(numbers: np.ndarray, truth: float, comparisons: int = 1) -> np.ndarray:
    """Tell which intervals hold the true mean; texts are the first axis."""
    from over_texts import mean_over_texts

    mean = mean_over_texts(numbers, comparisons)
    return (mean.low <= truth) & (truth <= mean.high)


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(TEXTS, TRIALS))
    # Three standard errors of a share of 0.95 over 2,000 trials are 0.015.
    for planted in (0.0, 0.3):
        assert 0.935 <= held(planted + noise, planted).mean() <= 0.965
    # Skewed numbers such as KL; gamma with shape 4: its skewness is 1.
    skewed = np.random.default_rng(1).gamma(4.0, size=(TEXTS, TRIALS))
    assert 0.92 <= held(skewed, 4.0).mean() <= 0.965


def test_all_layers_are_held_together_and_a_planted_difference_is_seen() -> None:
    generator = np.random.default_rng(2)
    # Neighbouring layers are alike, as in a model: half of the noise is the text's own.
    shared = generator.normal(size=(TEXTS, 1, TRIALS))
    noise = shared + generator.normal(size=(TEXTS, LAYERS, TRIALS))
    assert held(noise, 0.0, LAYERS).all(0).mean() >= 0.935
    # Twelve standard errors of the mean over 24 texts are 2.4 standard deviations.
    planted = 2.4 + np.random.default_rng(3).normal(size=(TEXTS, TRIALS))
    assert held(planted, 0.0, LAYERS).mean() < 0.01


# --- Intervals over groups


def noise(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw differences whose mean is zero, one for each of 24 texts."""
    return rng.normal(size=24), np.arange(24)


def skewed(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw log ratios with a long tail: a few prompts move much more than others."""
    return rng.gamma(2.0, size=24) - 2.0, np.arange(24)


def grouped(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw successes whose probability belongs to a topic; on average it is a half."""
    topics = np.repeat(np.arange(12), 6)
    chance = rng.beta(1.5, 1.5, size=12)
    return (rng.random(len(topics)) < chance[topics]).astype(float), topics


def coverage(draw: Draw, truth: float, *, by_text: bool = False) -> float:
    """Return the share of intervals that hold the true mean."""
    from intervals import mean_interval

    rng = np.random.default_rng(0)
    count = 0
    for _ in range(RUNS):
        values, groups = draw(rng)
        mean = mean_interval(values, None if by_text else groups)
        count += mean.low <= truth <= mean.high
    return count / RUNS


@pytest.mark.parametrize(
    ("draw", "truth"), [(noise, 0.0), (skewed, 0.0), (grouped, 0.5)]
)
def test_intervals_hold_the_truth(draw: Draw, truth: float) -> None:
    assert 0.92 < coverage(draw, truth) < 0.98


def test_planted_effects_are_seen_and_texts_of_a_topic_belong_together() -> None:
    shifted = coverage(lambda rng: (rng.normal(1.0, size=24), np.arange(24)), 0.0)
    assert shifted < 0.05
    assert coverage(grouped, 0.5, by_text=True) < 0.9


def test_shares_and_medians_of_groups_hold_the_truth() -> None:
    from intervals import median_interval, share_interval

    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(36), [3, 2, 2, 2, 2, 2, *[1] * 30])
    shares = medians = 0
    for _ in range(RUNS):
        of_group = rng.normal(size=36)[groups]
        share = share_interval(of_group > 1.0, groups)
        # The chance that a standard normal number is above 1.
        shares += share.low <= 0.1587 <= share.high
        median = median_interval(np.exp(of_group), groups)
        medians += median.low <= 1.0 <= median.high
    assert shares / RUNS > 0.93 and medians / RUNS > 0.94
    # Where all agree, the interval has an extent.
    assert share_interval(np.zeros(20), np.arange(20)).high > 0.1


def test_rank_correlations_within_classes_hold_the_truth() -> None:
    from intervals import rank_correlation

    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), [3, 2, 2, 2, 2, 2, *[1] * 34])
    classes = groups % 2
    for shared, truth in ((0.0, 0.0), (0.5**0.5, 0.483)):
        count = 0
        for _ in range(RUNS // 2):
            common = rng.normal(size=40)[groups]
            noise = (1 - shared**2) ** 0.5 * rng.normal(size=(2, 40))[:, groups]
            # Both differ between the classes, which is no correlation within them.
            left, right = shared * common + noise + 5 * classes
            mean = rank_correlation(left, right, classes, groups)
            count += mean.low <= truth <= mean.high
        # Of a bivariate normal law with a correlation of 0.5, that of ranks is 0.483.
        assert 0.91 < count / (RUNS // 2) <= 1


# --- Labels of neighbours


@pytest.fixture(scope="module")
def corpus() -> dict[str, Any]:
    """Read the script without running it."""
    names = runpy.run_path(str(EXAMPLES / "corpus.py"))
    # Fewer shuffles: 60 runs in a few seconds.
    names["label_agreement"].__globals__["SHUFFLES"] = 199
    return names


def neighbourhoods(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw 60 queries and 10 neighbours of each, some of which are everybody's."""
    hubs = generator.zipf(1.5, 300).astype(float)
    numbers = generator.choice(300, 60, replace=False)
    rows = []
    for number in numbers:
        weight = hubs.copy()
        weight[number] = 0
        share = weight / weight.sum()
        rows.append(generator.choice(300, 10, replace=False, p=share))
    return np.array(rows), numbers


def test_labels_are_seen_where_they_agree_and_only_there(
    corpus: dict[str, Any],
) -> None:
    generator = np.random.default_rng(7)
    outside = 0
    for _ in range(60):
        neighbours, numbers = neighbourhoods(generator)
        labels = generator.permutation(np.repeat(["a", "b"], 150))
        share, (low, high) = corpus["label_agreement"](neighbours, numbers, labels)
        outside += not low <= share <= high
    # 5% of 60 runs is 3; more than 8 happens by chance in less than one of 200.
    assert outside <= 8
    neighbours, numbers = neighbourhoods(np.random.default_rng(8))
    labels = np.repeat(["a", "b"], 150)
    # Six in ten neighbours get a text with the label of the query's text.
    for row, number in zip(neighbours, numbers, strict=True):
        row[:6] = generator.choice(np.flatnonzero(labels == labels[number]), 6)
    share, (low, high) = corpus["label_agreement"](neighbours, numbers, labels)
    assert share > high > low


def test_the_text_of_a_query_is_not_its_neighbour(corpus: dict[str, Any]) -> None:
    nearest = np.array([[3, *range(10, 20)], [*range(10, 21)]])
    others = corpus["without_source"](nearest, np.array([3, 99]))
    assert others.tolist() == [list(range(10, 20)), list(range(10, 20))]


# --- Labels of syntax and meaning


def test_kinds_of_labels_differ_no_more_often_by_chance_than_is_said() -> None:
    difference = runpy.run_path(str(EXAMPLES / "syntax.py"))["difference"]
    rng = np.random.default_rng(0)
    held = wrong = seen = 0
    for _ in range(200):
        first, second = rng.normal(0.5, 0.15, size=(2, 6)).tolist()
        by_chance = difference(first, second)
        wrong += by_chance.p <= 0.05
        held += by_chance.low <= 0 <= by_chance.high
        seen += difference(first, [value + 0.4 for value in second]).p <= 0.05
    # Three standard errors of 5% over 200 runs are 0.046.
    assert wrong / 200 <= 0.1
    assert held / 200 >= 0.9
    assert seen / 200 > 0.95
    # Two labels of each kind can be dealt out in six ways: nothing can be shown.
    assert difference([0.1, 0.2], [0.8, 0.9]).p == pytest.approx(1 / 3)


def test_lexicons_share_no_word_and_classes_share_their_function_words() -> None:
    import grammar

    counts: dict[str, int] = {}
    for lexicon in grammar.lexicons():
        nouns = [noun for kind in lexicon.nouns.values() for noun in kind]
        for word in (*nouns, *lexicon.verbs, *lexicon.adjectives):
            counts[word] = counts.get(word, 0) + 1
    assert set(counts.values()) == {1}
    for label in grammar.RULES:
        data = grammar.sentences(label, 288)
        assert len(set(data.texts)) == 288
        sizes = [data.labels.count(value) for value in set(data.labels)]
        assert len(set(sizes)) == 1, label
    # "carry" becomes "carried", and "chase" "chasing".
    beginnings = tuple(word.rstrip("ey") for word in counts)
    for label in ("voice", "depth of embedding"):
        bags: dict[str, set[str]] = {}
        data = grammar.sentences(label, 240)
        for text, value in zip(data.texts, data.labels, strict=True):
            words = text.lower().replace(",", "").split()
            function = [word for word in words if not word.startswith(beginnings)]
            bags.setdefault(value, set()).add(" ".join(sorted(function)))
        first, second = bags.values()
        assert first == second


# --- Weights of 4 bits


def test_weights_of_4_bits_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    import torch
    from checkpoints import round_to_nf4

    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    packed = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    expected = functional.dequantize_4bit(*packed)
    assert torch.allclose(round_to_nf4(weight), expected, rtol=1e-5, atol=1e-6)


def test_checkpoints_are_saved_at_steps_that_double() -> None:
    from training import Size

    assert Size(steps=64).saved == [0, 1, 2, 4, 8, 16, 32, 64]
    assert Size(steps=8).saved == [0, 1, 2, 4, 8]


# --- Features that come again


def test_features_that_come_again_are_counted() -> None:
    import torch

    import hiddenscope as hs

    script = runpy.run_path(str(EXAMPLES / "dictionary.py"))
    drawn = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    fresh = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    first = hs.Dictionary.of(drawn, "layer.1")
    # Half of them come again, in another order and at another length.
    other = hs.Dictionary.of(torch.cat([fresh, 3 * drawn[:20]]), "layer.1")
    facts: dict[str, Any] = {}
    (line,) = script["found_again"](first, other, facts)
    assert facts["found again"]["another seed"]["above 0.9"] == 0.5
    assert facts["found again"]["shuffled"]["above 0.7"] == 0
    assert line.startswith("With another seed 50% of the features come again")


# --- Features that come again


def test_features_come_again_where_they_are_the_same_and_not_by_chance() -> None:
    import torch
    from dictionary import found_again

    import hiddenscope as hs

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 40, 256, generator=generator)
    one, other = (hs.Dictionary.of(directions, "layer.1") for directions in drawn)
    turned = hs.Dictionary.of(drawn[0].flip(0), "layer.1")
    facts: dict[str, Any] = {}
    assert "100% of the features" in found_again(one, turned, facts)[0]
    assert facts["found again"]["shuffled"]["above 0.7"] == 0
    found_again(one, other, facts)
    assert facts["found again"]["another seed"]["above 0.7"] == 0
