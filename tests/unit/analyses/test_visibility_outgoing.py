"""What a state does to its own prediction and to later ones: effects are those of plain
loops, shares follow from them, and nothing is said that was not found.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import hiddenscope as hs
from hiddenscope.analyses.visibility.outgoing import (
    draw,
    estimate,
    replacement_effects,
)
from hiddenscope.passes.sweep import run_unpatched
from hiddenscope.results import findings_of, views_of
from hiddenscope.results.pictures import Lines
from hiddenscope.testing import tiny_model

Tiny = Callable[..., hs.Model]
ALL = hs.Sampling(per_text=10**6)
TOKENS, FARTHEST = 12, 6
# The tokens that have a prediction of a true next token at every distance.
PLACES = range(1, TOKENS - 1 - FARTHEST)


def random_texts(count: int, tokens: int = TOKENS, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return generator.integers(5, 60, (count, tokens)).tolist()


def loss(model: hs.Model, text: list[int], changes: Any = None) -> np.ndarray:
    """Return the loss of each true next token, by hs.edit or plainly."""
    inputs = model.encode([text])
    if changes:
        logits = hs.edit(model, inputs, changes, (), logits=True).logits
    else:
        logits = hs.record(model, inputs, (), logits=True).logits
    assert logits is not None
    log_p = logits.double().log_softmax(-1)[:-1]
    return -log_p.gather(-1, torch.tensor(text[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_influence_is_that_of_the_maps_of_the_texts(tiny: Tiny, family: str) -> None:
    """Source by source, at every distance, as the map of each text has it."""
    model, texts = tiny(family), random_texts(3)
    result = hs.visibility(model, texts, influence="logit", sampling=ALL)
    expected = []
    for text in texts:
        influence = hs.visibility(model, [text], influence="logit").data["logit"].values
        for place in PLACES:
            expected.append(influence[place : place + FARTHEST + 1, :, place].T)
    summed = np.sum(expected, axis=0)
    outgoing = result.data["outgoing"].values
    np.testing.assert_allclose(outgoing, summed / len(expected), rtol=1e-4)
    shares = summed[:, 1:].sum(1) / summed.sum(1)
    np.testing.assert_allclose(result.data["future"].values, shares, rtol=1e-4)
    # Nothing mixes tokens after the last block, and a prediction comes from one state.
    assert result.data["future"].values[-2:].tolist() == [0, 0]
    assert result.facts["outgoing"]["states"] == 3 * len(PLACES)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("influence", ["mean", "resample"])
def test_replaced_states_change_the_loss_as_in_a_plain_loop(
    tiny: Tiny, family: str, influence: Any
) -> None:
    """Two texts: each lends its states to the other."""
    model, texts = tiny(family), random_texts(2)
    sites = model.anatomy.select("layer.*,final")
    states = [model.capture([text], sites) for text in texts]
    result = hs.visibility(model, texts, influence=influence, sampling=ALL)
    expected = []
    for number, text in enumerate(texts):
        before = loss(model, text)
        for place in PLACES:
            effects = []
            for site in sites:
                value = states[1 - number][site][place]
                if influence == "mean":
                    value = torch.cat([of[site][1:] for of in states]).mean(0)
                changes = {site: hs.Replace(value[None], tokens=[place])}
                rise = loss(model, text, changes) - before
                effects.append(rise[place : place + FARTHEST + 1])
            expected.append(effects)
    outgoing = result.data["outgoing"].values
    np.testing.assert_allclose(outgoing, np.mean(expected, axis=0), atol=2e-5)
    sizes = np.abs(expected).mean(0)
    np.testing.assert_allclose(result.data["size_outgoing"].values, sizes, atol=2e-5)
    assert (outgoing[-2:, 1:] == 0).all()
    assert result.data["size_future"].values[-2:].tolist() == [0, 0]


def test_a_state_that_is_replaced_by_itself_changes_nothing(tiny: Tiny) -> None:
    model = tiny("llama")
    sites = model.anatomy.select("layer.*")
    (run,) = run_unpatched(model, random_texts(1), sites)
    rises = replacement_effects(model, run, sites, run.states, PLACES, FARTHEST)
    assert rises.shape == (len(PLACES), len(sites), FARTHEST + 1)
    assert np.abs(rises).max() < 1e-5


def planted(generator: np.random.Generator, states: int, shares: Any) -> np.ndarray:
    """Draw effects whose sums at later distances have these shares, by site."""
    shares = np.asarray(shares, dtype=float)
    effects = np.ones((len(shares), FARTHEST + 1)) * shares[:, None] / FARTHEST
    effects[:, 0] = 1 - shares
    noise = generator.gamma(4.0, 0.25, (states, 1, 1))
    return effects * noise * generator.gamma(4.0, 0.25, (states, *effects.shape))


def test_the_numbers_are_those_of_a_plain_reading(tiny: Tiny) -> None:
    generator = np.random.default_rng(0)
    effects = planted(generator, 60, [0.8, 0.7, 0.4, 0.2, 0.0])
    reaching = np.array([True, True, True, True, False])
    batches = np.repeat(np.arange(20), 3)
    estimates, count = estimate({"": effects}, batches, reaching, signed=False)
    assert count == 20
    later = effects[..., 1:].sum(-1)
    shares = later.sum(0) / effects.sum((0, 2))
    np.testing.assert_allclose(estimates["future"].value, shares)
    np.testing.assert_allclose(estimates["fall"].value, shares[0] - shares[3])
    for site in range(4):
        expected = stats.spearmanr(effects[:, site, 0], later[:, site]).statistic
        assert estimates["together"].value[site] == pytest.approx(expected)
    # With equal batches the interval of a mean is Student's, less a degree of freedom.
    own = effects[:, 0, 0].reshape(20, 3).mean(1)
    error = np.sqrt(((own - own.mean()) ** 2).sum() / 18 / 20)
    low, high = stats.t.interval(0.95, 18, own.mean(), error)
    assert estimates["outgoing"].low[0, 0] == pytest.approx(low)
    assert estimates["outgoing"].high[0, 0] == pytest.approx(high)


def test_random_weights_stand_beside_and_the_module_is_untouched(
    hanging: Callable[[Any], Any],
) -> None:
    module = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = hs.load((module, None))
    hooks, state = hanging(module), torch.random.get_rng_state()
    result = hs.visibility(
        model,
        random_texts(4),
        influence="resample",
        sampling=hs.Sampling(per_text=1, baseline="random"),
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert hanging(module) == hooks
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert "random_future" in result.data
    assert not np.allclose(
        result.data["random_outgoing"].values, result.data["outgoing"].values
    )
    assert "With random weights" in result.summary()
    for view in views_of(result):
        assert isinstance(view, Lines)
    # What a random model does to the loss has no sign to speak of.
    assert result.facts["outgoing"]["change"]["first"]["value"] is None
    assert 0 < result.facts["outgoing"]["size"]["first"]["value"] < 1


def test_a_network_that_mixes_no_tokens_serves_its_own_token_alone() -> None:
    module = tiny_model("llama")
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.o_proj.weight.zero_()
    model = hs.load((module, None))
    for influence in ("logit", "mean"):
        result = hs.visibility(model, random_texts(8), influence=influence)
        name = "future" if influence == "logit" else "size_future"
        assert np.abs(result.data[name].values).max() < 1e-4
        part = "change" if influence == "logit" else "size"
        assert result.facts["outgoing"][part]["own_from"] == "layer.0"
        assert "From layer.0 on, a state is mostly about its own" in result.summary()


def test_copies_are_one_group_and_lend_nothing_to_each_other(tiny: Tiny) -> None:
    model, texts = tiny("gpt2"), random_texts(8)
    for influence in ("logit", "mean"):
        once = hs.visibility(model, texts, influence=influence, sampling=ALL)
        twice = hs.visibility(model, texts * 2, influence=influence, sampling=ALL)
        assert twice.facts["outgoing"]["groups"] == 8
        for name in ("outgoing", "outgoing_low", "outgoing_high"):
            np.testing.assert_allclose(twice.data[name], once.data[name], atol=1e-5)
        assert "intervals are rough" in twice.summary()
    inputs = model.encode(texts * 2)
    groups = np.tile(np.arange(8), 2)
    drawn = draw(inputs, 2, groups, 0)
    assert (groups[drawn.lenders] != groups).all()


@pytest.mark.parametrize("influence", ["logit", "mean", "resample"])
def test_what_cannot_be_looked_ahead_is_said(tiny: Tiny, influence: Any) -> None:
    gpt2, t5, texts = tiny("gpt2"), tiny("t5"), random_texts(2)
    headless = hs.load((tiny_model("gpt2").transformer, None))
    for model, wrong, match in (
        (gpt2, {"texts": [[5, 6, 7], [5, 6, 8]]}, "the shortest has 3 tokens"),
        (gpt2, {"texts": texts[:1] * 2}, "all belong to one group"),
        (gpt2, {"texts": texts, "sites": "final"}, "no later prediction depends on"),
        (tiny("bert"), {"texts": texts}, "see the whole text"),
        (t5, {"texts": t5.encode(texts, targets=texts)}, "no distances between"),
        (headless, {"texts": texts}, "it has no head"),
        (gpt2, {"texts": texts, "target": 7}, "target"),
        (
            gpt2,
            {"texts": texts, "sampling": hs.Sampling(probes=2)},
            "Cannot use probes",
        ),
    ):
        with pytest.raises(hs.errors.Error, match=match):
            hs.visibility(model, influence=influence, **wrong)


def test_a_replacement_needs_other_texts_and_whole_states(tiny: Tiny) -> None:
    model, texts = tiny("gpt2"), random_texts(2)
    by_position = hs.Sampling(align="position")
    for wrong, match in (
        ({"texts": texts[:1]}, "Give several texts"),
        ({"texts": texts, "sampling": by_position}, "Give several texts"),
        ({"texts": texts, "sites": "layer.1.attn.head.0"}, "only whole states"),
    ):
        with pytest.raises(hs.errors.Error, match=match):
            hs.visibility(model, influence="mean", **wrong)


def test_parts_of_a_block_are_sources_too(tiny: Tiny) -> None:
    model, texts = tiny("llama"), random_texts(2)
    sites = "layer.1,layer.2.attn,layer.2.mlp,layer.3.mlp"
    for influence in ("logit", "resample"):
        result = hs.visibility(model, texts, influence=influence, sites=sites)
        own = "future" if influence == "logit" else "size_future"
        assert result.data[own].values[-1] == 0
        assert (result.data[own].values[:-1] > 0).all()


def test_what_is_said_follows_the_numbers(tiny: Tiny) -> None:
    result = hs.visibility(tiny("llama"), random_texts(12), influence="logit")
    change = result.facts["outgoing"]["change"]
    assert change["fall"]["verdict"] == "above"
    (sentence,) = (s for s in findings_of(result) if "The first sites do more" in s)
    assert f"{change['first']['value']:.0%}" in sentence


def test_effects_of_replacements_have_a_sign_even_where_none_is_below_zero() -> None:
    effects = planted(np.random.default_rng(1), 60, [0.8, 0.4])
    reaching = np.ones(2, dtype=bool)
    batches = np.repeat(np.arange(20), 3)
    signed, _ = estimate({"": effects}, batches, reaching, signed=True)
    np.testing.assert_allclose(signed["size_future"].value, signed["future"].value)
    norms, _ = estimate({"": effects}, batches, reaching, signed=False)
    assert "size_future" not in norms


def test_nothing_is_found_in_three_texts(tiny: Tiny) -> None:
    for influence in ("logit", "mean", "resample"):
        result = hs.visibility(
            tiny("gpt2"),
            random_texts(3),
            influence=influence,
            sampling=hs.Sampling(per_text=1),
        )
        assert np.isnan(result.data["outgoing_low"]).all()
        outgoing = result.facts["outgoing"]
        for part in filter(None, (outgoing["change"], outgoing.get("size"))):
            assert part["together"]["low"] is None
            assert part["together"]["verdict"] == "undecided"
        assert "they need eight groups of texts" in result.summary()


def noise(seed: int, groups: int, per_text: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw effects that are one half each on own and later predictions, apart."""
    generator = np.random.default_rng(seed)
    parts = np.exp(generator.normal(0, 0.6, (groups * per_text, 1, 2)))
    effects = np.repeat(parts, 3, axis=1)
    effects = effects * generator.gamma(4.0, 0.25, effects.shape)
    return effects, np.repeat(np.arange(groups), per_text)


