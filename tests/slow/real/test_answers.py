"""Patch, lens, graft and steer on a real model: the capital of France, and a city that
is unlearned.
"""

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope import texts

pytestmark = pytest.mark.real


def test_the_capital_moves_from_the_country_to_the_last_token(
    smollm2: hs.Model,
) -> None:
    contrast = hs.Contrast(
        "The capital of France is", "The capital of Germany is", " Paris", " Berlin"
    )
    result = hs.patch(smollm2, contrast, method="both")
    effect, facts = result.data["effect"].values, result.facts
    assert (effect[:, :3] == 0).all()
    assert (effect[:20, 3] > 0.9).all() and (np.abs(effect[:20, 4]) < 0.1).all()
    assert (effect[25:, 4] > 0.9).all() and (np.abs(effect[25:, 3]) < 0.1).all()
    difference = facts["logit_difference"]
    assert difference["clean"] > 5 > -3 > difference["corrupt"]
    assert facts["agreement"]["correlation"] > 0.9
    assert facts["notes"] == []
    assert facts["check"]["sweep"] == pytest.approx(facts["check"]["alone"], abs=1e-4)


def test_paris_comes_up_only_near_the_top(smollm2: hs.Model) -> None:
    result = hs.lens(smollm2, "The capital of France is", target=" Paris")
    rank = result.data["target_rank"].values[:, -1]
    assert rank[-1] == 1
    assert (rank[:25] > 300).all()
    facts = result.facts["target"]
    assert facts["first_best_at"] == "layer.30"
    assert result.facts["last_token"]["settled_from"] == "layer.30"
    assert facts["first_in_top_k_at"] == "layer.29"
    assert facts["probability"] == pytest.approx(0.7725, abs=2e-3)


def test_a_donor_that_cannot_read_the_country(smollm2: hs.Model) -> None:
    donor = hs.load("smollm2")
    with torch.no_grad():
        for block in donor.module.model.layers[22:25]:  # type: ignore[union-attr, index]
            block.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
    data = [
        ("The capital of France is", " Paris"),
        ("The capital of Italy is", " Rome"),
    ]
    result = hs.graft(smollm2, donor, data, layers=15)
    assert result.facts["model_alone"]["accuracy"] == 1
    assert result.facts["donor_alone"]["accuracy"] == 0
    accuracy = result.data["accuracy"].values
    assert (accuracy[:8] == 1).all(), "windows below block 23"
    assert (accuracy[10:] == 0).all(), "windows that hold blocks 23 to 25 are the donor"
    assert result.facts["middle"]["from"] == "layer.4"
    assert result.facts["late"]["from"] == "layer.14"
    assert "not significant" in result.summary(), "two prompts show nothing"


def test_montreal_is_unlearned_and_toronto_is_not(smollm2: hs.Model) -> None:
    read = texts.read("cities-incomplete")
    labelled = [*zip(read.texts, read.labels or (), strict=True)]
    toronto, montreal = (
        [text for text, label in labelled if label == city]
        for city in ("Toronto", "Montreal")
    )
    prompts = [
        "Ontario's provincial capital is the city of",
        "The Montreal Canadiens play their home games in",
        "The largest city of Quebec is",
        "The Toronto Maple Leafs play their home games in",
    ]
    direction = hs.Direction.between(
        smollm2, toronto, montreal, sites="layer.25", spare_first=True
    )
    result = hs.steer(
        smollm2,
        prompts,
        direction,
        strengths="ablate",
        answers=[" Montreal", " Toronto"],
        quality=texts.read("plain").texts[:20],
        new_tokens=4,
    )
    data = result.data.isel(site=0, strength=0)
    before = data["probability_before"]
    assert (before.sel(answer=" Montreal") > 0.05).all(), "or nothing can be unlearned"
    times = (data["probability"] / before).transpose("answer", "text").values
    assert (times[0] < 0.1).all()
    assert (times[1] > 0.9).all()
    assert abs(float(data["perplexity_change"])) < 0.05
    assert result.facts["best"]["ratio"] < 0.1
    wrote = [
        ["Montreal" in text for text in data[name].values]
        for name in ("written_before", "written")
    ]
    assert wrote == [[False, True, True, False], [False] * 4]
    assert "Toronto" in data["written"].values[0]
