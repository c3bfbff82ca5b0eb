"""Probes that pool the scores of tokens, and probes tested on other texts."""

from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import Error
from hiddenscope.sites import Site
from hiddenscope.states import Source, States, Tokens
from hiddenscope.texts import Labelled

WIDTH = 6


def texts_of(seed: int, count: int, *, signal: float = 4.0, shift: int = 0) -> States:
    """Draw states of texts; those of odd number have a signal at two tokens."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(8, 16, count)
    rows = []
    for number, length in enumerate(lengths):
        states = generator.normal(size=(length, WIDTH))
        if number % 2:
            states[3 + shift : 5 + shift, 0] += signal
        rows.append(states)
    tokens = Tokens(
        None,
        text=np.repeat(np.arange(count), lengths),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        ids=generator.integers(5, 10**6, int(lengths.sum())),
        strings=tuple("x" for _ in range(int(lengths.sum()))),
        count=count,
    )
    values = torch.from_numpy(np.concatenate(rows))[None]
    return States((Site(1),), values, tokens, Source("drawn"))


def labels(count: int) -> list[str]:
    return ["calm", "loud"] * (count // 2)


@pytest.fixture(scope="module", params=["rolling:2", "softmax", "attention"])
def result(request: pytest.FixtureRequest) -> hs.Result:
    return hs.probe(
        texts_of(0, 30),
        labels(30),
        test=(texts_of(1, 60, shift=2), labels(60)),
        pool=request.param,
    )


def test_a_pooling_is_learnt_in_the_folds_and_tested(result: hs.Result) -> None:
    facts = result.facts
    assert facts["best"]["accuracy"] > 0.75 and facts["best"]["p"] == 0.05
    assert facts["above_chance_at"] == ["layer.1"]
    assert facts["permutations"] == 19 and "mix" not in facts
    assert facts["test"]["texts"] == 60 and facts["test"]["shared"] == 0
    low, high = facts["test"]["interval"]
    assert low < facts["test"]["accuracy"] <= high
    assert "learnt again for 19 permutations" in result.summary()
    assert "where scores of tokens are pooled they were not calib" in result.summary()
    probe = hs.Probe.of(result)
    assert probe.pool == facts["token"]
    states = texts_of(1, 60, shift=2)
    parts = states["layer.1"].split(states.tokens.lengths.tolist())
    assert probe.score(list(parts), labels(60)) == facts["test"]["accuracy"]


def test_noise_is_not_above_chance() -> None:
    """At most one in twenty draws may be, by the permutations."""
    found = 0
    for seed in range(2):
        drawn = texts_of(seed, 20, signal=0)
        facts = hs.probe(drawn, labels(20), pool="softmax").facts
        found += facts["best"]["p"] <= 0.05
    assert found <= 1


def test_a_pooling_of_scores_takes_two_classes() -> None:
    drawn = texts_of(0, 12)
    for given, task in ((list("abc") * 4, "classify"), (range(12), "regress")):
        with pytest.raises(Error, match="two classes") as raised:
            hs.probe(drawn, list(given), task=task, pool="rolling")  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)


def test_a_saved_probe_with_attention_scores_the_same(tmp_path: Any) -> None:
    states = texts_of(0, 20)
    probe = hs.Probe.of(hs.probe(states, labels(20), pool="attention"))
    probe.save(tmp_path / "a.safetensors")
    loaded = hs.Probe.load(tmp_path / "a.safetensors")
    parts = list(states["layer.1"].split(states.tokens.lengths.tolist()))
    np.testing.assert_array_equal(
        loaded.decision_function(parts), probe.decision_function(parts)
    )
    assert probe.decision_function(parts).shape == (20,)


def test_a_test_equals_scoring_by_hand() -> None:
    train, other = texts_of(0, 24), texts_of(1, 20)
    result = hs.probe(train, labels(24), test=(other, labels(20)), pool="mean")
    probe = hs.Probe.of(result, "layer.1")
    expected = probe.score(other.pool("mean", "layer.1"), labels(20))
    assert result.facts["test"]["accuracy"] == expected
    assert float(result.data["test_accuracy"][0]) == expected
    assert "On the labels, 20 other texts" in result.summary()
    numbers = hs.probe(
        train,
        np.arange(24.0).tolist(),
        test=(other, np.arange(20.0).tolist()),
        task="regress",
        pool="mean",
    )
    probe = hs.Probe.of(numbers, "layer.1")
    value = probe.score(other.pool("mean", "layer.1"), np.arange(20.0))
    assert numbers.facts["test"]["r2"] == pytest.approx(value)
    assert "interval" not in numbers.facts["test"]
    assert "its uncertainty is not known" in numbers.summary()


def test_a_test_says_where_the_probe_rings_and_what_it_catches() -> None:
    """Each number is that of the threshold which Python sets on the same texts."""
    other = texts_of(1, 640, shift=2)
    result = hs.probe(
        texts_of(0, 30), labels(30), test=(other, labels(640)), pool="softmax"
    )
    test, probe = result.facts["test"], hs.Probe.of(result)
    parts = other["layer.1"].split(other.tokens.lengths.tolist())
    peaks = np.array([probe.so_far(probe.readings(part))[1:].max() for part in parts])
    assert test["negatives"] == 320
    assert [alarm["rate"] for alarm in test["alarms"]] == [0.05, 0.01, 0.001]
    assert [alarm["needed"] for alarm in test["alarms"]] == [59, 299, 2995]
    for alarm in test["alarms"][:2]:
        expected = probe.threshold(peaks[::2], false_positives=alarm["rate"])
        assert {name: alarm[name] for name in ("value", "alarms", "at_most")} == {
            "value": expected.value,
            "alarms": expected.alarms,
            "at_most": expected.at_most,
        }
        assert (peaks[::2] > alarm["value"]).sum() == alarm["alarms"]
        assert alarm["caught"] == (peaks[1::2] > alarm["value"]).mean()
        low, high = alarm["interval"]
        assert 0 < low < alarm["caught"] <= high <= 1
    assert "value" not in test["alarms"][2]
    said = result.summary()
    assert "For at most 1% of “calm” to ring" in said and "of “loud”" in said
    assert "that takes 2,995 that are independent, and there are 320." in said


def test_a_group_of_negatives_counts_by_its_loudest_text() -> None:
    other = texts_of(1, 240)
    # Pairs of calm texts, and pairs of loud ones.
    groups = [f"{k % 2} {k // 4}" for k in range(240)]
    texts = tuple(map(str, range(240)))
    data = Labelled(texts, tuple(labels(240)), "pairs", tuple(groups))
    result = hs.probe(texts_of(0, 12), labels(12), test=(other, data), pool="rolling:2")
    test, probe = result.facts["test"], hs.Probe.of(result)
    parts = other["layer.1"].split(other.tokens.lengths.tolist())
    peaks = np.array([probe.highest(part) for part in parts])
    loudest = np.maximum(peaks[0::4], peaks[2::4])
    assert test["negatives"] == 60
    first = test["alarms"][0]
    assert first["value"] == probe.threshold(loudest, false_positives=0.05).value
    assert "value" not in test["alarms"][1]


def test_the_bound_on_false_alarms_holds_on_fresh_texts() -> None:
    drawn, fresh = texts_of(0, 640, signal=0), texts_of(50, 2000, signal=0)
    result = hs.probe(
        texts_of(90, 30), labels(30), test=(drawn, labels(640)), pool="softmax"
    )
    probe = hs.Probe.of(result)
    parts = fresh["layer.1"].split(fresh.tokens.lengths.tolist())
    peaks = np.array([probe.highest(part) for part in parts])
    alarm = result.facts["test"]["alarms"][0]
    # Two standard errors of 2,000 texts.
    assert (peaks > alarm["value"]).mean() <= alarm["at_most"] + 0.01
    assert (peaks > alarm["value"]).mean() > 0.01
    # Without a signal in the test nothing more is caught than rings by chance.
    assert alarm["interval"][0] <= 0.05


def test_other_poolings_say_nothing_of_alarms() -> None:
    """Their tokens are not held, and a text rings at any of them."""
    for pool in ("mean", "last"):
        test = (texts_of(1, 160), labels(160))
        found = hs.probe(texts_of(0, 30), labels(30), test=test, pool=pool)
        assert "alarms" not in found.facts["test"]


TEXTS = [f"number {k} is {'good' if k % 2 else 'bad'} and {k * k}" for k in range(24)]
SIGNS = [k % 2 for k in range(24)]


def grouped(texts: list[str], signs: list[int], groups: list[int]) -> Any:
    rows = zip(texts, signs, groups, strict=True)
    names = ("text", "label", "group")
    return hs.read([dict(zip(names, row, strict=True)) for row in rows], group="group")


@pytest.fixture(scope="module")
def model() -> hs.Model:
    from hiddenscope.testing import tiny_model, tiny_tokenizer

    return hs.load((tiny_model("llama"), tiny_tokenizer()))


def test_texts_of_the_training_data_are_left_out_with_their_group(
    model: hs.Model,
) -> None:
    fresh = [f"another one {k} of {k % 3}" for k in range(8)]
    copied = [*fresh, TEXTS[0].upper(), "a paraphrase of it"]
    test = grouped(copied, [*SIGNS[:8], 0, 0], [*range(8), 99, 99])
    result = hs.probe(model, (TEXTS, SIGNS), test=test, sites="layer.1")
    assert result.facts["test"]["shared"] == 2
    assert result.facts["test"]["texts"] == 8
    assert "2 rows left out of the test" in result.summary()


def test_a_bad_test_is_refused_in_one_sentence(model: hs.Model) -> None:
    data, sites = (TEXTS, SIGNS), "layer.1"
    states = model.capture(TEXTS, sites)
    cases: list[tuple[Any, Any, Any, str]] = [
        (model, data, data, "are in the training data"),
        (model, data, (["new", "text"], [0, 7]), "class '7' is not in the training"),
        (states, SIGNS, SIGNS, r"test=\(states, labels\)"),
        (states, SIGNS, (TEXTS, SIGNS), r"test=\(states, labels\)"),
        (states, SIGNS, (states, SIGNS, 3), r"test=\(states, labels\)"),
    ]
    for source, given, test, words in cases:
        with pytest.raises(Error, match=words) as raised:
            hs.probe(source, given, test=test, sites=sites)
        assert "\n" not in str(raised.value)


def test_encoded_texts_keep_the_groups_of_what_was_read(model: hs.Model) -> None:
    read = grouped(TEXTS, SIGNS, [k // 4 for k in range(24)])
    inputs = model.encode(TEXTS, truncate=True)
    cut = hs.probe(model, (inputs, read), sites="layer.1")
    assert cut.facts == hs.probe(model, read, sites="layer.1").facts
