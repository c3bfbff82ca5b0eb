"""Visibility over many texts: what is drawn is unbiased, intervals hold, and uniform
influence shows no law.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import hiddenscope as hs
from hiddenscope.analyses.visibility.decay import (
    Tallies,
    estimate,
    fit_law,
    jackknife,
)
from hiddenscope.analyses.visibility.sampling import DistanceWindow, draw_targets
from hiddenscope.modules.module_copy import private_copy, to_random
from hiddenscope.passes.jacobian import tape
from hiddenscope.results import findings_of
from hiddenscope.testing import tiny_model
from labs.calibrate.visibility import PlantedLaw, Texts, depth_trial, texts_trial

Tiny = Callable[..., hs.Model]
ALL = hs.Sampling(per_text=10**6)
FARTHEST = 6


def random_texts(count: int, tokens: int = 12, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return generator.integers(5, 60, (count, tokens)).tolist()


def full_maps(model: hs.Model, texts: list[list[int]]) -> list[Any]:
    maps = []
    for text in texts:
        data = hs.visibility(model, [text], sites="layer.*").data["l1"]
        maps.append(data.to_numpy().astype(np.float64))
    return maps


def test_with_every_state_drawn_the_averages_are_those_of_the_whole_maps() -> None:
    """A model of six layers: every target of the upper half sees three sites."""
    model, texts = hs.load((tiny_model("gpt2", layers=6), None)), random_texts(2)
    result = hs.visibility(model, texts, sites="layer.*", sampling=ALL)
    below, firsts, reach, columns, depths = [], [], [], [], []
    for influence in full_maps(model, texts):
        for place in range(FARTHEST + 1, 12):
            top = influence[-1, place, :-1]
            reach.append(top.sum(-1) / top.sum())
            firsts.append(top[0, place - FARTHEST] / top[0].sum())
            for site in range(1, len(influence)):
                seen = influence[site, place, :site]
                shares = seen / seen.sum(-1, keepdims=True)
                below.append(shares[-1, place - FARTHEST : place + 1][::-1])
                columns.append(shares[:, place].mean())
                if site >= 3:
                    nearest = seen.sum(-1)[::-1][:3]
                    depths.append(nearest / nearest.sum())
    data, found = result.data, result.facts["aligned"]
    means = [np.mean(rows, axis=0) for rows in (below, reach, depths)]
    np.testing.assert_allclose(data["decay_below"], means[0], rtol=1e-4)
    np.testing.assert_allclose(data["reach"][:-1], means[1], rtol=1e-4)
    np.testing.assert_allclose(data["decay_depth"][:3], means[2], rtol=1e-4)
    assert np.isnan(data["decay_depth"][3:]).all()
    assert float(data["decay_first"][-1]) == pytest.approx(np.mean(firsts), rel=1e-4)
    assert found["own_column"]["value"] == pytest.approx(np.mean(columns), rel=1e-4)
    assert found["targets"] == 2 * 6 * 5
    assert found["farthest"] == FARTHEST
    law = found["laws"][2]
    assert law["source"] == "depth"
    assert law["exponent"]["value"] == pytest.approx(fit_law(means[2]).exponent)
    depths, distances = np.linspace(0, 1, 7)[1:], data["mean_distance"].values[1:]
    slope, _ = np.polyfit(depths, distances, 1)
    assert found["locality"]["value"] == pytest.approx(slope, rel=1e-4)


def test_an_encoder_looks_both_ways(tiny: Tiny) -> None:
    model, texts = tiny("bert"), random_texts(2)
    result = hs.visibility(model, texts, sites="layer.*", sampling=ALL)
    below = []
    for influence in full_maps(model, texts):
        for site in range(1, len(influence)):
            for place in range(3, 9):
                seen = influence[site, place, site - 1]
                both = seen[place - 3 : place + 1][::-1] + seen[place : place + 4]
                below.append(both / 2 / seen.sum())
    assert result.facts["aligned"]["farthest"] == 3
    expected = np.mean(below, axis=0)
    np.testing.assert_allclose(result.data["decay_below"], expected, rtol=1e-4)


def test_the_interval_of_a_mean_is_students() -> None:
    numbers = np.random.default_rng(0).normal(size=12)
    sums = {"targets": np.ones((12, 1)), "sum": numbers}

    def statistics(part: Any) -> Any:
        return {"mean": part["sum"] / part["targets"].sum()}

    estimates, count = jackknife(sums, statistics)
    low, high = stats.t.interval(
        0.95, 10, numbers.mean(), stats.sem(numbers) * (11 / 10) ** 0.5
    )
    assert estimates["mean"] == pytest.approx((numbers.mean(), low, high))
    assert count == 12
    # One group with nearly all targets is worth no more than one.
    sums["targets"] = np.array([[1e6], *[[1.0]] * 11])
    wide, count = jackknife(sums, lambda part: {"mean": part["sum"]})
    half = wide["mean"].high - wide["mean"].value
    assert count == pytest.approx(1, abs=1e-4)
    deviation = (11**2 / 10 * numbers.var()) ** 0.5
    assert half == pytest.approx(stats.t.ppf(0.975, 1) * deviation)


@pytest.mark.slow
def test_drawn_states_estimate_the_whole_maps_without_bias(tiny: Tiny) -> None:
    """The mean over 24 draws is the full average up to chance, and intervals hold."""
    model, texts = tiny("gpt2"), random_texts(8)
    full = hs.visibility(model, texts, sites="layer.*", sampling=ALL).data
    few = hs.Sampling(per_text=3)
    drawn: dict[str, list[Any]] = {"decay_below": [], "own_below": []}
    held = []
    for seed in range(24):
        data = hs.visibility(
            model, texts, sites="layer.*", sampling=few, seed=seed
        ).data
        for name, found in drawn.items():
            found.append(data[name].to_numpy()[1:])
        low, high = data["decay_below_low"], data["decay_below_high"]
        inside = (low <= full["decay_below"]) & (full["decay_below"] <= high)
        held.append(float(inside.mean()))
    for name, found in drawn.items():
        error = np.std(found, axis=0, ddof=1) / 24**0.5
        off = np.mean(found, axis=0) - full[name].to_numpy()[1:]
        assert (np.abs(off) <= 4 * error).all(), name
    assert np.mean(held) >= 0.9


def test_every_state_is_drawn_as_often_as_every_other() -> None:
    generator, counts = np.random.default_rng(0), Counter()
    runs, drawn = 4_000, 5
    for _ in range(runs):
        targets = draw_targets(range(1, 4), range(4, 11), drawn, generator)
        assert len(targets) == drawn == len(set(targets))
        counts.update(targets)
    expected = runs * drawn / 21
    assert len(counts) == 21
    # Fewer than five standard deviations of a count of independent draws.
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def test_uniform_influence_shows_no_decay_and_no_locality() -> None:
    """Attention at initialisation averages uniformly, 1 / (place + 1)."""
    window = DistanceWindow.of(33, causal=True)
    tallies = Tallies(8, 4, window)
    generator = np.random.default_rng(0)
    for batch in range(8):
        for target in draw_targets(range(1, 4), window.places(33), 6, generator):
            influence = np.zeros((4, 33))
            influence[: target.row, : target.token + 1] = 1 / (target.token + 1)
            tallies.add(batch, target, influence)
    estimates, _ = estimate(tallies)
    for name in ("exponent_below", "exponent_first", "locality_trend"):
        assert float(estimates[name].value) == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(estimates["mean_distance"].value[1:], 17 / 2)


def test_each_law_is_told_from_the_other() -> None:
    distances = np.arange(1, 33)
    power = fit_law(0.3 * distances**-0.7)
    assert power.exponent == pytest.approx(0.7)
    assert power.explained == pytest.approx(1)
    assert 0 < power.advantage < 1
    exponential = fit_law(0.3 * np.exp(-0.1 * distances))
    assert exponential.rate == pytest.approx(0.1)
    assert exponential.advantage < 0
    assert np.isnan(fit_law(np.array([0.5, 0.0, 0.1])).exponent)


@pytest.mark.slow
def test_intervals_hold_planted_truths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick slice of `make calibrate`: 60 samples of 20 texts."""
    monkeypatch.setattr("labs.calibrate.visibility.ALL_TEXTS", 4_000)
    # Three standard errors of a share of 60.
    least = 0.95 - 3 * (0.95 * 0.05 / 60) ** 0.5
    laws: tuple[PlantedLaw, ...] = ("power", "none")
    for law in laws:
        records = [texts_trial(seed, Texts(20, 1, law)) for seed in range(500, 560)]
        for name in ("distance", "exponent", "own", "trend"):
            assert np.mean([record[name] for record in records]) >= least, name
        assert np.mean([record["wrong"] for record in records]) <= 0.05 + 0.085
    held = [depth_trial(seed, Texts(20, 1, "power")) for seed in range(500, 560)]
    assert np.mean(held) >= least


