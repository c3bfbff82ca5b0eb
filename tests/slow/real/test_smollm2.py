"""What analyses show of smollm2: findings that are known of trained models."""

import numpy as np
import pytest

import hiddenscope as hs
from tests.places import ROOT

PARIS = "The capital of France is Paris."
PROSE = ROOT.joinpath("LICENSE").read_text("utf-8")[1000:3400]

pytestmark = pytest.mark.real


def test_two_capitals_in_smollm2(smollm2: hs.Model) -> None:
    result = hs.compare(smollm2, PARIS, "The capital of Germany is Berlin.")
    data, (facts,) = result.data, result.facts["stacks"]
    assert (data["l2"].values[:, :3] == 0).all(), "the same three tokens, bit for bit"
    assert (data["l2"].values[1:, 3:] > 0).all()
    first = facts["first_difference"]
    assert first["token"] == [" France", " Germany"]
    assert (first["text"], first["position"], first["site"]) == (0, [3, 3], "layer.0")
    median = data["l2_median"].to_series()
    rise = [median[f"layer.{k}"] for k in (4, 16, 24, 30)]
    assert rise == sorted(rise)
    assert median["layer.24"] > 1.5 * median["layer.23"], "a late jump"
    assert facts["largest_jump"]["to"]["site"] == "layer.30"
    # Raw, the last block takes them farther apart, and hidden_states shows a drop.
    assert median["layer.30"] > 1.3 * median["layer.29"]
    assert median["final"] < 0.15 * median["layer.29"]
    assert facts["end"]["share_of_drop_by_final_norm"] == 1


def test_smollm2_sees_mostly_its_own_token_one_layer_below_and_all_tokens_from_the_top(
    smollm2: hs.Model,
) -> None:
    sites = "layer.0,layer.10-11,layer.30,final"
    result = hs.visibility(smollm2, PARIS, sites=sites)
    data = result.data["l1"]
    assert data.shape == (5, 7, 5, 7)
    site, token, source_site, source_token = np.indices(data.shape)
    below = (source_site < site) & (source_token <= token)
    same = (source_site == site) & (source_token == token)
    assert (data.values[~(below | same)] == 0).all()
    own_below = result.data["own_below"].sel(site="layer.11")
    own_first = result.data["own_first"].sel(site="final")
    reach = result.data["reach"].sel(source_site="layer.0")
    assert float(own_below) == pytest.approx(0.648, abs=5e-3)
    assert float(own_first) == pytest.approx(0.211, abs=5e-3)
    assert float(reach) == pytest.approx(426.5, rel=0.01)


def test_the_first_token_is_far_larger_and_final_is_not(smollm2: hs.Model) -> None:
    (facts,) = hs.profile(smollm2, PARIS).facts["stacks"]
    assert facts["first_token_norm"] == pytest.approx(22_600, rel=0.05)
    assert 100 < facts["other_tokens_norm"] < 300
    assert facts["largest_norm"]["token"] == "The"
    before, after = facts["before_final"], facts["at_final"]
    assert before["site"] == "layer.30"
    assert before["first_token_norm"] > 50 * after["first_token_norm"]


def test_the_layers_of_smollm2_with_and_without_their_first_tokens(
    smollm2: hs.Model,
) -> None:
    texts = [PROSE[start : start + 400] for start in range(0, len(PROSE) - 399, 400)]
    result = hs.profile(smollm2, texts)
    data, (facts,) = result.data, result.facts["stacks"]
    assert 507 in [one["channel"] for one in facts["massive_activations"]["channels"]]
    assert facts["largest_value"]["position"] == 0
    assert facts["largest_value"]["times_median"] > 5000
    middle = data.sel(site=[f"layer.{k}" for k in range(13, 24)])
    assert (middle["effective_rank"] < 3).all(), "one token, and one direction"
    assert (middle["effective_rank_others"] > 20).all()
    assert (middle["kurtosis_first"] > 550).all()
    assert (middle["added_first"] < 0.01).all(), "blocks leave the first token alone"
    assert (middle["added_median"] > 0.15).all()
    cka = data["cka_others"].sel
    near = []
    for k in range(13, 23):
        near.append(cka(site=f"layer.{k}", source_site=f"layer.{k + 1}").item())
    assert min(near) > 0.9, "neighbouring layers are alike"
    assert cka(site="layer.3", source_site="layer.30").item() < min(near)
    assert not facts["few_tokens"]


def test_some_heads_are_induction_heads(smollm2: hs.Model) -> None:
    result = hs.attention(smollm2, "The capital of France is", layers="18-19", draws=6)
    heads = result.facts["induction_heads"]
    assert heads and heads[0]["score"] > 10 * heads[0]["null"]
