"""Visibility over many texts: what is drawn is unbiased, intervals hold, and uniform
influence shows no law.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from calibrate.visibility import Texts, depth_trial, texts_trial
from hiddenscope.analyses.visibility.decay import estimate
from hiddenscope.analyses.visibility.laws import fit_law
from hiddenscope.analyses.visibility.random_weights import RandomModel
from hiddenscope.analyses.visibility.sampling import DistanceWindow, draw_targets
from hiddenscope.analyses.visibility.tallies import BATCHES, Tallies
from hiddenscope.cli.main import app
from hiddenscope.passes.jacobian import tape
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import views_of
from hiddenscope.views.kinds.visibility import findings
from hiddenscope.views.values import Lines

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


def shares_below(maps: list[Any], places: range) -> Any:
    """The mean share [distance] of the site below, over all targets of full maps."""
    rows = []
    for influence in maps:
        for site in range(1, len(influence)):
            for place in places:
                seen = influence[site, place, site - 1]
                back = [seen[place - distance] for distance in range(FARTHEST + 1)]
                rows.append(np.array(back) / seen.sum())
    return np.mean(rows, axis=0)


def test_with_every_state_drawn_the_averages_are_those_of_the_whole_maps(
    tiny: Tiny,
) -> None:
    model, texts = tiny("gpt2"), random_texts(3)
    result = hs.visibility(model, texts, sites="layer.*", sampling=ALL)
    maps = full_maps(model, texts)
    expected = shares_below(maps, range(FARTHEST + 1, 12))
    np.testing.assert_allclose(result.data["decay_below"], expected, rtol=1e-4)
    tops, firsts, columns = [], [], []
    for influence in maps:
        for place in range(FARTHEST + 1, 12):
            top = influence[-1, place, :-1]
            tops.append(top.sum(-1) / top.sum())
            firsts.append(top[0, place - FARTHEST] / top[0].sum())
            for site in range(1, len(influence)):
                seen = influence[site, place, :site]
                columns.append((seen[:, place] / seen.sum(-1)).mean())
    np.testing.assert_allclose(
        result.data["reach"].to_numpy()[:-1], np.mean(tops, axis=0), rtol=1e-4
    )
    assert float(result.data["decay_first"][-1]) == pytest.approx(
        np.mean(firsts), rel=1e-4
    )
    found = result.facts["aligned"]
    assert found["own_column"]["value"] == pytest.approx(np.mean(columns), rel=1e-4)
    assert found["targets"] == 3 * 3 * 5
    assert found["farthest"] == FARTHEST


def test_drawn_states_estimate_the_whole_maps_without_bias(tiny: Tiny) -> None:
    """The mean over 24 draws is the full average up to chance, and intervals hold."""
    model, texts = tiny("gpt2"), random_texts(6)
    full = hs.visibility(model, texts, sites="layer.*", sampling=ALL).data
    few = hs.Sampling(per_text=3)
    names = ("decay_below", "own_below", "mean_distance")
    for name in names:
        assert np.isfinite(full[name].to_numpy()[1:]).all()
    drawn: dict[str, list[Any]] = {name: [] for name in names}
    held = []
    for seed in range(24):
        data = hs.visibility(
            model, texts, sites="layer.*", sampling=few, seed=seed
        ).data
        for name in names:
            drawn[name].append(data[name].to_numpy()[1:])
        truth = full["decay_below"]
        inside = (data["decay_below_low"] <= truth) & (
            truth <= data["decay_below_high"]
        )
        held.append(float(inside.mean()))
    for name in ("decay_below", "own_below"):
        error = np.std(drawn[name], axis=0, ddof=1) / 24**0.5
        off = np.mean(drawn[name], axis=0) - full[name].to_numpy()[1:]
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
    assert float(estimates["exponent_below"].value) == pytest.approx(0, abs=1e-9)
    assert float(estimates["exponent_first"].value) == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(estimates["mean_distance"].value[1:], 17 / 2)
    assert float(estimates["locality_trend"].value) == pytest.approx(0, abs=1e-9)


def test_each_law_is_told_from_the_other() -> None:
    distances = np.arange(1, 33)
    power = fit_law(0.3 * distances**-0.7)
    assert power.exponent == pytest.approx(0.7)
    assert power.advantage > 0
    exponential = fit_law(0.3 * np.exp(-0.1 * distances))
    assert exponential.rate == pytest.approx(0.1)
    assert exponential.advantage < 0
    assert np.isnan(fit_law(np.array([0.5, 0.0, 0.1])).exponent)


@pytest.mark.parametrize("law", ["power", "none"])
def test_intervals_hold_planted_truths(
    law: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick slice of `make calibrate`: 60 samples of 20 texts."""
    monkeypatch.setattr("calibrate.visibility.ALL_TEXTS", 4_000)
    records = [texts_trial(seed, Texts(20, 1, law)) for seed in range(500, 560)]
    for name in ("distance", "exponent", "own", "trend"):
        held = np.mean([record[name] for record in records])
        # Three standard errors of a share of 60.
        assert held >= 0.95 - 3 * (0.95 * 0.05 / 60) ** 0.5, name
    assert np.mean([record["wrong"] for record in records]) <= 0.05 + 0.085


