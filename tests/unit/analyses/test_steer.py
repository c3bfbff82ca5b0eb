"""Steer: what is added can be taken away, what is ablated is gone, and both held
against passes run by hand.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import texts
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    Error,
    NotFinite,
    PassError,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Grid, Lines
from tests.slices import long

Tiny = Callable[..., hs.Model]
PROMPTS = ["The cat sat on the", "A dog and a cat", "One of the ten"]
SETS = (["The cat is here", "A cat ran"], ["The dog is there", "No dog ran off"])
OTHERS = [
    "The rest of it was as good.",
    "On the other hand there is a point in it.",
    "So it is.",
]
ANSWERS = [" t", "a"]
CITIES = [" Montreal", " Toronto"]


def with_mask(family: str = "bert") -> hs.Model:
    tokenizer = tiny_tokenizer(cls=True)
    tokenizer.mask_token = "<unk>"
    return hs.load((tiny_model(family), tokenizer))


def direction_of(model: hs.Model, along: Any = SETS, **options: Any) -> hs.Direction:
    """Between two sets of texts, or a vector, a probe or several by site."""
    if isinstance(along, tuple):
        return hs.Direction.between(model, *along, **options)
    return hs.Direction.of(along, **options)


def steered(model: hs.Model, prompts: Any = PROMPTS, **options: Any) -> hs.Result:
    where = {
        name: options.pop(name)
        for name in ("along", "sites", "pool", "upwards", "spare_first")
        if name in options
    }
    given: dict[str, Any] = {"answers": ANSWERS, "quality": OTHERS, "new_tokens": 0}
    return hs.steer(
        model, prompts, direction_of(model, **where), **{**given, **options}
    )


def by_hand(
    model: hs.Model, changes: Any, some: list[str] = PROMPTS
) -> list[torch.Tensor]:
    """Log-probabilities [token, vocabulary] of each text alone, by hs.edit, in float64."""
    found = []
    for text in some:
        made = (
            hs.edit(model, text, changes, logits=True)
            if changes
            else hs.record(model, text, logits=True)
        )
        assert made.logits is not None
        found.append(made.logits.double().log_softmax(-1))
    return found


def perplexity(model: hs.Model, said: list[torch.Tensor], some: list[str]) -> float:
    """From its definition, one text at a time."""
    losses = []
    for rows, text in zip(said, some, strict=True):
        ids = model.encode(text).ids[0]
        losses += [-float(rows[place, one]) for place, one in enumerate(ids[1:])]
    return float(np.exp(np.mean(losses)))


def difference(model: hs.Model, site: str, pool: str = "last") -> torch.Tensor:
    first, second = (
        torch.stack(
            [model.capture(text, site).pool(pool, site)[0].double() for text in some]
        )  # type: ignore[union-attr, arg-type]
        for some in SETS
    )
    return first.mean(0) - second.mean(0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
@pytest.mark.parametrize("pool", ["last", "mean"])
def test_added_as_by_hand(tiny: Tiny, family: str, pool: str) -> None:
    model = tiny(family)
    data = steered(model, strengths=[-3, 0.5], sites="layer.1,layer.2", pool=pool).data
    assert data["probability"].dims == ("site", "strength", "text", "answer")
    ids = [
        model.tokenizer(answer, add_special_tokens=False).input_ids[0]
        for answer in ANSWERS
    ]
    assert data["id"].values.tolist() == ids
    for site in ("layer.1", "layer.2"):
        vector = difference(model, site, pool)
        for strength in (-3, 0.5):
            here = data.sel(site=site, strength=strength)
            changes = {site: hs.Add(vector, scale=strength)}
            expected = [
                [float(said[-1, one].exp()) for one in ids]
                for said in by_hand(model, changes)
            ]
            np.testing.assert_allclose(here["probability"], expected, rtol=1e-4)
            odds = np.log(np.array(expected) / (1 - np.array(expected)))
            np.testing.assert_allclose(here["log_odds"], odds, rtol=1e-4, atol=1e-4)
            hard = perplexity(model, by_hand(model, changes, OTHERS), OTHERS)
            assert float(here["perplexity"]) == pytest.approx(hard, rel=1e-4)
            assert float(here["perplexity_change"]) == pytest.approx(
                hard / float(data["perplexity_before"]) - 1, abs=1e-5
            )
        norms = (
            torch.cat([model.capture(text, site)[site] for text in PROMPTS])
            .double()
            .norm(dim=-1)
        )  # type: ignore[index]
        size = float(vector.norm()) / float(np.median(norms))
        assert float(data["size"].sel(site=site)) == pytest.approx(size, rel=1e-4)
    assert float(data["perplexity_before"]) == pytest.approx(
        perplexity(model, by_hand(model, {}, OTHERS), OTHERS)
    )


@pytest.mark.parametrize("prompt", [[5, 60], [5, 60, 9, 40]])
def test_size_is_over_the_median_norm_also_of_an_even_number_of_tokens(
    tiny: Tiny, prompt: list[int]
) -> None:
    model, vector = tiny("llama"), torch.ones(64)
    data = hs.steer(
        model,
        [prompt],
        hs.Direction.of(vector, sites="layer.2"),
        quality=OTHERS,
        new_tokens=0,
    ).data
    norms = sorted(
        model.capture([prompt], "layer.2")["layer.2"].double().norm(dim=-1).tolist()
    )  # type: ignore[index]
    middle = (norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2
    assert float(data["size"][0]) == pytest.approx(8 / middle)


@pytest.mark.parametrize(
    "sites", ["layer.2", "layer.2.attn", "layer.2.mlp", "layer.2.mid", "final"]
)
def test_ablated_as_by_hand_at_any_site(tiny: Tiny, sites: str) -> None:
    model = tiny("llama")
    data = steered(model, strengths="ablate", sites=sites).data
    changes = {sites: hs.Project(difference(model, sites))}
    ids = data["id"].values.tolist()
    expected = [
        [float(said[-1, one].exp()) for one in ids] for said in by_hand(model, changes)
    ]
    np.testing.assert_allclose(data["probability"][0, 0], expected, rtol=1e-4)
    hard = perplexity(model, by_hand(model, changes, OTHERS), OTHERS)
    assert float(data["perplexity"][0, 0]) == pytest.approx(hard, rel=1e-4)


@pytest.mark.parametrize("strengths", [[0.7, 2], "ablate"], ids=str)
def test_upwards_changes_every_layer_from_the_site_on(
    tiny: Tiny, strengths: Any
) -> None:
    model = tiny("gpt2")
    data = steered(model, strengths=strengths, sites="layer.2", upwards=True).data
    vectors = {site: difference(model, site) for site in ("layer.2", "layer.3")}
    for row, number in enumerate(data["strength"].values):
        ablates = strengths == "ablate"
        made = {
            site: hs.Project(v) if ablates else hs.Add(v, scale=number)
            for site, v in vectors.items()
        }
        ids = data["id"].values.tolist()
        expected = [
            [float(said[-1, one].exp()) for one in ids] for said in by_hand(model, made)
        ]
        np.testing.assert_allclose(data["probability"][0, row], expected, rtol=1e-4)
    one = steered(model, strengths=strengths, sites="layer.2").data
    assert not np.allclose(data["probability"], one["probability"], rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_strength_0_changes_nothing_and_very_little_changes_very_little(
    tiny: Tiny, family: str
) -> None:
    data = steered(tiny(family), strengths=[0, 1e-12, 1], new_tokens=2).data
    nothing = data.sel(strength=0)
    for name in ("probability", "log_odds", "perplexity"):
        assert (nothing[name] == data[f"{name}_before"]).all()
        np.testing.assert_allclose(
            *np.broadcast_arrays(data[name].sel(strength=1e-12), nothing[name]),
            rtol=1e-4,
        )
        assert not np.allclose(data[name].sel(strength=1), nothing[name], rtol=1e-3)
    assert (nothing["perplexity_change"] == 0).all()
    at = nothing["written"].sel(site=data.attrs["written_at"])
    assert (at == data["written_before"]).all()


def test_a_vector_and_its_opposite_cancel(tiny: Tiny) -> None:
    model = tiny("llama")
    vector = torch.randn(64, generator=torch.Generator().manual_seed(0))
    there = steered(model, along=vector, strengths=[2], sites="layer.2").data
    back = steered(model, along=-vector, strengths=[-2], sites="layer.2").data
    np.testing.assert_array_equal(there["probability"], back["probability"])
    undone = hs.edit(
        model,
        PROMPTS,
        {"layer.2": lambda h: hs.Add(-vector).of(hs.Add(vector).of(h))},
        logits=True,
    )
    plain = hs.record(model, PROMPTS, logits=True)
    torch.testing.assert_close(undone.logits, plain.logits, rtol=1e-4, atol=1e-4)


def test_the_scale_of_a_direction_counts_for_adding_and_not_for_ablation(
    tiny: Tiny,
) -> None:
    model = tiny("gpt2")
    vector = torch.randn(64, generator=torch.Generator().manual_seed(1))
    small, large = (
        steered(model, along=v, strengths="ablate").data
        for v in (vector, -1e3 * vector)
    )
    np.testing.assert_allclose(small["probability"], large["probability"], rtol=1e-4)
    np.testing.assert_allclose(large["size"] / small["size"], 1e3, rtol=1e-5)
    once = steered(model, along=vector, strengths=[3]).data["probability"]
    np.testing.assert_allclose(
        once,
        steered(model, along=3 * vector, strengths=[1]).data["probability"],
        rtol=1e-4,
    )
    twice = hs.edit(
        model,
        PROMPTS,
        {"layer.1": lambda h: hs.Project(vector).of(hs.Project(vector).of(h))},
        logits=True,
    )
    single = hs.edit(model, PROMPTS, {"layer.1": hs.Project(vector)}, logits=True)
    torch.testing.assert_close(twice.logits, single.logits, rtol=1e-4, atol=1e-4)


def test_what_is_ablated_is_gone_from_the_states_and_stays_away_upwards(
    tiny: Tiny,
) -> None:
    from hiddenscope.analyses.steer.intervention import Intervention

    model = tiny("llama")
    vectors = {hs.Site(k): difference(model, f"layer.{k}") for k in (2, 3)}
    before = hs.record(model, PROMPTS, "layer.2,layer.3").states
    intervention = Intervention("ablate", vectors, (1.0,))
    after = hs.edit(
        model,
        PROMPTS,
        intervention.changes(len(PROMPTS), entry=True),
        "layer.2,layer.3",
    ).states
    for site, vector in vectors.items():
        unit = vector / vector.norm()
        left, was = (
            float((states[site].double() @ unit).abs().max())
            for states in (after, before)
        )
        assert left < 1e-5 < 1e-2 < was


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_first_token_is_spared(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    given: dict[str, Any] = {
        "strengths": "ablate",
        "sites": "layer.2",
        "spare_first": True,
        "quality": PROMPTS,
    }
    result = steered(model, **given)
    mean = torch.stack(
        [model.capture(text)["layer.2"][0].double() for text in PROMPTS]
    ).mean(0)
    plain = difference(model, "layer.2")
    vector = plain - (plain @ mean) / (mean @ mean) * mean
    assert abs(float(vector @ mean)) < 1e-9 < 1e-3 < abs(float(plain @ mean))
    said = by_hand(model, {"layer.2": hs.Project(vector)})
    expected = [
        [float(rows[-1, one].exp()) for one in result.data["id"].values]
        for rows in said
    ]
    np.testing.assert_allclose(result.data["probability"][0, 0], expected, rtol=1e-4)
    assert (
        result.facts["direction"]["spare_first"] and "first tokens" in result.summary()
    )
    with pytest.raises(
        StatesError, match="lies along the mean state of the first tokens"
    ):
        steered(model, **given, along=mean)


def test_directions_by_site_and_of_a_probe(tiny: Tiny) -> None:
    model = tiny("llama")
    vectors = {site: difference(model, site) for site in ("layer.1", "layer.3")}
    by_texts = steered(model, sites="layer.1,layer.3", strengths=[1])
    by_site = steered(model, along=vectors, strengths=[1])
    np.testing.assert_allclose(
        by_site.data["probability"], by_texts.data["probability"], rtol=1e-4
    )
    assert by_site.data["site"].values.tolist() == ["layer.1", "layer.3"]
    direction = {
        "origin": "texts",
        "toward": 2,
        "away": 2,
        "pool": "last",
        "spare_first": False,
    }
    assert by_texts.facts["direction"] == direction
    assert (
        "the mean state of 2 texts less that of 2 texts, at the last token"
        in by_texts.summary()
    )
    weights = np.random.default_rng(0).normal(size=(1, 64))
    fitted = steered(
        model, along=SimpleNamespace(coef_=weights), sites="layer.2", strengths=[4]
    )
    step = torch.tensor(weights[0] / (weights**2).sum())
    given = steered(model, along=step, sites="layer.2", strengths=[4])
    np.testing.assert_allclose(
        fitted.data["probability"], given.data["probability"], rtol=1e-6
    )
    moved = hs.edit(
        model, PROMPTS, {"layer.2": hs.Add(step, scale=4)}, "layer.2"
    ).states["layer.2"]
    was = hs.record(model, PROMPTS, "layer.2").states["layer.2"]
    np.testing.assert_allclose(
        (moved - was).double().numpy() @ weights[0], 4, rtol=1e-3
    )
    assert "raises the decision value of the probe by 1" in fitted.summary()


def test_a_fitted_probe_is_used_at_its_own_site(tiny: Tiny) -> None:
    model = tiny("llama")
    rows = model.capture([*SETS[0], *SETS[1]], "layer.2").pool("last", "layer.2")  # type: ignore[union-attr]
    probe = hs.Probe(site="layer.2").fit(rows, ["cat", "cat", "dog", "dog"])
    own = steered(model, along=probe, strengths=[2])
    assert own.data["site"].values.tolist() == ["layer.2"]
    assert (
        own.facts["direction"] | {"fitted_at": ["layer.2"], "used_elsewhere": []}
        == own.facts["direction"]
    )
    step = probe.coef_[0] / (probe.coef_**2).sum()
    by_vector = steered(model, along=step, sites="layer.2", strengths=[2])
    np.testing.assert_allclose(
        own.data["probability"], by_vector.data["probability"], rtol=1e-6
    )
    elsewhere = steered(model, along=probe, strengths=[2], sites="layer.1,layer.2")
    assert elsewhere.data["site"].values.tolist() == ["layer.1", "layer.2"]
    assert elsewhere.facts["direction"]["used_elsewhere"] == ["layer.1"]
    assert (
        "fitted at layer.2 and is used at layer.1 too, where nothing was fitted"
        in elsewhere.summary()
    )
    above = steered(model, along=probe, strengths=[2], upwards=True)
    assert above.data["site"].values.tolist() == ["layer.2"]
    assert above.facts["direction"]["used_elsewhere"] == ["layer.3"]
    named = steered(model, along={"layer.2": probe, "layer.3": probe}, strengths=[2])
    assert named.facts["direction"]["used_elsewhere"] == ["layer.3"]
    homeless = steered(model, along=hs.Probe().fit(rows, [0, 0, 1, 1]), strengths=[2])
    assert (
        homeless.data.sizes["site"] == 3
        and homeless.facts["direction"]["fitted_at"] == []
    )
    with pytest.raises(SiteError, match=r"layer\.9"):
        steered(model, along=hs.Probe(site="layer.9").fit(rows, [0, 0, 1, 1]))


def test_what_is_written_is_what_generate_writes_while_states_are_changed(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    prompts = [PROMPTS[0], PROMPTS[0][:-3] + "all", PROMPTS[1]]
    result = steered(model, prompts, sites="layer.2", new_tokens=5)
    vector = difference(model, "layer.2")
    for place, prompt in enumerate(prompts):
        ids = torch.tensor([model.encode(prompt).ids[0]])
        for strength in (0, -2, 2):
            with hs.editing(model, {"layer.2": hs.Add(vector, scale=strength)}):
                made = model.module.generate(
                    ids, max_new_tokens=5, do_sample=False, pad_token_id=0
                )  # type: ignore[operator]
            text = model.tokenizer.decode(made[0, ids.shape[1] :]).partition("<eos>")[0]
            here = result.data.isel(text=place)
            assert here["written"].sel(site="layer.2", strength=strength).item() == text
            assert strength or here["written_before"].item() == text
    assert result.data["prompt"].values.tolist() == prompts
    told = result.facts["written"]
    here = result.data.sel(site="layer.2", strength=told["strength"])
    for name, column in (
        ("prompt", "prompt"),
        ("after", "written"),
        ("before", "written_before"),
    ):
        assert [one[name] for one in told["texts"]] == here[column].values.tolist()


def test_every_prompt_is_told_whatever_it_is(tiny: Tiny) -> None:
    prompts = ["site", "strength", "a cat", "a cat"]
    told = steered(tiny("llama"), prompts, sites="layer.2", new_tokens=2).facts[
        "written"
    ]
    assert [one["prompt"] for one in told["texts"]] == prompts
    assert told["site"] == "layer.2" and isinstance(told["strength"], float)


def test_texts_are_written_at_the_best_site_only(tiny: Tiny) -> None:
    data = steered(tiny("gpt2"), new_tokens=3).data
    lines = (data["written"] != "").any(("strength", "text"))
    assert data["site"].values[lines.values].tolist() in (
        [data.attrs["written_at"]],
        [],
    )


def test_a_masked_model_is_asked_at_its_mask_and_writes_nothing() -> None:
    model = with_mask()
    prompts = ["The <unk> sat on the mat", "A dog and a <unk>"]
    result = steered(model, prompts, sites="layer.2", strengths=[1], new_tokens=None)
    # In an encoder the direction is that of means over tokens.
    vector, ids = (
        difference(model, "layer.2", "mean"),
        result.data["id"].values.tolist(),
    )
    for place, prompt in enumerate(prompts):
        row = model.encode(prompt).ids[0].index(3)
        (said,) = by_hand(model, {"layer.2": hs.Add(vector)}, [prompt])
        expected = [float(said[row, one].exp()) for one in ids]
        np.testing.assert_allclose(
            result.data["probability"][0, 0, place], expected, rtol=1e-4
        )
    assert "written" not in result.data
    assert "masked language model" in result.facts["not_written"]
    whole = [list(model.encode(text).ids[0]) for text in OTHERS]
    losses = []
    for number, ids in enumerate(whole):
        hidden = range(1 + number, len(ids) - 1, 6)
        shown = [3 if place in hidden else one for place, one in enumerate(ids)]
        logits = hs.record(model, [shown], logits=True).logits
        assert logits is not None
        losses += [
            -float(logits[place].double().log_softmax(-1)[ids[place]])
            for place in hidden
        ]
    assert float(result.data["perplexity_before"]) == pytest.approx(
        float(np.exp(np.mean(losses)))
    )
    with pytest.raises(TextError, match="must have one mask token: it has 0"):
        steered(model, ["No mask"])
    with pytest.raises(PassError, match="does not continue a text"):
        steered(model, prompts, new_tokens=3)


@pytest.mark.parametrize("site", ["encoder.layer.2", "decoder.layer.1"])
def test_an_encoder_decoder_is_steered_in_either_stack(tiny: Tiny, site: str) -> None:
    model = tiny("t5")
    along = difference_of(model, site) if site.startswith("decoder") else SETS
    result = steered(model, along=along, sites=site, strengths=[2], new_tokens=4)
    vector = along if isinstance(along, torch.Tensor) else difference_of(model, site)
    ids = result.data["id"].values.tolist()
    for place, prompt in enumerate(PROMPTS):
        made = hs.edit(model, prompt, {site: hs.Add(vector, scale=2)}, logits=True)
        assert made.logits is not None
        expected = made.logits[0].double().softmax(-1)[ids].numpy()
        np.testing.assert_allclose(
            result.data["probability"][0, 0, place], expected, rtol=1e-4
        )
    losses = []
    for text in OTHERS:
        whole = list(model.encode(text).ids[0])
        half = len(whole) // 2
        first, rest = whole[:half], whole[half:]
        changes = {site: hs.Add(vector, scale=2)}
        logits = hs.edit(
            model, [first], changes, targets=[[0, *rest[:-1]]], logits=True
        ).logits
        assert logits is not None
        losses += [
            -float(row.double().log_softmax(-1)[one])
            for row, one in zip(logits, rest, strict=True)
        ]
    assert float(result.data["perplexity"][0, 0]) == pytest.approx(
        float(np.exp(np.mean(losses))), rel=1e-4
    )
    assert result.data["written"].dims == ("site", "strength", "text")


def difference_of(model: hs.Model, site: str) -> torch.Tensor:
    stack = site.partition(".")[0]
    pool = "last" if stack == "decoder" else "mean"
    sets = [
        getattr(model.capture(some), stack).pool(pool, site).double() for some in SETS
    ]
    return sets[0].mean(0) - sets[1].mean(0)  # type: ignore[no-any-return]


def test_a_model_that_is_not_batched_gives_the_same() -> None:
    from hiddenscope.model.batching import Batching

    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    together = steered(model).data
    model.batching = Batching(False, 1e4, "texts in a padded batch came out otherwise")
    apart = steered(model).data
    for name in ("probability", "perplexity"):
        np.testing.assert_allclose(apart[name], together[name], rtol=1e-4)


def test_the_best_setting_is_the_largest_move_that_leaves_the_model_as_good(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    result = steered(model, strengths=[-0.5, -0.1, 0, 0.1, 0.5, 20])
    data, best = result.data, result.facts["best"]
    moves = (data["log_odds"] - data["log_odds_before"]).mean("text").isel(answer=0)
    fine = np.abs(data["perplexity"] / data["perplexity_before"] - 1) <= 0.05
    assert 0 < int(fine.sum()) < fine.size, (
        "some settings must break the model, or nothing is shown"
    )
    here = data.sel(site=best["site"], strength=best["strength"])
    assert abs(float(moves.sel(site=best["site"], strength=best["strength"]))) == float(
        np.abs(moves.where(fine)).max()
    )
    assert best["probability"] == pytest.approx(
        float(here["probability"].isel(answer=0).mean())
    )
    assert best["ratio"] == pytest.approx(
        best["probability"] / best["probability_before"]
    )
    assert abs(best["perplexity_change"]) <= 0.05
    for facts in result.facts["answers"]:
        within = (
            (data["log_odds"] - data["log_odds_before"])
            .mean("text")
            .sel(answer=facts["answer"])
            .where(fine)
        )
        for name, extreme in (("lowest", within.min()), ("highest", within.max())):
            at = within.sel(site=facts[name]["site"], strength=facts[name]["strength"])
            assert float(at) == float(extreme)
    broken = steered(model, strengths=[1e4])
    assert broken.facts["best"] is None
    assert broken.facts["answers"][0]["lowest"] is None
    assert "No setting moves “t”" in broken.summary()


@pytest.mark.parametrize(
    ("family", "site", "note"),
    [
        ("llama", "layer.2", None),
        (
            "llama",
            "layer.2.mlp",
            "The whole model was run for layer.2.mlp, which is inside a block",
        ),
        ("t5", "decoder.layer.2", "very block was run"),
    ],
)
def test_the_notes_say_when_blocks_could_not_be_skipped(
    tiny: Tiny, family: str, site: str, note: str | None
) -> None:
    vector = torch.randn(
        tiny(family).anatomy.stacks[0].proof.width,
        generator=torch.Generator().manual_seed(0),
    )
    notes = steered(tiny(family), sites=site, along=vector, strengths=1).facts["notes"]
    assert (notes == []) if note is None else (note in notes[0])
    assert (
        steered(tiny(family), sites=site, along=vector, strengths=0).facts["best"]
        is None
    )


def test_answers_that_are_not_given_are_the_models_own_first_choices(
    tiny: Tiny,
) -> None:
    model = tiny("gpt2")
    own = [int(said[-1].argmax()) for said in by_hand(model, {})]
    result = steered(model, answers=None, sites="layer.1", strengths=[1])
    assert result.data["id"].values.tolist() == list(dict.fromkeys(own))
    by_id = steered(model, answers=own[0], sites="layer.1", strengths=1)
    assert by_id.data["id"].values.tolist() == own[:1]


def test_a_deep_model_is_steered_at_ten_layers_and_a_shallow_one_at_all(
    tiny: Tiny,
) -> None:
    deep = hs.load((tiny_model("gpt2", layers=12), tiny_tokenizer()))
    sites = steered(deep, strengths="ablate", new_tokens=0).data["site"].values.tolist()
    assert (len(sites), sites[0], sites[-1]) == (10, "layer.1", "layer.12")
    shallow = steered(tiny("gpt2"), strengths="ablate", new_tokens=0)
    assert shallow.data["site"].values.tolist() == ["layer.1", "layer.2", "layer.3"]
    assert "written" not in shallow.data


@pytest.mark.parametrize("suffix", [".json", ".nc"])
def test_a_result_comes_back_from_a_file(
    tiny: Tiny, tmp_path: Path, suffix: str
) -> None:
    result = steered(tiny("llama"), new_tokens=2)
    result.save(tmp_path / f"steer{suffix}")
    assert hs.Result.load(tmp_path / f"steer{suffix}").equals(result)


WRONG: list[tuple[dict[str, Any], type[Error], str]] = [
    ({"along": (SETS[0], SETS[0][::-1])}, TextError, "both are the same"),
    (
        {"along": (["the cat"], ["a cat"]), "sites": "layer.0"},
        StatesError,
        "the same in both, within rounding",
    ),
    ({"along": ([], SETS[1])}, TextError, "toward is empty"),
    ({"along": torch.zeros(64)}, StatesError, "must not be zero"),
    ({"along": torch.ones(63)}, StatesError, "Give a vector of 64"),
    ({"along": torch.ones(2, 64)}, StatesError, r"it has the shape \[2, 64\]"),
    ({"along": torch.full((64,), float("nan"))}, NotFinite, "NaN"),
    ({"along": "a direction"}, StatesError, "got str"),
    (
        {"along": {"layer.1": torch.ones(64)}, "sites": "layer.2"},
        SiteError,
        "it has vectors for layer.1",
    ),
    ({"along": {}}, SiteError, "the dict of vectors is empty"),
    ({"strengths": [1, float("inf")]}, NotFinite, "one is not finite"),
    ({"strengths": [float("nan")]}, NotFinite, "one is not finite"),
    ({"strengths": [1, 1.0]}, StatesError, "one comes twice"),
    ({"strengths": []}, StatesError, "there are none"),
    ({"strengths": ["much"]}, StatesError, "strengths must be numbers"),
    (
        {"strengths": "rotate"},
        StatesError,
        "strengths must be numbers or 'ablate': got 'rotate'",
    ),
    ({"sites": "layer.9"}, SiteError, "it has layer.0 to layer.3"),
    ({"answers": [" the cat"]}, TextError, r"it is 3 tokens: ' the' ' c' 'at'"),
    ({"answers": [" t", " t"]}, TextError, "two of them are the same token"),
    ({"answers": []}, TextError, "answers must not be empty"),
    ({"answers": ["é"]}, TextError, "LlamaForCausalLM"),
    ({"answers": [999]}, TextError, "0 to 127"),
    ({"answers": [1.5]}, TextError, "float"),
    ({"quality": [[7]]}, TextError, "nothing to predict"),
    ({"quality": []}, TextError, "No texts"),
    ({"pool": "median"}, StatesError, "No pooling 'median'"),
    ({"new_tokens": 500}, TextError, "takes 128"),
    ({"new_tokens": -1}, TextError, "new_tokens must be an integer >= 0: got -1"),
]


def test_a_direction_is_a_value_of_its_own(tiny: Tiny) -> None:
    with pytest.raises(
        StatesError,
        match=r"direction must be a Direction: got tuple\. Give hs\.Direction\.between",
    ):
        hs.steer(tiny("llama"), PROMPTS, SETS)  # type: ignore[arg-type]
    between = hs.Direction.between(tiny("llama"), *SETS, sites="layer.2")
    assert set(between.vectors) == {"layer.2"}
    expected = difference(tiny("llama"), "layer.2")
    # The states are float32, and a text in a batch rounds otherwise than the text
    # alone, differently on each processor.
    torch.testing.assert_close(
        between.vectors["layer.2"], expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "kind", "found"), WRONG, ids=[found for _, _, found in WRONG]
)
def test_what_cannot_be_done_is_said(
    tiny: Tiny, options: dict[str, Any], kind: type[Error], found: str
) -> None:
    with pytest.raises(kind, match=found):
        steered(tiny("llama"), **options)


def test_models_that_say_nothing(tiny: Tiny) -> None:
    with pytest.raises(PassError, match="it has no head, and makes no logits"):
        steered(tiny("gpt2", "base"))
    with pytest.raises(PassError, match="has no mask token"):
        steered(tiny("bert"))


@pytest.mark.parametrize("spare_first", [False, True])
def test_every_set_of_texts_is_encoded_once(spare_first: bool, counting: Any) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    steered(model, new_tokens=1)  # whatever is tried on the model has been tried
    counted = counting(model)
    steered(model, answers=None, new_tokens=2, spare_first=spare_first)
    assert counted.calls == [*map(list, SETS), PROMPTS, OTHERS]


def test_the_answers_are_shown_before_the_perplexity_is_measured(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hiddenscope.progress._shown", True)
    data = steered(tiny("llama"), strengths=[-1, 0, 1]).data
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "The perplexity follows" in line
    ]
    assert len(lines) == len(ANSWERS)
    for place, line in enumerate(lines):
        means = data["probability"].mean("text").isel(answer=place)
        assert (
            f"lowest {float(means.min()):.2g} at" in line
            and f"highest {float(means.max()):.2g} at" in line
        )


def test_nothing_is_left_on_the_module(tiny: Tiny, hanging: Callable[..., Any]) -> None:
    model = tiny("llama")
    steered(model)
    before = hanging(model.module)
    steered(model, upwards=True, new_tokens=2)
    with pytest.raises(NotFinite):
        steered(model, strengths=[1e38], along=torch.full((64,), 1e30))
    assert hanging(model.module) == before


def test_it_is_shown_and_told(tiny: Tiny) -> None:
    model = tiny("llama")
    result = steered(model, strengths=[-0.5, 0, 0.5], new_tokens=3)
    grid, *rest = views_of(result)
    assert isinstance(grid, Grid)
    assert grid.tokens == ("-0.5", "0", "+0.5")
    assert grid.sites == ("layer.1", "layer.2", "layer.3")
    moves = (result.data["log_odds"] - result.data["log_odds_before"]).mean("text")
    np.testing.assert_allclose(
        grid.measures[0].numbers, moves[..., 0], rtol=1e-5, atol=1e-6
    )
    assert [one.meaning for one in grid.measures] == ["diverging"] * 2 + [
        "sequential"
    ] * 3
    np.testing.assert_allclose(
        grid.measures[-1].numbers, 1 + result.data["perplexity_change"], rtol=1e-5
    )
    assert [view.x_name for view in rest if isinstance(view, Lines)] == [
        "strength",
        "strength",
        "site",
        "site",
    ]
    best, sections = result.facts["best"], sections_of(result)
    told = " ".join(section.prose for section in sections)
    assert f"{best['perplexity_change']:+.1%}" in told
    here = result.data.sel(site=best["site"], strength=best["strength"])
    answers, written = sections[0].tables
    assert answers.columns[2:4] == ("probability before", "after")
    assert (best["probability_before"], best["probability"]) in [
        row[2:4] for row in answers.rows
    ]
    assert written.columns == ("prompt", "before", "after")
    columns = (here["prompt"], here["written_before"], here["written"])
    rows = zip(*(column.values.tolist() for column in columns), strict=True)
    assert written.rows == tuple(
        tuple(str(cell).strip() for cell in row) for row in rows
    )
    assert sum(len(section.views) for section in sections) == 5


class Bare(nn.Module):
    """A module of one's own: it makes logits and states, and has no config."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = tiny_model("gpt2")

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.inner.get_input_embeddings()
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        return self.inner(input_ids, output_hidden_states=output_hidden_states)