def test_texts_are_dealt_to_a_few_batches_however_many_they_are(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenscope.analyses.visibility.averages.BATCHES", 4)
    few = hs.Sampling(per_text=1)
    texts = random_texts(10, 8)
    result = hs.visibility(tiny("gpt2"), texts, sites="layer.0-1", sampling=few)
    found = result.facts["aligned"]
    assert (found["groups"], found["targets"]) == (10, 10)
    # Batches of three and of two texts count as somewhat fewer equal ones.
    assert found["batches"] == round(10**2 / (9 + 9 + 4 + 4), 1)


def test_random_weights_show_no_law_and_nothing_of_the_module_changes(
    hanging: Callable[[Any], Any],
) -> None:
    module = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    hooks, state = hanging(module), torch.random.get_rng_state()
    result = hs.visibility(
        hs.load((module, None)),
        random_texts(6),
        sampling=hs.Sampling(per_text=4, baseline="random"),
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert hanging(module) == hooks
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    sources = result.facts["aligned"]["random"]
    assert [one["source"] for one in sources] == ["below", "first", "depth"]
    # The model's own weights are random here, so there is nothing to tell apart.
    assert abs(sources[0]["exponent"]["value"]) < 0.2
    assert "random weights" in result.summary()
    assert "random_decay_below" in result.data
    # What is said of them follows the interval of their exponent.
    words = {"above": "falls too", "below": "grows", "undecided": "not found to fall"}
    for decays, expected in words.items():
        sources[0]["decays"] = decays
        start = "With random weights, the influence of the site"
        (sentence,) = (one for one in findings_of(result) if one.startswith(start))
        assert [phrase for phrase in words.values() if phrase in sentence] == [expected]


def test_random_weights_are_run_in_the_places_of_the_model(tiny: Tiny) -> None:
    """The copy's states are those that its own module gives, at the same sites."""
    model, text = tiny("gpt2"), random_texts(1)
    copy = private_copy(model.module, to_random(3))
    of_copy = copy(torch.tensor(text), output_hidden_states=True).hidden_states
    found = model.randomised(3)
    sites = model.anatomy.select("layer.*,final")
    assert found.anatomy.select("layer.*,final") == sites
    of_found, of_model = tape(found, text, sites), tape(model, text, sites)
    for place, site in enumerate((*sites[:-2], sites[-1])):
        assert torch.equal(of_copy[place][0], of_found.values(site))
        assert not torch.equal(of_found.values(site), of_model.values(site))


def test_a_frobenius_norm_can_be_averaged_too(tiny: Tiny) -> None:
    for measure in ("frobenius", "relative"):
        result = hs.visibility(
            tiny("gpt2"),
            random_texts(3),
            influence=measure,  # type: ignore[arg-type]
            sites="layer.0,layer.2",
            sampling=hs.Sampling(per_text=2, probes=4),
        )
        assert result.facts["probes"] == 4
        assert 0 < result.facts["aligned"]["own_column"]["value"] < 1


def test_what_cannot_be_aligned_is_said(tiny: Tiny) -> None:
    gpt2, t5, errors = tiny("gpt2"), tiny("t5"), hs.errors
    texts = random_texts(2)
    for model, wrong, match in (
        (gpt2, {"texts": [[5, 6, 7], [5, 6, 8]]}, "the shortest has 3 tokens"),
        (gpt2, {"texts": texts[:1] * 2}, "all belong to one group"),
        (gpt2, {"texts": texts, "sites": "layer.1"}, "no sites below"),
        (t5, {"texts": t5.encode(texts, targets=texts)}, "no distances between"),
    ):
        with pytest.raises(errors.TextError, match=match):
            hs.visibility(model, **wrong)
    with pytest.raises(errors.StatesError, match="per_text must be an integer >= 1"):
        hs.Sampling(per_text=0)
    with pytest.raises(errors.StatesError, match="probes must be an integer >= 2"):
        hs.Sampling(probes=1)
