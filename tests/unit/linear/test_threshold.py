"""The threshold of a probe: exact, and refused where there are too few negatives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta

import hiddenscope as hs
from hiddenscope.errors import StatesError
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer


def fitted() -> hs.Probe:
    return hs.Probe(site="layer.1").fit(np.eye(4), [0, 1, 0, 1])


def test_the_bound_is_that_of_an_order_statistic() -> None:
    scores = np.random.default_rng(0).normal(size=1000)
    found = fitted().threshold(scores, false_positives=0.02)
    assert found.alarms == int((scores > found.value).sum()) > 0
    # The share of uniform numbers above the (alarms + 1)-th highest of 1,000.
    drawn = np.random.default_rng(1).random((4000, 1000))
    drawn.partition(found.alarms, 1)
    assert np.mean(drawn[:, found.alarms] <= found.at_most) == pytest.approx(
        0.95, abs=0.01
    )
    assert found.at_most <= 0.02
    # One alarm more would allow for too many.
    assert beta.ppf(0.95, found.alarms + 2, 1000 - found.alarms - 1) > 0.02


def test_a_rate_takes_the_rule_of_three() -> None:
    with pytest.raises(StatesError, match="that takes 2,995, and there are 2,994"):
        fitted().threshold(np.arange(2994), false_positives=0.001)
    found = fitted().threshold(np.arange(2995), false_positives=0.001)
    assert found.alarms == 0 and found.value == 2994


def test_equal_scores_do_not_ring() -> None:
    found = fitted().threshold(np.zeros(400), false_positives=0.05)
    assert found.alarms == 0 and found.value == 0


@pytest.mark.parametrize(
    ("negatives", "rate", "words"),
    [
        ([], 0.1, "not the shape"),
        ([1.0, np.nan], 0.1, "missing, NaN"),
        ([[1.0]], 0.1, "not the shape"),
        ([1.0] * 99, 0.0, "a rate is from 0 to 1"),
        ([1.0] * 99, 1.5, "a rate is from 0 to 1"),
        (["a"], 0.1, "labels"),
        (None, 0.1, "missing, NaN"),
        (3.0, 0.1, "not the shape"),
    ],
)
def test_bad_negatives_are_refused(negatives: Any, rate: float, words: str) -> None:
    with pytest.raises(StatesError, match=words) as raised:
        fitted().threshold(negatives, false_positives=rate)
    assert "\n" not in str(raised.value)


def test_labels_that_are_missing_are_refused() -> None:
    for task in ("classify", "regress"):
        with pytest.raises(StatesError, match="missing, NaN or infinite"):
            hs.Probe(task).fit(np.eye(4), [0.0, np.nan, 0.0, 1.0])  # type: ignore[arg-type]


def test_states_count_by_the_highest_score_of_a_text(tmp_path: Path) -> None:
    model = hs.load((tiny_model("llama"), None))
    texts = [[5 + k, 6, 7, 9 + k % 5] for k in range(40)]
    states = model.capture(texts, "layer.1")
    probe = hs.Probe(site="layer.1").fit(states["layer.1"], [k % 2 for k in range(160)])
    by_text = probe.decision_function(states["layer.1"]).reshape(40, 4)
    # The first token, whose state may be a hundred times as large, does not count.
    assert probe.threshold(states, false_positives=0.2).value in by_text[:, 1:].max(1)
    probe.pool = "mean"
    so_far = np.cumsum(by_text, 1) / np.arange(1, 5)
    found = probe.threshold(states, false_positives=0.2)
    assert np.isclose(so_far[:, 1:].max(1), found.value).any()
    probe.save(tmp_path / "probe.safetensors")
    loaded = hs.Probe.load(tmp_path / "probe.safetensors")
    assert loaded.threshold_ == found and loaded.pool == "mean"


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load((tiny_model("llama"), tiny_tokenizer()))


def test_copies_and_groups_count_once_by_the_loudest(model: hs.Model) -> None:
    """Four copies of forty texts, or forty groups of four, are forty."""
    probe = hs.Probe(site="layer.1").fit(
        np.random.default_rng(0).normal(size=(9, 64)), [0, 1, 1] * 3
    )
    words = [
        f"{k * k * 7919 + 13} {k % 7}{k % 11} {chr(97 + k % 26)}" for k in range(160)
    ]
    some = model.capture(words[:40], "layer.1")
    copied = model.capture(
        [f"{t}!" for t in words[:40] * 2] + words[:40] * 2, "layer.1"
    )
    with pytest.raises(StatesError, match="that takes 59, and there are 40"):
        probe.threshold(copied, false_positives=0.05)
    once = probe.threshold(some, false_positives=0.1)
    found = probe.threshold(copied, false_positives=0.1)
    assert (found.negatives, found.alarms) == (40, once.alarms)
    assert found.value >= once.value
    every = model.capture(words, "layer.1")
    data = hs.read(words, group=[k % 40 for k in range(160)])
    grouped = probe.threshold((every, data), false_positives=0.1)
    lengths = every.tokens.lengths.tolist()
    peaks = [probe.highest(part) for part in every["layer.1"].split(lengths)]
    loudest = np.reshape(peaks, (4, 40)).max(0)
    assert grouped.value == probe.threshold(loudest, false_positives=0.1).value
    assert grouped.negatives == 40
    with pytest.raises(StatesError, match="has other texts than the states"):
        probe.threshold((every, hs.read(words[::-1])), false_positives=0.1)


def test_texts_that_nearly_repeat_another_are_counted(model: hs.Model) -> None:
    probe = hs.Probe(site="layer.1").fit(np.eye(64), [0, 1] * 32)
    texts = [
        f"the old harbour of {chr(97 + k)}{k} is quiet {n}"
        for k in range(20)
        for n in "ab"
    ]
    found = probe.threshold(model.capture(texts, "layer.1"), false_positives=0.1)
    assert found.near_duplicates > 20
    assert f"near_duplicates={found.near_duplicates}" in str(found)


def test_texts_that_trained_the_probe_are_refused(
    model: hs.Model, tmp_path: Path
) -> None:
    texts = [
        f"number {k} is {'good' if k % 2 else 'bad'} and {k * k}" for k in range(40)
    ]
    result = hs.probe(model, (texts, [k % 2 for k in range(40)]), sites="layer.1")
    path = tmp_path / "probe.nc"
    result.save(path)
    probe = hs.Probe.of(hs.Result.load(path))
    probe.save(tmp_path / "probe.safetensors")
    for same in (probe, hs.Probe.load(tmp_path / "probe.safetensors")):
        fresh = [f"another {k}" for k in range(60)]
        same.threshold(model.capture(fresh, "layer.1"), false_positives=0.05)
        seen = model.capture([*fresh, texts[0].upper(), texts[3]], "layer.1")
        with pytest.raises(StatesError, match="2 of the 62 texts trained the probe"):
            same.threshold(seen, false_positives=0.05)
    # Vectors without texts cannot be told apart from others.
    vectors = hs.States(
        (Site(1),),
        torch.randn(1, 60, 64),
        hs.Tokens(None, range(60), [0] * 60, [-1] * 60, ("",) * 60),
        hs.Source("drawn"),
    )
    unknown = hs.Probe.of(hs.probe(vectors, [0, 1] * 30))
    assert unknown.threshold(vectors, false_positives=0.05).negatives == 60


def test_a_probe_that_is_fitted_again_begins_anew() -> None:
    probe = fitted()
    probe.pool, probe.query_ = "attention", np.ones(4)
    probe.threshold(np.arange(99), false_positives=0.1)
    probe.fit(np.eye(3), [0, 1, 1])
    assert (probe.pool, probe.query_, probe.threshold_) == ("", None, None)


def test_a_threshold_is_of_two_classes() -> None:
    three = hs.Probe().fit(np.eye(3), [0, 1, 2])
    line = hs.Probe("regress").fit(np.eye(3), [0.0, 1.0, 2.0])
    for probe in (hs.Probe(), three, line):
        with pytest.raises(StatesError, match="not fitted, or not to two classes"):
            probe.threshold(np.arange(99), false_positives=0.1)