def test_a_module_without_a_config_is_steered() -> None:
    model = hs.load((Bare().eval(), None))
    direction = hs.Direction.between(model, [[5, 6]], [[7, 8]], sites="layer.2")
    quality = [[9, 8, 7, 6]]
    result = hs.steer(model, [[5, 6, 7]], direction, answers=[3], quality=quality)
    assert result.facts["sites"] == ["layer.2"]
    assert result.facts["not_written"] == "its module has no generate method"


def test_the_findings_say_what_was_not_tested(tiny: Tiny) -> None:
    result = steered(tiny("llama"), strengths=[-0.5, 0, 0.5])
    assert (
        "the best of 6 settings for 3 prompts; whether it holds for other prompts was"
        " not tested" in result.summary()
    )


def test_ablation_is_shown_along_the_sites(tiny: Tiny) -> None:
    result = steered(tiny("llama"), strengths="ablate")
    views = views_of(result)
    assert [type(view) for view in views] == [Lines, Lines]
    assert isinstance(views[1], Lines)
    np.testing.assert_allclose(
        views[1].series[0].y, result.data["perplexity"][:, 0], rtol=1e-6
    )
    assert [section.title for section in sections_of(result)] == [
        "What the model answers, steered"
    ]
    broken = steered(tiny("llama"), strengths=[1e4, 2e4])
    assert "No setting moves" in sections_of(broken)[0].prose


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    model = tiny("llama")
    model.module.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    model.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def test_the_command_prints_what_moved_and_what_was_written(folder: Path) -> None:
    (folder / "sets.csv").write_text(
        "text,label\nThe cat is here,cat\nA cat ran,cat\nThe dog is there,dog\n"
    )
    (folder / "others.txt").write_text("\n".join(OTHERS))
    shared = [
        "--model",
        str(folder / "model"),
        "--quality",
        str(folder / "others.txt"),
        "--new-tokens",
        "3",
    ]
    given = [
        "steer",
        PROMPTS[0],
        "--data",
        str(folder / "sets.csv"),
        "--toward",
        "cat",
        "--away",
        "dog",
    ]
    done = CliRunner().invoke(
        app, [*given, "--answer", " t", "--strengths", "-1,1", *shared]
    )
    assert done.exit_code == 0, done.stderr
    assert "the mean state of 2 texts less that of 1 text" in done.stdout
    assert re.search(rf"{PROMPTS[0]} +before ", done.stdout)
    bare = [
        "steer",
        PROMPTS[0],
        "--toward",
        "A cat",
        "--away",
        "A dog",
        "--ablate",
        "--upwards",
        "--sites",
        "layer.2",
    ]
    out = folder / "steer.json"
    done = CliRunner().invoke(app, [*bare, "--spare-first", "--out", str(out), *shared])
    assert done.exit_code == 0, done.stderr
    assert hs.Result.load(out).facts["sites"] == ["layer.2"]
    both = CliRunner().invoke(app, [*bare, "--strengths", "1", *shared])
    assert (
        both.exit_code == 2
        and "--strengths and --ablate were both given" in both.stderr
    )
    wrong = CliRunner().invoke(app, [*given[:-1], "cow", *shared])
    assert wrong.exit_code == 2
    assert "its labels are cat, dog" in wrong.stderr


