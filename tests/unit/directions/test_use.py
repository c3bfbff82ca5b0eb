"""Where a direction can be used: changes, steering, the lens, contributions."""

from functools import cache

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import SiteError, StatesError, TextError
from hiddenscope.testing import tiny_model

TEXTS = [[5, 6, 7, 8], [9, 10, 11]]
close = torch.testing.assert_close


@cache
def load(family):
    """Load a tiny model once; no test may change it."""
    module = tiny_model(family)
    if family == "t5":
        module.config.decoder_start_token_id = 0
    return hs.load((module, None))


def dictionary(site="layer.2", count=3, width=64):
    generator = torch.Generator().manual_seed(7)
    vectors = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return hs.Dictionary.of(vectors, site)


def states(model, changes, site):
    return hs.edit(model, TEXTS, changes, site).states[site]


def test_adding_a_feature_and_projecting_it_out_leaves_the_rest_as_it_was():
    model, feature = load("llama"), dictionary()[1]
    before = model.capture(TEXTS, "layer.2")["layer.2"]
    added = states(model, {"layer.2": hs.Add(feature, scale=5.0)}, "layer.2")
    unit = feature.vectors["layer.2"].float()
    close(added, before + 5.0 * unit)
    project = hs.Project(feature.vectors["layer.2"])
    close(project.of(added), project.of(before))
    close(project.of(added) @ unit, torch.zeros(len(before)), atol=1e-5, rtol=0)


def test_scaling_along_a_feature_is_projecting_at_0_and_nothing_at_1():
    model, feature = load("llama"), dictionary()[0]
    before = model.capture(TEXTS, "layer.2")["layer.2"]
    at_1 = states(model, {"layer.2": hs.Scale(1.0, along=feature)}, "layer.2")
    at_0 = states(model, {"layer.2": hs.Scale(0.0, along=feature)}, "layer.2")
    at_3 = states(model, {"layer.2": hs.Scale(3.0, along=feature)}, "layer.2")
    assert torch.equal(at_1, before)
    projected = states(model, {"layer.2": hs.Project(feature)}, "layer.2")
    assert torch.equal(at_0, projected)
    close(at_3 - before, 2 * (before - at_0))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_what_a_neuron_writes_added_is_the_neuron_with_a_larger_value(family):
    model = load(family)
    neuron = hs.Dictionary.neurons(model, "layer.2.mlp.neurons")[7]

    def more(neurons):
        neurons[..., 7] += 2.5
        return neurons

    by_direction = {"layer.2.mlp": hs.Add(neuron, scale=2.5)}
    by_value = {"layer.2.mlp.neurons": more}
    logits = []
    for changes in (by_direction, by_value):
        logits.append(hs.edit(model, TEXTS, changes, (), logits=True).logits)
    close(*logits, rtol=1e-4, atol=1e-5)
    assert neuron.title == "neuron 7"


def test_each_site_takes_the_vector_that_a_direction_has_for_it():
    model = load("llama")
    direction = hs.Direction.between(
        model, [[5, 6]], [[7, 8]], sites="layer.1-2", pool="last"
    )
    assert set(direction.scales) == {"layer.1", "layer.2"}
    changes = {site: hs.Replace(direction) for site in ("layer.1", "layer.2")}
    changed = hs.edit(model, TEXTS, changes, "layer.1-2").states
    for site, vector in direction.vectors.items():
        assert torch.equal(changed[site][0], vector.float())


def test_generation_is_steered_by_a_feature_as_by_its_vector():
    model, feature = load("llama"), dictionary()[2]
    ids = torch.tensor(TEXTS[:1])
    written = []
    for vector in (feature, feature.vectors["layer.2"]):
        with hs.editing(model, {"layer.2": hs.Add(vector, scale=20.0)}):
            written.append(model.module.generate(ids, max_new_tokens=4))
    assert torch.equal(*written)


def test_steering_by_a_feature_is_steering_by_its_vector():
    model, feature = load("llama"), dictionary()[1]
    vector = hs.Direction.of(feature.vectors["layer.2"], sites="layer.2")
    options = {"answers": [3, 4], "quality": [[9, 8, 7, 6]], "new_tokens": 0}
    by_feature, by_vector = (
        hs.steer(model, TEXTS, direction, **options) for direction in (feature, vector)
    )
    for name in ("probability", "perplexity", "size"):
        np.testing.assert_array_equal(by_feature.data[name], by_vector.data[name])
    assert by_feature.facts["direction"]["feature"] == 1
    assert "The direction is what feature 1 writes." in by_feature.summary()


