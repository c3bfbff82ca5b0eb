"""Profiles of neurons: held against plain numpy, laws, and what is planted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import hiddenscope as hs
from hiddenscope.analyses.profile import neurons as module
from hiddenscope.analyses.profile.story import NEURON_MEASURES
from hiddenscope.errors import SiteError
from hiddenscope.results import story_of
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.unit.analyses.blocks import Blocks

Tiny = Callable[..., hs.Model]
SITES = "*.mlp.neurons"
STORED = "*.mlp.neurons,*.mlp,*.mid"


def random_texts(count: int, length: int = 14, seed: int = 0) -> list[list[int]]:
    """Few types, so that some are frequent."""
    generator = np.random.default_rng(seed)
    texts: list[list[int]] = generator.integers(20, 32, (count, length)).tolist()
    return texts


def frequent(states: hs.States, rows: Any) -> Any:
    """The types with at least 20 tokens; there are less than 64."""
    types, counts = np.unique(states.tokens.ids[rows], return_counts=True)
    return types[counts >= 20]


def oracle(states: hs.States, site: str, rows: Any, types: Any) -> list[float]:
    """All measures of some rows of a site, all of them at once."""
    values = states[site].double().numpy()[rows]
    sizes = np.abs(values)
    layer = site.removesuffix(".mlp.neurons")
    added = np.linalg.norm(states[f"{layer}.mlp"].double().numpy()[rows], axis=1)
    stream = np.linalg.norm(states[f"{layer}.mid"].double().numpy()[rows], axis=1)
    ids, count = states.tokens.ids[rows], len(values)
    mean_squares = (sizes**2).mean(0)
    sparseness = (1 - sizes.mean(0) ** 2 / mean_squares) / (1 - 1 / count)
    active = (sizes >= 0.5 * np.sqrt(mean_squares)).mean(0)
    means = np.stack([sizes[ids == kind].mean(0) for kind in types])
    entropy = stats.entropy(means) / np.log(len(means))
    return [
        sizes.mean(),
        np.quantile(sizes, 0.99, axis=1).mean(),
        (added / stream).mean(),
        np.median(stats.kurtosis(values, axis=0, fisher=False)),
        np.median(sparseness),
        np.median(active),
        np.median(entropy),
    ]


def measured(result: hs.Result) -> Any:
    """Every measure with its interval, [end, site, measure]."""
    ends = []
    for end in ("", "_low", "_high"):
        columns = [result.data[f"{name}{end}"].values for name in NEURON_MEASURES]
        ends.append(np.stack(columns, 1))
    return np.stack(ends)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "gpt_neox"])
def test_every_measure_is_what_numpy_says(tiny: Tiny, family: str) -> None:
    model, texts = tiny(family), random_texts(24)
    states = model.capture(texts, STORED)
    assert isinstance(states, hs.States)
    rows = states.tokens.positions > 0
    result = hs.profile(model, texts, sites=SITES)
    types = frequent(states, rows)
    names = result.data["site"].values.tolist()
    expected = [oracle(states, name, rows, types) for name in names]
    np.testing.assert_allclose(measured(result)[0], expected, rtol=1e-6)
    facts = result.facts["stacks"][0]["neurons"]
    assert facts["tokens"] == rows.sum() and facts["types"] == len(types)
    # Nothing else is asked for than what is drawn.
    assert names == [f"layer.{layer}.mlp.neurons" for layer in (1, 2, 3)]


def test_intervals_leave_out_each_group_in_turn(tiny: Tiny) -> None:
    """The types stay those of all texts."""
    model, texts = tiny("llama"), random_texts(8, 40)
    states = model.capture(texts, STORED)
    assert isinstance(states, hs.States)
    names = [f"layer.{layer}.mlp.neurons" for layer in (1, 2, 3)]
    later = states.tokens.positions > 0
    parts = [later] + [later & (states.tokens.text != text) for text in range(8)]
    types = frequent(states, later)
    values = np.zeros((9, 3, 7))
    for number, part in enumerate(parts):
        for place, name in enumerate(names):
            values[number, place] = oracle(states, name, part, types)
    values[..., :4] = np.log(values[..., :4])
    errors = np.sqrt(7 * values[1:].var(0))
    half = stats.t.ppf(0.975, 7) * errors
    ends = np.stack([values[0] - half, values[0] + half])
    ends[..., :4] = np.exp(ends[..., :4])
    ends[..., 4:] = ends[..., 4:].clip(0, 1)
    result = hs.profile(states, sites=SITES)
    np.testing.assert_allclose(measured(result)[1:], ends, rtol=1e-5)
    step = values[:, 2] - values[:, 1]
    raw = 2 * stats.t.sf(abs(step[0]) / np.sqrt(7 * step[1:].var(0)), 7)
    gaps = result.facts["stacks"][0]["neurons"]["against_previous"]
    factors = [np.exp(value) for value in step[0][:4]] + [*step[0][4:]]
    np.testing.assert_allclose([gap["value"] for gap in gaps], factors, rtol=1e-6)
    order = np.argsort(raw)
    holm = np.maximum.accumulate(np.minimum(1, raw[order] * np.arange(7, 0, -1)))
    corrected = [gaps[place]["p"] for place in order]
    np.testing.assert_allclose(corrected, holm, rtol=1e-5)


def test_neither_batches_nor_the_order_of_texts_matter(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    texts = [text[: 6 + k % 9] for k, text in enumerate(random_texts(45))]
    expected = measured(hs.profile(model, texts, sites=SITES))
    order = np.random.default_rng(3).permutation(45).tolist()
    shuffled = [texts[place] for place in order]
    again = hs.profile(model, shuffled, sites=SITES)
    np.testing.assert_allclose(measured(again), expected, rtol=1e-4)
    states = model.capture(texts, STORED, batch_tokens=7)
    assert isinstance(states, hs.States)
    np.testing.assert_allclose(
        measured(hs.profile(states, sites=SITES)), expected, rtol=1e-4
    )
    # A source in blocks, whose chunks are of another size.
    monkeypatch.setattr("hiddenscope.measures.running.CHUNK", 700)
    source: Any = Blocks(states, 11)
    np.testing.assert_allclose(
        measured(hs.profile(source, sites=SITES)), expected, rtol=1e-4
    )


def test_a_store_gives_what_the_model_gives(tmp_path: Path) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    texts = [f"The rest of {word} is here." for word in ("a", "it", "all", "the")]
    store = hs.extract(model, texts, tmp_path / "store", sites=STORED)
    from_store = hs.profile(store, sites=SITES)
    expected = hs.profile(model, texts, sites=SITES)
    np.testing.assert_allclose(measured(from_store), measured(expected), rtol=1e-5)
    bare = hs.extract(model, texts, tmp_path / "bare", sites=SITES)
    without = measured(hs.profile(bare, sites=SITES))
    assert np.isnan(without[:, :, 2]).all(), "what is written is not in the store"
    np.testing.assert_allclose(without[:, :, 0], measured(expected)[:, :, 0], rtol=1e-5)


def test_copies_count_once_and_groups_stay_together(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [f"The {word} sat on the mat in here." for word in "abcdef"]
    alone = hs.profile(model, texts, sites=SITES)
    copied = hs.profile(model, [*texts, *texts[:3]], sites=SITES)
    np.testing.assert_allclose(measured(copied), measured(alone), rtol=1e-4)
    assert copied.facts["stacks"][0]["neurons"]["texts"] == 6
    named = [{"text": text, "group": k // 2} for k, text in enumerate(texts)]
    grouped = hs.profile(model, hs.read(named, group="group"), sites=SITES)
    facts = grouped.facts["stacks"][0]["neurons"]
    assert (facts["texts"], facts["groups"]) == (6, 3)
    assert "6 texts in 3 groups" in grouped.summary()
    np.testing.assert_allclose(measured(grouped)[0], measured(alone)[0], rtol=1e-5)
    assert not np.allclose(measured(grouped)[1], measured(alone)[1], equal_nan=True)


def planted(change: Callable[[Any], None], family: str) -> dict[str, list[Any]]:
    """Return what is said of a model whose last layer was changed, by comparison."""
    network: Any = tiny_model(family, layers=6)
    with torch.no_grad():
        change(network)
    result = hs.profile(hs.load((network, None)), random_texts(24), sites=SITES)
    facts: dict[str, Any] = result.facts["stacks"][0]["neurons"]
    return {name: facts[name] for name in ("against_previous", "against_trend")}


def verdicts(gaps: Sequence[Any], aspect: str) -> set[str]:
    return {gap["verdict"] for gap in gaps if gap["aspect"] == aspect}


def test_activations_that_are_scaled_are_more_intense_and_not_more_selective() -> None:
    def scale(factor: float) -> Callable[[Any], None]:
        return lambda network: network.model.layers[-1].mlp.up_proj.weight.mul_(factor)

    plain, louder = planted(scale(1), "llama"), planted(scale(50), "llama")
    for name in plain:
        assert verdicts(louder[name], "intensity") == {"more"}
        for before, after in zip(plain[name], louder[name], strict=True):
            change = after["value"] / before["value"]
            expected = 50 if before["aspect"] == "intensity" else 1
            assert change == pytest.approx(expected, rel=1e-4)
            if before["aspect"] == "selectivity":
                assert before["verdict"] == after["verdict"]


def test_neurons_that_seldom_act_are_more_selective() -> None:
    def seldom(network: Any) -> None:
        mlp = network.transformer.h[-1].mlp
        mlp.c_fc.weight.mul_(8)
        mlp.c_fc.bias.sub_(8)

    found = planted(seldom, "gpt2")
    for gaps in found.values():
        assert "less" not in verdicts(gaps, "selectivity")
        first = {gap["measure"]: gap["verdict"] for gap in gaps}
        for name in ("neuron_kurtosis", "neuron_sparseness", "neuron_active"):
            assert first[name] == "more", gaps


def toy(values: torch.Tensor, length: int) -> hs.States:
    count = values.shape[1]
    texts = np.arange(count) // length
    positions = np.arange(count) % length
    ids = np.random.default_rng(0).integers(0, 8, count)
    strings = [str(token) for token in ids]
    tokens = hs.Tokens(None, texts, positions, ids, strings)
    sites = tuple(Site(layer, "mlp.neurons") for layer in range(1, len(values) + 1))
    return hs.States(sites, values, tokens, hs.Source("toy"))


def profiled(values: torch.Tensor) -> hs.Result:
    return hs.profile(toy(values, 20), sites=SITES)


def test_neurons_that_are_on_or_off_are_active_where_they_are_on() -> None:
    generator = torch.Generator().manual_seed(0)
    on = torch.rand(1, 400, 9, generator=generator) < 0.05
    shares = on[0, torch.arange(400) % 20 > 0].double().mean(0)
    result = profiled(on.float() * 3)
    assert result.data["neuron_active"].item() == pytest.approx(float(shares.median()))
    always = profiled(torch.ones(1, 400, 9)).data
    assert always["neuron_active"].item() == 1
    assert always["neuron_sparseness"].item() == pytest.approx(0, abs=1e-9)
    assert always["neuron_entropy"].item() == pytest.approx(1)
    assert np.isnan(always["neuron_kurtosis"].item())
    silent = profiled(torch.zeros(1, 400, 9)).data
    assert silent["neuron_activation"].item() == 0
    assert np.isnan(silent["neuron_active"].item())


def test_a_broken_token_and_first_tokens_are_left_out() -> None:
    values = torch.randn(2, 400, 9, generator=torch.Generator().manual_seed(0))
    expected = measured(profiled(values))
    values[:, ::20] *= 1e4
    np.testing.assert_allclose(measured(profiled(values)), expected)
    values[1, 41] = torch.inf
    facts = profiled(values).facts["stacks"][0]
    assert facts["not_finite"]["states"] == 1
    assert len(facts["neurons"]["against_previous"]) == 6


def test_one_text_has_numbers_and_no_comparison(tiny: Tiny) -> None:
    result = hs.profile(tiny("llama"), random_texts(1, 30), sites=SITES)
    values, low, _ = measured(result)
    assert np.isfinite(values[:, 0]).all() and np.isnan(low).all()
    assert result.facts["stacks"][0]["neurons"]["against_previous"] == []
    assert "no interval" in result.summary()
    # A single token is a first token.
    alone = hs.profile(tiny("llama"), [[5]], sites=SITES)
    assert "neurons" not in alone.facts["stacks"][0]
    assert "How neurons act" not in [section.title for section in story_of(alone)]


def test_other_sites_are_profiled_as_before(tiny: Tiny) -> None:
    model, texts = tiny("llama"), random_texts(6)
    plain = hs.profile(model, texts)
    assert "neurons" not in plain.facts["stacks"][0]
    assert not any(str(name).startswith("neuron") for name in plain.data)
    both = hs.profile(model, texts, sites="layer.1,layer.*.mlp.neurons")
    assert both.data["site"].values.tolist()[0] == "layer.1.mlp.neurons"
    assert np.isnan(both.data["neuron_activation"].sel(site="layer.1"))
    expected = hs.profile(model, texts, sites=SITES).data["neuron_activation"].values
    is_neurons = both.data["site"].str.endswith("neurons").values
    np.testing.assert_allclose(both.data["neuron_activation"][is_neurons], expected)


def test_a_mixture_of_experts_has_no_neurons(tiny: Tiny) -> None:
    with pytest.raises(SiteError, match="neurons"):
        hs.profile(tiny("mixtral"), random_texts(3), sites=SITES)


def test_each_stack_of_an_encoder_decoder_has_neurons_of_its_own(tiny: Tiny) -> None:
    texts = random_texts(6)
    # The same target of two texts is no copy.
    targets = [texts[0]] * 6
    result = hs.profile(tiny("t5"), texts, sites=SITES, targets=targets)
    encoder, decoder = (stack["neurons"] for stack in result.facts["stacks"])
    assert encoder["texts"] == decoder["texts"] == 6
    assert decoder["last"] == "decoder.layer.3.mlp.neurons"


def test_what_is_held_does_not_grow_with_the_texts() -> None:
    source, texts = toy(torch.zeros(1, 4_000, 1), 10), [[text] for text in range(400)]
    design = module.design_tokens(source, texts, None)
    assert len(design.sizes) == module.BATCHES