@pytest.mark.parametrize(("groups", "per_text"), [(8, 1), (9, 4), (12, 1)])
def test_noise_of_few_texts_makes_few_findings_and_all_ends_are_bounded(
    groups: int, per_text: int
) -> None:
    findings = []
    for seed in range(60):
        effects, batches = noise(seed, groups, per_text)
        reaching = np.ones(3, dtype=bool)
        estimates, _ = estimate({"": effects}, batches, reaching, signed=True)
        for name, least in (("future", 0), ("size_future", 0), ("together", -1)):
            for ends in estimates[name]:
                assert (ends >= least).all() and (ends <= 1).all()
        findings.append(estimates["together_mean"].guess().verdict != "undecided")
    assert np.mean(findings) <= 0.05 + 0.07


def test_perfect_order_of_a_few_states_is_not_certain() -> None:
    effects = np.arange(1.0, 9.0)[:, None, None] * np.ones((8, 2, 3))
    estimates, _ = estimate(
        {"": effects}, np.arange(8), np.ones(2, dtype=bool), signed=False
    )
    together = estimates["together_mean"]
    assert together.value == pytest.approx(1)
    assert together.low < 0.95 and together.high <= 1


def test_what_rounding_makes_of_an_effect_has_no_shares(tiny: Tiny) -> None:
    """Texts that begin alike lend each other the states that they have."""
    texts = [[*range(5, 16), k, k + 1] for k in range(20, 26)]
    few = hs.Sampling(per_text=1)
    result = hs.visibility(
        tiny("llama"), texts, influence="resample", sampling=few, sites="layer.0-2"
    )
    size = result.facts["outgoing"]["size"]
    assert size["unclear"] == "layer.0 to layer.2"
    assert size["later_until"] is None and size["first"]["value"] is None
    for name in ("future", "size_future", "together", "size_together"):
        assert np.isnan(result.data[name]).all(), name
