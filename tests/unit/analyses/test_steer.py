"""Steer: what is added can be taken away, what is ablated is gone, and both held
against passes run by hand.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.steer.compute import median_interval
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    Error,
    NotFinite,
    PassError,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.results import story_of
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.testing.models import PlainGPT
from tests.unit.analyses.refused import check_refused

Tiny = Callable[..., hs.Model]
# An even number of tokens in all: their median norm lies between two.
PROMPTS = ["The cat sat on the", "A dog and a cat", "One of the ten"]
SETS = (["The cat is here", "A cat ran"], ["The dog is there", "No dog ran off"])
OTHERS = [
    "The rest of it was as good.",
    "On the other hand there is a point in it.",
    "So it is.",
]
ANSWERS = [" t", "a"]


def steered(
    model: hs.Model, prompts: Any = PROMPTS, along: Any = SETS, **options: Any
) -> hs.Result:
    """Steer between two sets of texts, or along a vector, a probe or several by site."""
    where = {
        name: options.pop(name)
        for name in ("sites", "pool", "upwards", "spare_first")
        if name in options
    }
    if isinstance(along, tuple):
        direction = hs.Direction.between(model, *along, **where)
    else:
        direction = hs.Direction.of(along, **where)
    given: dict[str, Any] = {"answers": ANSWERS, "quality": OTHERS, "new_tokens": 0}
    return hs.steer(model, prompts, direction, **{**given, **options})


def by_hand(
    model: hs.Model, changes: Any, some: list[str] = PROMPTS
) -> list[torch.Tensor]:
    """Log-probabilities [token, vocabulary] of each text alone, by hs.edit, in float64."""
    found = []
    for text in some:
        made: Any = hs.record(model, text, (), logits=True)
        if changes:
            made = hs.edit(model, text, changes, (), logits=True)
        found.append(made.logits.double().log_softmax(-1))
    return found


def difference(model: hs.Model, site: str, pool: Any = "last") -> torch.Tensor:
    means = []
    for texts in SETS:
        captured: Any = [model.capture(text, site) for text in texts]
        # Those of one stack, where there are two.
        captured = [getattr(one, site.partition(".")[0], one) for one in captured]
        rows = [states.pool(pool, site)[0].double() for states in captured]
        means.append(torch.stack(rows).mean(0))
    return means[0] - means[1]


@pytest.mark.parametrize(
    ("family", "site", "pool", "expected"),
    [
        ("llama", "layer.2", "last", "last"),
        ("gpt2", "layer.1", "mean", "mean"),
        ("bert", "layer.2", None, "mean"),
        ("t5", "encoder.layer.2", None, "mean"),
    ],
)
def test_a_direction_between_texts_is_the_difference_of_their_means(
    tiny: Tiny, family: str, site: str, pool: Any, expected: str
) -> None:
    model = tiny(family)
    options = {} if pool is None else {"pool": pool}
    found = hs.Direction.between(model, *SETS, sites=site, upwards=True, **options)
    assert next(iter(found.vectors)) == site and len(found.vectors) > 1
    for upper, vector in found.vectors.items():
        np.testing.assert_allclose(
            vector, difference(model, upper, expected), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_strength_0_changes_nothing_and_very_little_changes_very_little(
    tiny: Tiny, family: str
) -> None:
    data = steered(tiny(family), strengths=[0, 1e-12, 1], new_tokens=2).data
    nothing = data.sel(strength=0)
    for name in ("probability", "log_odds", "perplexity"):
        assert (nothing[name] == data[f"{name}_before"]).all()
        little = data[name].sel(strength=1e-12)
        np.testing.assert_allclose(little, nothing[name], rtol=1e-4)
        assert not np.allclose(data[name].sel(strength=1), nothing[name], rtol=1e-3)
    assert (nothing["perplexity_change"] == 0).all()
    at = nothing["written"].sel(site=data.attrs["written_at"])
    assert (at == data["written_before"]).all()


def test_a_direction_along_the_first_tokens_cannot_spare_them(tiny: Tiny) -> None:
    model = tiny("llama")
    given: dict[str, Any] = {"sites": "layer.2", "spare_first": True}
    result = steered(model, strengths="ablate", quality=PROMPTS, **given)
    assert result.facts["direction"]["spare_first"]
    assert "first tokens" in result.summary()
    first = [model.capture(text)["layer.2"][0].double() for text in PROMPTS]
    mean = torch.stack(first).mean(0)
    with pytest.raises(StatesError, match="the mean state of the first tokens"):
        steered(model, along=mean, quality=PROMPTS, **given)


def test_directions_by_site(tiny: Tiny) -> None:
    model = tiny("llama")
    by_texts = steered(model, sites="layer.1,layer.3", strengths=[1])
    assert by_texts.facts["direction"] == {
        "origin": "texts",
        "toward": 2,
        "away": 2,
        "pool": "last",
        "spare_first": False,
    }
    said = "the mean state of 2 texts less that of 2 texts, at the last token"
    assert said in by_texts.summary()
    vectors = {site: difference(model, site) for site in ("layer.1", "layer.3")}
    by_site = steered(model, along=vectors, strengths=[1]).data
    assert by_site["site"].values.tolist() == ["layer.1", "layer.3"]
    expected = by_texts.data["probability"]
    np.testing.assert_allclose(by_site["probability"], expected, rtol=1e-4)


def test_a_fitted_probe_is_used_at_its_own_site(tiny: Tiny) -> None:
    model = tiny("llama")
    rows: Any = model.capture([*SETS[0], *SETS[1]], "layer.2").pool("last", "layer.2")
    probe = hs.Probe(site="layer.2").fit(rows, ["cat", "cat", "dog", "dog"])
    own = steered(model, along=probe, strengths=[2])
    assert own.facts["direction"]["fitted_at"] == ["layer.2"]
    assert "raises the decision value of the probe by 1" in own.summary()
    step = probe.coef_[0] / (probe.coef_**2).sum()
    by_vector = steered(model, along=step, sites="layer.2", strengths=[2]).data
    found = own.data["probability"]
    np.testing.assert_allclose(found, by_vector["probability"], rtol=1e-6)
    every = {"layer.2": probe, "layer.3": probe}
    for along, options, sites, elsewhere in (
        (probe, {}, ["layer.2"], []),
        (probe, {"sites": "layer.1,layer.2"}, ["layer.1", "layer.2"], ["layer.1"]),
        (probe, {"upwards": True}, ["layer.2"], ["layer.3"]),
        (every, {}, ["layer.2", "layer.3"], ["layer.3"]),
    ):
        result = steered(model, along=along, strengths=[2], **options)
        assert result.data["site"].values.tolist() == sites
        assert result.facts["direction"]["used_elsewhere"] == elsewhere
        for site in elsewhere:
            said = f"fitted at layer.2 and is used at {site} too"
            assert said in result.summary()
    homeless = steered(model, along=hs.Probe().fit(rows, [0, 0, 1, 1]), strengths=[2])
    assert homeless.data.sizes["site"] == 3
    assert homeless.facts["direction"]["fitted_at"] == []
    with pytest.raises(SiteError, match=r"layer\.9"):
        steered(model, along=hs.Probe(site="layer.9").fit(rows, [0, 0, 1, 1]))


def test_what_is_written_is_what_generate_writes_while_states_are_changed(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    prompts = [PROMPTS[0], PROMPTS[0][:-3] + "all", PROMPTS[1], "site", PROMPTS[1]]
    result = steered(model, prompts, sites="layer.1,layer.2", new_tokens=5)
    data, told = result.data, result.facts["written"]
    site = data.attrs["written_at"]
    vector = difference(model, site)
    for place, prompt in enumerate(prompts):
        ids = torch.tensor([model.encode(prompt).ids[0]])
        for strength in (0, -1, 1):
            with hs.editing(model, {site: hs.Add(vector, scale=strength)}):
                made = model.module.generate(  # type: ignore[operator]
                    ids, max_new_tokens=5, do_sample=False, pad_token_id=0
                )
            text = model.tokenizer.decode(made[0, ids.shape[1] :]).partition("<eos>")[0]
            here = data.isel(text=place)
            assert here["written"].sel(site=site, strength=strength).item() == text
            assert strength or here["written_before"].item() == text
    assert data["prompt"].values.tolist() == prompts
    elsewhere = data["written"].sel(site=data["site"].values != site)
    assert (elsewhere == "").all(), "texts are written at the best site only"
    assert told["site"] == site
    here = data.sel(site=site, strength=told["strength"])
    columns = {"prompt": "prompt", "after": "written", "before": "written_before"}
    for name, column in columns.items():
        assert [one[name] for one in told["texts"]] == here[column].values.tolist()


def test_a_masked_model_is_asked_at_its_mask_and_writes_nothing() -> None:
    tokenizer = tiny_tokenizer(cls=True)
    tokenizer.mask_token = "<unk>"
    model = hs.load((tiny_model("bert"), tokenizer))
    prompts = ["The <unk> sat on the mat", "A dog and a <unk>"]
    result = steered(model, prompts, sites="layer.2", strengths=[1], new_tokens=None)
    assert "written" not in result.data
    assert "masked language model" in result.facts["not_written"]
    with pytest.raises(TextError, match="must have one mask token: it has 0"):
        steered(model, ["No mask"])
    with pytest.raises(PassError, match="does not continue a text"):
        steered(model, prompts, new_tokens=3)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_decoder_writes_after_its_targets(family: str) -> None:
    """Also where the configuration names its start, and not that of generation."""
    module: Any = tiny_model(family)
    module.config.decoder_start_token_id = 1
    module.generation_config = GenerationConfig(num_return_sequences=2, num_beams=2)
    model = hs.load((module, tiny_tokenizer()))
    prompts = model.encode(PROMPTS[:2], targets=[[1, 7, 8], [1, 9]])
    vector = torch.randn(64, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"sites": "decoder.layer.2", "strengths": [3]}
    result = steered(model, prompts, vector, new_tokens=3, **given)
    for name, scale in (("written_before", 0), ("written", 3)):
        changes: Any = {given["sites"]: hs.Add(vector, scale=scale)}
        for place, text in enumerate(result.data[name].values.ravel().tolist()):
            ids = list(prompts.targets.ids[place])  # type: ignore[union-attr]
            for _ in range(3):
                whole = model.encode(PROMPTS[place : place + 1], targets=[ids])
                made: Any = hs.edit(model, whole, changes, (), logits=True)
                ids.append(int(made.logits[-1].argmax()))
            fresh = ids[len(prompts.targets.ids[place]) :]  # type: ignore[union-attr]
            assert text == model.tokenizer.decode(fresh)  # type: ignore[union-attr]


def test_a_model_that_cannot_write_says_so_before_it_is_steered() -> None:
    module: Any = tiny_model("llama")
    module.generation_config.cache_implementation = "nonsense"
    model = hs.load((module, tiny_tokenizer()))
    with pytest.raises(PassError, match="generate stopped with") as raised:
        steered(model, new_tokens=2)
    assert "Check the options, and the model's generation_config" in str(raised.value)


def test_the_best_setting_is_the_largest_move_that_leaves_the_model_as_good(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    result = steered(model, along=SETS[::-1], strengths=[-0.5, -0.1, 0, 0.1, 0.5, 20])
    data, best = result.data, result.facts["best"]
    fine = np.abs(data["perplexity"] / data["perplexity_before"] - 1) <= 0.05
    assert 0 < int(fine.sum()) < fine.size, "or nothing is shown"
    moves = (data["log_odds"] - data["log_odds_before"]).median("text").where(fine)
    setting = {name: best[name] for name in ("site", "strength")}
    # Up with positive strengths, and down with negative ones.
    asked = moves.isel(answer=0) * np.sign(data["strength"])
    assert float(asked.sel(setting)) == float(asked.max()) > 0
    here = data.sel(setting)
    mean = float(here["probability"].isel(answer=0).mean())
    assert best["probability"] == pytest.approx(mean)
    ratio = pytest.approx(best["probability"] / best["probability_before"])
    assert best["ratio"] == ratio
    assert abs(best["perplexity_change"]) <= 0.05
    for facts in result.facts["answers"]:
        of_answer = moves.sel(answer=facts["answer"])
        extremes = {"lowest": of_answer.min(), "highest": of_answer.max()}
        for name, extreme in extremes.items():
            at = {dim: facts[name][dim] for dim in ("site", "strength")}
            assert float(of_answer.sel(at)) == float(extreme)
    best_of = "the best of 15 settings for 3 prompts; whether it holds for other"
    assert best_of in result.summary()
    broken = steered(model, strengths=[1e4], answers=None)
    assert broken.facts["best"] is None
    assert broken.facts["answers"][0]["lowest"] is None
    found = broken.facts["strongest"]
    first = story_of(broken)[0].prose.splitlines()[0]
    assert first in broken.summary()
    verdict = "No setting that changes the perplexity by at most 5% moves “"
    effect = f"At a higher cost, {found['site']} with strength 10000 moves “"
    assert first.startswith(verdict) and effect in first
    assert f"median change of the log-odds {found['log_odds_change']:+.2g}" in first
    assert f"perplexity {found['perplexity_change']:+,.0%}" in first


def test_the_headline_is_towards_what_was_asked_at_a_cost_that_is_known(
    tiny: Tiny,
) -> None:
    """Not what moves most against it, nor what may cost more."""
    model = tiny("llama")
    weight: Any = model.module.get_output_embeddings().weight.detach()  # type: ignore[operator]
    vector = weight[model.encode(" t").ids[0][-1]]
    given: dict[str, Any] = {"sites": "layer.3", "answers": " t"}
    quality = [f"{text} {number}" for number in range(4) for text in OTHERS]
    given |= {"along": vector, "quality": quality}
    both = steered(model, strengths=[-9, 0.02, 0.04, 9], **given)
    best, data = both.facts["best"], both.data
    assert best["strength"] > 0 and best["log_odds_change"] > 0
    low, high = best["perplexity_interval"]
    assert -0.05 <= low < best["perplexity_change"] < high <= 0.05
    here = data.sel(site="layer.3", strength=best["strength"])
    assert (low, high) == (
        here["perplexity_change_low"],
        here["perplexity_change_high"],
    )
    assert "moves “t” most as asked (up with positive strengths" in both.summary()
    # The point is within 5%, and the interval is not.
    costs = data["perplexity_change"].values.ravel()
    high_ends = data["perplexity_change_high"].values.ravel()
    assert ((costs > 0) & (costs < high_ends)).any()
    away = steered(model, strengths=[-0.04, -0.02], **given).facts["best"]
    assert away["strength"] < 0 and away["log_odds_change"] < 0
    against = steered(model, strengths=[0.02], **{**given, "along": -vector})
    assert against.facts["best"] is None and against.facts["strongest"] is None
    first = story_of(against)[0].prose.splitlines()[0]
    assert first.startswith("No setting that changes the perplexity by at most 5% mov")
    assert "The other way, layer.3 with strength 0.02 moves “t” most" in first
    few = steered(model, strengths=[0.02], **{**given, "quality": OTHERS})
    assert "perplexity_interval" not in few.facts["best"]
    assert "Its change has no interval, which takes 8 texts" in few.summary()


def test_groups_of_prompts_count_as_one_each(tiny: Tiny) -> None:
    prompts = [f"{text} {number}" for text in PROMPTS for number in range(4)]
    given: Any = {"sites": "layer.1", "strengths": [1], "along": SETS[::-1]}
    data = hs.read(prompts, group=[number // 3 for number in range(12)])
    result = steered(tiny("llama"), data, **given)
    assert result.facts["groups"] == 4 and result.facts["groups_given"]
    found = result.facts["strongest"]
    assert found["interval"] is None, "four groups are too few for 95%"
    moves = (result.data["log_odds"] - result.data["log_odds_before"]).values[
        0, 0, :, 0
    ]
    by_group = moves.reshape(4, 3).mean(1)
    assert found["log_odds_change"] == pytest.approx(np.median(by_group))
    singly = steered(tiny("llama"), prompts, **given)
    assert singly.facts["strongest"]["interval"] is not None
    assert "since no groups were given. That is doubtful" in singly.summary()


def test_what_is_told_moves_by_the_median_that_is_shown(tiny: Tiny) -> None:
    prompts = [*PROMPTS, "So it is", "It was a"]
    data = hs.read(prompts, group=["a", "a", "b", "c", "d"])
    model = tiny("gpt2")
    width = model.anatomy.width(model.anatomy.sites[0])
    for seed in range(4):
        vector = torch.randn(width, generator=torch.Generator().manual_seed(seed))
        result = steered(model, data, vector, sites="layer.*", strengths=[-0.1, 0.1])
        found = result.data["log_odds"] - result.data["log_odds_before"]
        moves = found[..., 0].values
        by_group = np.stack(
            [moves[..., :2].mean(-1), *np.moveaxis(moves[..., 2:], -1, 0)]
        )
        medians = np.median(by_group, 0) * [-1, 1]
        told = result.facts["strongest"]
        assert (told is not None) == (medians.max() > 0)
        if told is not None:
            sign = np.sign(told["strength"])
            assert told["log_odds_change"] * sign == pytest.approx(medians.max())


@pytest.mark.parametrize("skew", [1, -1])
def test_the_interval_of_the_strongest_setting_holds_the_median(skew: int) -> None:
    """Of skewed changes, at the strongest of 12 settings, which is chosen by them."""
    generator = np.random.default_rng(0)
    held, trials = 0, 400
    for _ in range(trials):
        changes = skew * (generator.lognormal(size=(20, 12)) - 1)
        strongest = int(np.argmax(np.abs(changes.mean(0))))
        interval = median_interval(changes[:, strongest], 12)
        assert interval is not None
        held += interval[0] <= 0 <= interval[1]
    assert held / trials > 0.95
    assert median_interval(changes[:8, 0], 12) is None, "too few for 95%"


def test_a_prompt_given_again_is_no_further_evidence(tiny: Tiny) -> None:
    given: Any = {"sites": "layer.1", "strengths": [1], "along": SETS[::-1]}
    given["answers"] = " t"
    few = steered(tiny("llama"), PROMPTS * 5, **given).facts["strongest"]
    assert few["interval"] is None
    prompts = [f"{text} {number}" for text in PROMPTS for number in range(3)]
    result = steered(tiny("llama"), prompts, **given)
    change = result.data["log_odds"] - result.data["log_odds_before"]
    low, high = result.facts["strongest"]["interval"]
    # Of 9 changes, all but the lowest or all but the highest lie on one side of the
    # median in 2% of cases.
    ranked = np.sort(change.to_numpy().ravel())
    assert (low, high) == (ranked[1], ranked[-2])
    told = f"(95% interval {low:+.2g} to {high:+.2g})"
    assert told in result.summary()
    assert "The interval accounts for the choice among 1 setting. " in result.summary()


def test_the_notes_say_when_blocks_could_not_be_skipped(tiny: Tiny) -> None:
    inside = "The whole model was run for layer.2.mlp, which is inside a block"
    for family, site, note in (
        ("llama", "layer.2", None),
        ("llama", "layer.2.mlp", inside),
        ("t5", "decoder.layer.2", "very block was run"),
    ):
        vector = torch.randn(tiny(family).anatomy.stacks[0].proof.width)
        given: Any = {"strengths": [0, 1], "answers": " t"}
        facts = steered(tiny(family), sites=site, along=vector, **given).facts
        assert (facts["notes"] == []) if note is None else (note in facts["notes"][0])
        assert facts["settings"] == 1
    unchanged = steered(tiny("llama"), sites="layer.2", strengths=0)
    assert unchanged.facts["best"] is None


def test_answers_that_are_not_given_are_the_models_own_first_choices(
    tiny: Tiny,
) -> None:
    model = tiny("gpt2")
    own = [int(said[-1].argmax()) for said in by_hand(model, {})]
    result = steered(model, answers=None, sites="layer.1", strengths=[1])
    assert result.data["id"].values.tolist() == list(dict.fromkeys(own))
    by_id = steered(model, answers=own[0], quality=None, sites="layer.1", strengths=1)
    assert by_id.data["id"].values.tolist() == own[:1]
    assert by_id.facts["quality"]["texts"] == 40, "plain sentences"


def test_an_answer_without_its_space_is_noted(tiny: Tiny) -> None:
    given: Any = {"sites": "layer.1", "strengths": [1], "answers": ["a", " t"]}
    notes = steered(tiny("llama"), **given).facts["notes"]
    assert notes == ["'a' has no leading space; ' a' is another token."]


def test_a_deep_model_is_steered_at_ten_layers_and_a_shallow_one_at_all(
    tiny: Tiny,
) -> None:
    deep = hs.load((tiny_model("gpt2", layers=12), None))
    sites = list(hs.Direction.between(deep, [[5, 6]], [[7, 8]]).vectors)
    assert (len(sites), sites[0], sites[-1]) == (10, "layer.1", "layer.12")
    shallow = hs.Direction.between(tiny("gpt2"), *SETS)
    assert list(shallow.vectors) == ["layer.1", "layer.2", "layer.3"]


REFUSED: list[tuple[dict[str, Any], type[Error], str]] = [
    ({"along": (SETS[0], SETS[0][::-1])}, TextError, "both are the same"),
    ({"along": (["the cat"], ["a cat"]), "sites": "layer.0"}, StatesError, "rounding"),
    ({"along": ([], SETS[1])}, TextError, "toward is empty"),
    ({"along": torch.zeros(64)}, StatesError, "must not be zero"),
    ({"along": torch.ones(63)}, StatesError, "Give a vector of 64"),
    ({"along": torch.ones(2, 64)}, StatesError, "it has the shape [2, 64]"),
    ({"along": torch.full((64,), float("nan"))}, NotFinite, "NaN"),
    ({"along": torch.full((64,), 1e30), "strengths": [1e38]}, NotFinite, ""),
    ({"along": "a direction"}, StatesError, "got str"),
    ({"along": {"layer.1": torch.ones(64)}, "sites": "layer.2"}, SiteError, "vectors"),
    ({"along": {}}, SiteError, "the dict of vectors is empty"),
    ({"strengths": [1, float("inf")]}, NotFinite, "one is not finite"),
    ({"strengths": [1, 1.0]}, StatesError, "one comes twice"),
    ({"strengths": ["much"]}, StatesError, "strengths must be numbers"),
    ({"answers": [" the cat"]}, TextError, "it is 3 tokens: ' the' ' c' 'at'"),
    ({"answers": [" t", " t"]}, TextError, "two of them are the same token"),
    ({"answers": [999]}, TextError, "0 to 127"),
    ({"quality": [[7]]}, TextError, "nothing to predict"),
    ({"pool": "median"}, StatesError, "No pooling 'median'"),
    ({"new_tokens": 500}, TextError, "takes 128"),
]


def test_what_cannot_be_done_is_refused(tiny: Tiny) -> None:
    llama = tiny("llama")
    for options, kind, words in REFUSED:
        check_refused(kind, words, steered, llama, **options)
    check_refused(PassError, "it has no head", steered, tiny("gpt2", "base"))
    check_refused(PassError, "has no mask token", steered, tiny("bert"))
    words = "direction must be a Direction: got tuple. Give hs.Direction.between"
    check_refused(StatesError, words, hs.steer, llama, PROMPTS, SETS)


def test_every_set_of_texts_is_encoded_once(counting: Any) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    steered(model, new_tokens=1)  # whatever is tried on the model has been tried
    for spare_first in (False, True):
        counted = counting(model)
        steered(model, answers=None, new_tokens=2, spare_first=spare_first)
        assert counted.calls == [*map(list, SETS), PROMPTS, OTHERS]
        model.text_encoder.tokenizer = counted.tokenizer


def test_a_module_without_a_config_is_steered() -> None:
    model = hs.load((PlainGPT(0).eval(), None))
    direction = hs.Direction.between(model, [[5, 6]], [[7, 8]], sites="layer.2")
    quality = [[9, 8, 7, 6]]
    result = hs.steer(model, [[5, 6, 7]], direction, answers=[3], quality=quality)
    assert result.facts["sites"] == ["layer.2"]
    assert result.facts["not_written"] == "its module has no generate method"


def test_the_command_prints_what_moved_and_what_was_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenscope.load", lambda *given, **options: tiny("llama"))
    sets, others = tmp_path / "sets.csv", tmp_path / "others.txt"
    sets.write_text(
        "review,mood\nThe cat is here,cat\nA cat ran,cat\nThe dog is there,dog\n"
    )
    others.write_text("\n".join(OTHERS))

    def run(*words: str) -> Any:
        shared = ["--quality", str(others), "--new-tokens", "3"]
        return CliRunner().invoke(app, ["steer", PROMPTS[0], *words, *shared])

    labelled = ["--data", str(sets), "--text", "review", "--label", "mood"]
    labelled += ["--toward", "cat", "--away"]
    done = run(*labelled, "dog", "--answer", " t", "--strengths", "-1,1")
    assert done.exit_code == 0, done.stderr
    assert "the mean state of 2 texts less that of 1 text" in done.stdout
    assert re.search(rf"{PROMPTS[0]} +before ", done.stdout)
    bare = ["--toward", "A cat", "--away", "A dog", "--ablate"]
    bare += ["--upwards", "--sites", "layer.2", "--spare-first"]
    out = tmp_path / "steer.json"
    done = run(*bare, "--out", str(out))
    assert done.exit_code == 0, done.stderr
    facts = hs.Result.load(out).facts
    assert (facts["sites"], facts["how"]) == (["layer.2"], "ablate")
    assert facts["upwards"] and facts["direction"]["spare_first"]
    done = run(*bare, "--strengths", "1")
    assert done.exit_code == 2
    assert "--strengths and --ablate were both given" in done.stderr
    done = run(*labelled, "cow")
    assert done.exit_code == 2
    assert "its labels are cat, dog" in done.stderr
    done = run(*bare, "--label", "mood")
    assert done.exit_code == 2 and "a column of --data, which is not" in done.stderr