def test_the_interval_of_the_law_by_depth_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("calibrate.visibility.ALL_TEXTS", 4_000)
    held = [depth_trial(seed, Texts(20, 1, "power")) for seed in range(500, 560)]
    assert np.mean(held) >= 0.95 - 3 * (0.95 * 0.05 / 60) ** 0.5


def test_copies_of_a_text_are_one_group_and_make_no_interval_narrower(
    tiny: Tiny,
) -> None:
    model, texts = tiny("gpt2"), random_texts(4)
    once = hs.visibility(model, texts, sampling=ALL)
    twice = hs.visibility(model, texts * 2, sampling=ALL)
    assert twice.facts["aligned"]["groups"] == 4
    for end in ("", "_low", "_high"):
        np.testing.assert_allclose(
            twice.data[f"decay_below{end}"], once.data[f"decay_below{end}"], rtol=1e-5
        )


def test_groups_of_the_data_are_kept_together(tiny: Tiny) -> None:
    words = [f"the cats sat on the mat and the dog number {k} ran" for k in range(6)]
    rows = [{"text": text, "topic": k // 2} for k, text in enumerate(words)]
    data = hs.read(rows, text="text", group="topic")
    result = hs.visibility(tiny("llama"), data)
    assert result.facts["aligned"]["groups"] == 3
    assert "3 groups" in result.summary()


def test_memory_does_not_grow_with_the_number_of_texts() -> None:
    sizes = []
    for texts in (BATCHES, 10 * BATCHES):
        tallies = Tallies(min(BATCHES, texts), 4, DistanceWindow.of(20, causal=True))
        sizes.append(sum(array.nbytes for array in tallies.sums.values()))
    assert sizes[0] == sizes[1]
    # Batches of three and of four texts count as somewhat fewer equal ones.
    assert BATCHES - 2 < estimate_batches(200) <= BATCHES


def estimate_batches(texts: int) -> float:
    model = hs.load((tiny_model("gpt2"), None))
    few = hs.Sampling(per_text=1)
    result = hs.visibility(
        model, random_texts(texts, 8), sites="layer.0,layer.1", sampling=few
    )
    batches: float = result.facts["aligned"]["batches"]
    return batches


def test_random_weights_show_no_law_and_nothing_of_the_module_changes(
    hanging: Callable[[Any], Any],
) -> None:
    module = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    hooks, state = hanging(module), torch.random.get_rng_state()
    result = hs.visibility(
        hs.load((module, None)),
        random_texts(8),
        sampling=hs.Sampling(per_text=6, baseline="random"),
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert hanging(module) == hooks
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    below, first, depth = result.facts["aligned"]["random"]
    # The model's own weights are random here, so there is nothing to tell apart.
    assert abs(below["exponent"]["value"]) < 0.2
    assert below["source"] == "below"
    assert first["source"] == "first"
    assert depth["source"] == "depth"
    assert "random weights" in result.summary()
    assert "random_decay_below" in result.data


def test_random_weights_are_run_in_the_places_of_the_model(tiny: Tiny) -> None:
    """A copy that is loaded and searched anew has the same states."""
    model, text = tiny("gpt2"), random_texts(1)
    random = RandomModel.of(model, seed=3)
    found = hs.load((random.module, None))
    sites = model.anatomy.select("layer.*,final")
    of_copy, of_found = tape(random, text, sites), tape(found, text, sites)
    of_model = tape(model, text, sites)
    for site in sites:
        assert torch.equal(of_copy.values(site), of_found.values(site))
        assert not torch.equal(of_copy.values(site), of_model.values(site))


def test_shares_by_depth_are_those_of_the_whole_maps() -> None:
    """A model of six layers: every target of the upper half sees three sites."""
    model = hs.load((tiny_model("gpt2", layers=6), None))
    texts = random_texts(2)
    result = hs.visibility(model, texts, sites="layer.*", sampling=ALL)
    rows = []
    for influence in full_maps(model, texts):
        for site in range(3, 7):
            for place in range(FARTHEST + 1, 12):
                of_sites = influence[site, place].sum(-1)
                nearest = of_sites[[site - 1, site - 2, site - 3]]
                rows.append(nearest / nearest.sum())
    shares = result.data["decay_depth"].to_numpy()
    np.testing.assert_allclose(shares[:3], np.mean(rows, axis=0), rtol=1e-4)
    assert np.isnan(shares[3:]).all()
    law = result.facts["aligned"]["laws"][2]
    assert law["source"] == "depth"
    assert law["exponent"]["value"] == pytest.approx(fit_law(shares[:3]).exponent)


def test_a_law_is_called_absent_only_where_the_texts_say_so(tiny: Tiny) -> None:
    """The sentence about random weights follows the interval of their exponent."""
    result = hs.visibility(
        tiny("llama"),
        random_texts(4),
        sampling=hs.Sampling(per_text=3, baseline="random"),
    )
    random = result.facts["aligned"]["random"][0]
    words = {"above": "falls too", "below": "grows", "undecided": "not found to fall"}
    for decays, expected in words.items():
        random["decays"] = decays
        about_random = []
        for sentence in findings(result):
            if sentence.startswith("With random weights, the influence of the site"):
                about_random.append(sentence)
        assert len(about_random) == 1
        for side, phrase in words.items():
            assert (phrase in about_random[0]) == (side == decays), expected


@pytest.mark.parametrize(("family", "pictures"), [("llama", 6), ("bert", 5)])
def test_the_pictures_show_every_average_with_its_interval(
    tiny: Tiny, family: str, pictures: int
) -> None:
    """A model of four sites counts a single depth, and has no decay by depth."""
    result = hs.visibility(tiny(family), random_texts(4))
    views = views_of(result)
    assert len({view.title for view in views}) == pictures
    for view in views:
        assert isinstance(view, Lines)
        for series in view.series:
            assert series.low is not None
            assert series.high is not None
            known = np.isfinite(series.low)
            assert known.any()
            assert (series.low[known] <= series.y[known]).all()
            assert (series.y[known] <= series.high[known]).all()


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
        (gpt2, {"texts": texts, "influence": "logit"}, "no layers to align"),
        (gpt2, {"texts": texts, "sites": "layer.1"}, "no sites below"),
        (t5, {"texts": t5.encode(texts, targets=texts)}, "no distances between"),
    ):
        with pytest.raises(errors.TextError, match=match):
            hs.visibility(model, **wrong)
    with pytest.raises(errors.StatesError, match="per_text must be an integer >= 1"):
        hs.Sampling(per_text=0)
    with pytest.raises(errors.ArgumentError, match="hs.Sampling"):
        hs.visibility(gpt2, texts, probes=8)  # type: ignore[call-arg]


def test_the_command_draws_states_and_compares_with_random_weights(
    tmp_path: Path,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = [f"the cats sat on the mat and the dog number {k} ran" for k in range(3)]
    (tmp_path / "texts.txt").write_text("\n".join(words), encoding="utf-8")
    options = ["--model", str(tmp_path / "model"), "--quiet", "--per-text", "3"]
    done = CliRunner().invoke(
        app,
        ["visibility", f"@{tmp_path / 'texts.txt'}", *options, "--baseline", "random"],
    )
    assert done.exit_code == 0, done.output
    assert "9 states were drawn" in " ".join(done.output.split())
    assert "random weights" in done.output