def test_a_feature_may_be_used_at_another_site():
    model, feature = load("llama"), dictionary()[1]
    moved = hs.Direction.of(feature, sites="layer.1,layer.1.mlp")
    assert moved.title == "feature 1"
    for site in ("layer.1", "layer.1.mlp"):
        before = model.capture(TEXTS, site)[site]
        after = states(model, {site: hs.Add(moved)}, site)
        close(after, before + feature.vectors["layer.2"].float())
    result = hs.steer(
        model, TEXTS, moved, answers=[3], quality=[[9, 8, 7, 6]], new_tokens=0
    )
    assert result.facts["sites"] == ["layer.1.mlp", "layer.1"]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
def test_the_lens_of_a_direction_is_its_unembedding_by_hand(family):
    model, feature = load(family), dictionary()[1]
    module = model.module
    norm = module.transformer.ln_f if family == "gpt2" else module.model.norm
    vector = feature.vectors["layer.2"].float()
    with torch.no_grad():
        logits = module.lm_head(norm(torch.stack([vector, -vector])))
    cap = getattr(module.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    best = logits.softmax(-1).topk(4)
    result = hs.lens(model, feature, k=4)
    assert result.data["word_id"].values[0].tolist() == best.indices.tolist()
    close(torch.tensor(result.data["probability"].values[0]), best.values)
    assert "Feature 1 at layer.2 writes" in result.summary()
    # At `final` the norm was applied already.
    at_final = hs.lens(model, hs.Direction.of(vector, sites="final"), k=2)
    with torch.no_grad():
        best = module.lm_head(vector).topk(2).indices
    assert at_final.data["word_id"].values[0, 0].tolist() == best.tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "gptj", "t5"])
@pytest.mark.parametrize("layer", [1, 3])
def test_parts_sum_to_the_product_of_a_layer_with_a_direction(family, layer):
    model = load(family)
    stack = "decoder." if model.encoder_decoder else ""
    site = f"{stack}layer.{layer}"
    feature = dictionary(site)[0]
    targets = {"targets": [[3, 4]]} if stack else {}
    result = hs.contributions(model, TEXTS[0], feature, **targets)
    recorded = model.capture(TEXTS[:1], site, **targets)
    state = recorded[site][-1].double()
    expected = float(state @ feature.vectors[site])
    assert float(result.data["logit"][0]) == pytest.approx(expected, abs=1e-6)
    assert float(result.data["total"][0]) == pytest.approx(expected, abs=1e-4)
    assert result.data.sizes["layer"] == layer
    assert result.facts["along"] == site
    assert f"{site} along feature 0" in result.summary()
    assert "logit" not in result.summary()


def test_two_texts_are_compared_along_a_feature():
    model, feature = load("llama"), dictionary()[1]
    pair = [[5, 6, 7]], [[5, 6, 8]]
    result = hs.compare(model, *pair, sites=feature)
    a, b = (model.capture(text, "layer.2")["layer.2"].double() for text in pair)
    expected = ((b - a) @ feature.vectors["layer.2"]).numpy()
    np.testing.assert_allclose(result.data["along"][0], expected, atol=1e-6)
    # No more of two states differs along a direction than altogether.
    assert (abs(result.data["along"]) <= result.data["l2"] + 1e-6).all()
    assert "along" not in hs.compare(model, *pair).data


VECTOR = torch.ones(64)
of = hs.Direction.of


@pytest.mark.parametrize(
    ("use", "error", "reason"),
    [
        (
            lambda model: hs.edit(model, TEXTS, {"layer.1": hs.Add(dictionary()[0])}),
            SiteError,
            "no vector at layer.1: it has vectors for layer.2",
        ),
        (
            lambda model: hs.edit(model, TEXTS, {"layer.1": hs.Add(of(VECTOR[:5]))}),
            StatesError,
            "a direction of 5 numbers: the states at layer.1 have 64",
        ),
        (
            lambda model: hs.lens(model, of(VECTOR[:5], sites="layer.1")),
            StatesError,
            "a direction of 5 numbers",
        ),
        (
            lambda model: hs.lens(model, dictionary()[0], target=3),
            TextError,
            "Cannot follow a target along a direction",
        ),
        (
            lambda model: hs.lens(model, of(VECTOR, sites="layer.1.mlp.input")),
            SiteError,
            "not written to the residual stream",
        ),
        (
            lambda model: hs.contributions(model, TEXTS[0], of(VECTOR, sites="final")),
            SiteError,
            "parts sum up to one layer",
        ),
        (
            lambda model: hs.contributions(
                model, TEXTS[0], of(VECTOR, sites="layer.1-2")
            ),
            SiteError,
            "layer.1 to layer.2, and parts sum up to one layer",
        ),
        (
            lambda model: hs.contributions(model, TEXTS[0], dictionary()[0], other=3),
            TextError,
            "Leave `other` out",
        ),
    ],
)
def test_a_direction_that_does_not_fit_is_refused(use, error, reason):
    with pytest.raises(error, match=reason):
        use(load("llama"))