ELSEWHERE = [
    "The capital of the state of Texas is",
    "The Eiffel Tower stands in the city of",
    "The Bruins play their home games in",
    "The Yankees are a baseball team from",
    "The University of Oxford is in the city of",
    "The largest city of Bavaria is",
    "Heathrow is the largest airport of",
    "The largest city on Lake Michigan is",
    "The British Museum is in",
    "The Colosseum stands in the city of",
]


def cities(label: str) -> list[str]:
    read = texts.read("cities-incomplete")
    return [
        text
        for text, one in zip(read.texts, read.labels or (), strict=True)
        if one == label
    ]


@pytest.mark.real
@long
def test_montreal_is_unlearned_and_toronto_is_not(smollm2: hs.Model) -> None:
    prompts = [
        "Ontario's provincial capital is the city of",
        "The Montreal Canadiens play their home games in",
    ]
    prompts += [
        "The largest city of Quebec is",
        "The Toronto Maple Leafs play their home games in",
    ]
    sets = cities("Toronto"), cities("Montreal")
    direction = hs.Direction.between(smollm2, *sets, sites="layer.25", spare_first=True)
    result = hs.steer(
        smollm2,
        prompts,
        direction,
        strengths="ablate",
        answers=CITIES,
        quality=texts.read("plain").texts[:20],
        new_tokens=0,
    )
    here = result.data.isel(site=0, strength=0)
    times = (
        (here["probability"] / result.data["probability_before"])
        .transpose("text", "answer")
        .values
    )
    assert (result.data["probability_before"].sel(answer=" Montreal") > 0.05).all(), (
        "nothing can be unlearned otherwise"
    )
    assert (times[:, 0] < 0.1).all()
    assert (times[:, 1] > 0.9).all()
    assert abs(float(here["perplexity_change"])) < 0.05
    assert result.facts["best"]["ratio"] < 0.1


@pytest.mark.real
def test_toronto_is_unlearned_and_no_longer_written(smollm2: hs.Model) -> None:
    prompts = [
        "The biggest city in the province of Ontario is",
        "The Toronto Maple Leafs play their home games in",
    ]
    direction = hs.Direction.between(
        smollm2, cities("Toronto"), ELSEWHERE, sites="layer.28", spare_first=True
    )
    given: dict[str, Any] = {
        "quality": texts.read("plain").texts[:20],
        "strengths": "ablate",
        "answers": CITIES,
    }
    result = hs.steer(smollm2, prompts, direction, **given, new_tokens=4)
    data = result.data.isel(site=0, strength=0)
    assert (
        float(
            data["probability"].sel(answer=" Toronto").mean()
            / data["probability_before"][:, 1].mean()
        )
        < 0.05
    )
    assert abs(float(data["perplexity_change"])) < 0.05
    assert all("Toronto" in text for text in data["written_before"].values)
    assert not any("Toronto" in text for text in data["written"].values)
