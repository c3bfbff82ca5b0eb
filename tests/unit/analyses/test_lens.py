"""Lens: the last layer is the model's own answer, and every chunk says what a naive
softmax over all words says.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.lens import reading
from hiddenscope.analyses.lens.fitting import RidgeRegression, jacobians
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    Damaged,
    FileError,
    NotFinite,
    PassError,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.results import story_of, views_of
from hiddenscope.results.pictures import Grid
from hiddenscope.sites import Site
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from tests.unit.analyses.refused import check_refused

ONE, TWO = "The cat sat on the mat.", "The rest is in the cold water and the sand."
Tiny = Callable[..., hs.Model]
Load = Callable[[str], hs.Model]

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Some more families: the names of their classes, and what they add to the shape.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"final_logit_softcapping": 3.0, "head_dim": 16},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.25}),
    "mobilebert": (
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        {"intra_bottleneck_size": 32, "embedding_size": 32, "true_hidden_size": 32},
    ),
}


@cache
def built(family: str) -> hs.Model:
    model_class, config_class, config = OTHERS[family]
    row = {"model_class": model_class, "config_class": config_class}
    return hs.load((build({**row, "config": SHAPE | config}), tiny_tokenizer()))


@pytest.fixture
def load(tiny: Tiny) -> Load:
    return lambda family: built(family) if family in OTHERS else tiny(family)


def last(model: hs.Model) -> Site:
    stack = model.anatomy.stacks[-1]
    return Site(stack.depth, "", stack.name if len(model.anatomy.stacks) > 1 else None)


def naive(model: hs.Model, sites: Any = "layer.*") -> torch.Tensor:
    """Log-probabilities [site, token, word] of a text in float64: each site is put in
    the place of the last layer in a true pass.
    """
    targets = ONE if len(model.anatomy.stacks) > 1 else None
    stack = last(model).stack
    chosen = [site for site in model.anatomy.select(sites) if site.stack == stack]
    states: Any = hs.record(model, ONE, chosen, targets=targets).states
    inputs = model.encode(ONE, targets=targets)
    said: list[Any] = [
        hs.resume(model, inputs, last(model), states[site]).logits for site in chosen
    ]
    return torch.stack(said).double().log_softmax(-1)


def assert_naive_entropy(model: hs.Model, result: hs.Result) -> None:
    logs = naive(model)
    entropy = -(logs.exp() * logs.clamp_min(-1e9)).sum(-1)
    np.testing.assert_allclose(result.data["entropy"], entropy, atol=2e-5)


# How logits are made; T5 scales, BERT transforms.
RECIPES = {
    "llama": ("modules", "none", None),
    "gemma2": ("modules", "softcap", 3.0),
    "cohere": ("modules", "scale", 0.25),
    "t5": ("pass", "none", None),
    "bert": ("pass", "none", None),
    # It multiplies with two weights joined, inside the module that holds them.
    "mobilebert": ("whole", "none", None),
}


@pytest.mark.parametrize("family", RECIPES)
def test_the_last_layer_is_the_models_own_however_logits_are_made(
    load: Load, family: str
) -> None:
    model = load(family)
    targets = ONE if len(model.anatomy.stacks) > 1 else None
    result = hs.lens(model, ONE, k=128, target=20, targets=targets)
    data, here = result.data, result.data.isel(site=-1)
    assert_naive_entropy(model, result)
    own: Any = hs.record(model, ONE, last(model), targets=targets, logits=True).logits
    shares, said = own.double().softmax(-1), torch.from_numpy(here["word_id"].values)
    np.testing.assert_allclose(
        here["probability"], shares.gather(-1, said), rtol=1e-4, atol=1e-9
    )
    assert (here["kl"].values == 0).all()
    assert float(here["agreement"]) == float(here["settled_share"]) == 1
    followed, along = result.facts["target"], data["target_probability"].values[:, -1]
    assert followed["probability"] == along[-1]
    assert followed["highest_probability"] == along.max()
    assert followed["rank"] == here["target_rank"].values[-1]
    recipe = result.facts["unembedding"]
    found = (recipe["method"], recipe["transform"], recipe["constant"])
    assert found == RECIPES[family]


@pytest.mark.parametrize(
    ("family", "rows", "words", "target"),
    [
        ("gpt2", 1, 50, 120),
        ("gpt2", 9, 7, "next"),
        ("bart", 500, 100, "next"),
        ("bart", 9, 7, 20),
        ("gemma2", 500, 64, 20),
        ("gemma2", 500, 128, 120),
    ],
)
def test_every_size_of_block_measures_the_same(
    load: Load,
    family: str,
    rows: int,
    words: int,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(family)
    targets = [ONE, TWO] if family == "bart" else None
    given: dict[str, Any] = {"k": 5, "target": target, "targets": targets}
    expected = hs.lens(model, [ONE, TWO], **given).data
    monkeypatch.setattr(reading, "ROWS", rows)
    monkeypatch.setattr(reading, "WORDS", words)
    monkeypatch.setattr(reading, "CPU_MEMORY", rows * 128 * 4 * 2)
    found = hs.lens(model, [ONE, TWO], **given).data
    for name in ("probability", "entropy", "kl", "target_probability"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5)
    top = found["word_id"].values[..., 0]
    np.testing.assert_array_equal(top, expected["word_id"][..., 0])
    np.testing.assert_array_equal(found["target_rank"], expected["target_rank"])
    if target != "next":
        assert ((found["target_rank"].values == 1) == (top == target)).all()


def test_another_soft_cap_is_tried_anew(load: Load) -> None:
    model: Any = load("gemma2")
    config = model.module.config
    before = hs.lens(model, ONE).data["entropy"].values
    try:
        for cap, transform in ((0.5, "softcap"), (None, "none")):
            config.final_logit_softcapping = cap
            result = hs.lens(model, ONE)
            assert_naive_entropy(model, result)
            assert result.facts["unembedding"]["transform"] == transform
            assert (np.abs(result.data["entropy"].values - before) > 1e-3).any()
    finally:
        config.final_logit_softcapping = 3.0


def test_logits_that_come_from_streams_of_their_own_are_refused() -> None:
    """ProphetNet predicts from streams beside the one whose states are layers."""
    config = {
        "hidden_size": 64,
        "vocab_size": 128,
        "decoder_ffn_dim": 128,
        "num_decoder_layers": 3,
        "num_decoder_attention_heads": 4,
    }
    classes = {"model_class": "ProphetNetForCausalLM"}
    module = build({**classes, "config_class": "ProphetNetConfig", "config": config})
    with pytest.raises(PassError, match="more than the state of their own token"):
        hs.lens(hs.load((module, None)), [[5, 6, 7, 8]])


class Strange(nn.Linear):
    """A head that is no plain product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch calls it so  # noqa: A002
        made = super().forward(input)
        return made + made.mean(-1, keepdim=True).tanh() * made


def test_a_head_that_is_no_product_goes_row_by_row() -> None:
    module: Any = tiny_model("llama")
    strange = Strange(64, 128, bias=False)
    strange.weight = module.lm_head.weight
    module.lm_head = strange.eval()
    model = hs.load((module, tiny_tokenizer()))
    result = hs.lens(model, ONE)
    assert result.facts["unembedding"]["method"] == "whole"
    assert "Strange" in result.facts["notes"][0]
    assert "Strange" in result.summary()
    assert_naive_entropy(model, result)


def test_words_that_are_never_said_change_nothing() -> None:
    module: Any = tiny_model("llama")
    del module.lm_head.bias
    # A weight may not be infinite, a buffer may.
    module.lm_head.register_buffer("bias", torch.zeros(128))
    module.lm_head.bias[[7, 9]] = -torch.inf
    model = hs.load((module, tiny_tokenizer()))
    result = hs.lens(model, ONE, k=128, target=7)
    assert_naive_entropy(model, result)
    assert (result.data["target_probability"].values == 0).all()
    assert (result.data["kl"].values[-1] == 0).all()
    assert np.isfinite(result.data["kl"]).all()
    module.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(NotFinite):
        hs.lens(model, ONE)


def test_the_next_token_and_how_often_it_is_said(tiny: Tiny) -> None:
    model = tiny("gpt2")
    result = hs.lens(model, [ONE, TWO], target="next", k=3)
    data, tokens = result.data, model.capture([ONE, TWO], "layer.0").tokens
    followed = np.append(tokens.text[1:] == tokens.text[:-1], False)
    rank = data["target_rank"].values
    assert (np.isfinite(rank) == followed).all()
    count = int(followed.sum())
    assert result.facts["accuracy"]["tokens"] == count
    median = np.median(rank[-1][followed])
    assert result.facts["target"]["median_rank"] == median
    assert result.facts["target"]["tokens"] == count
    assert "accuracy" not in hs.lens(tiny("bert"), ONE).data, "it sees the next token"
    assert hs.lens(model, [[5]]).data.sizes["token"] == 1
    with pytest.raises(TextError, match="Text 1 has no next token"):
        hs.lens(model, [[5, 6], [5]], target="next")


def test_settled_is_where_the_answer_stays_as_far_as_it_is_known(tiny: Tiny) -> None:
    """Whichever sites are read, the answer is the model's, and settled is what a
    reading of all layers says.
    """
    model = tiny("gpt2")
    whole = hs.lens(model, TWO)
    settled, answer = whole.data["settled"].values, whole.facts["last_token"]["answer"]
    assert {2, 3} <= set(settled.tolist())
    assert whole.data["word"].sel(site="layer.1").values[-1, 0] != answer
    grid = views_of(whole)[0]
    assert isinstance(grid, Grid) and grid.words is not None and grid.words.framed
    outlined = np.where(settled < 3, settled, -1).tolist()
    assert grid.words.settled_rows() == outlined
    low = ("layer.0", "layer.1", "layer.0-1")
    found = {
        sites: hs.lens(model, TWO, sites=sites)
        for sites in (*low, "layer.2,final", "layer.1,final", "layer.1-2", "final")
    }
    for sites, result in found.items():
        told = result.facts["last_token"]
        for name in ("answer", "probability"):
            assert told[name] == whole.facts["last_token"][name]
        assert "known" in result.summary()
        assert len(story_of(result)) == 2
        grid = views_of(result)[0]
        assert isinstance(grid, Grid) and grid.words is not None
        # The others leave out layers above, or between their rows.
        assert grid.words.framed == (sites in ("layer.2,final", "final"))
        assert grid.words.framed or "outline" not in grid.note
    for sites in low:
        assert found[sites].facts["settled_known_from"] is None
        assert found[sites].facts["last_token"]["settled_from"] is None
        assert not {"settled", "settled_share"} & set(found[sites].data)


def test_texts_are_read_batch_after_batch(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = tiny("llama"), [ONE, TWO, ONE]
    heads = "*.attn.head.*"
    whole = [hs.lens(model, texts), hs.lens(model, texts, sites=heads)]
    monkeypatch.setattr("hiddenscope.analyses.lens.compute.BATCH_TOKENS", 10)
    found = [hs.lens(model, texts)]  # each text by itself
    # Fewer tokens at a time where there are many sites.
    monkeypatch.setattr("hiddenscope.analyses.lens.compute.BATCH_SITES", 1)
    monkeypatch.setattr("hiddenscope.analyses.lens.compute.BATCH_TOKENS", 40)
    found.append(hs.lens(model, texts, sites=heads))
    for one, expected in zip(found, whole, strict=True):
        for name in ("probability", "entropy"):
            np.testing.assert_allclose(one.data[name], expected.data[name], rtol=1e-4)
        assert one.data["text"].equals(expected.data["text"])
        assert one.data.attrs == expected.data.attrs
        assert one.facts["tokens"] == expected.facts["tokens"]


def test_a_decoder_is_read_over_its_targets(tiny: Tiny) -> None:
    data = hs.lens(tiny("t5"), ONE, targets=TWO, target="next").data
    assert set(data["stack"].values) == {"decoder"}
    assert data["site"].values.tolist() == [f"decoder.layer.{k}" for k in range(4)]
    assert data.attrs["targets"] == [TWO]
    assert hs.lens(tiny("t5"), ONE).data.sizes["token"] == 1, "the start token alone"


def test_what_cannot_be_read_is_refused(
    tiny: Tiny, tuned: tuple[hs.Model, hs.Lens]
) -> None:
    refused: list[tuple[str, dict[str, Any], type[hs.errors.Error], str]] = [
        ("llama", {"target": " cats and"}, TextError, "tokens: ' c'"),
        ("llama", {"target": ""}, TextError, "it is empty"),
        ("llama", {"target": 500}, TextError, "are 0 to 127"),
        ("bert", {"target": "next"}, TextError, "sees the whole text"),
        ("llama", {"k": 129}, PassError, "has 128 tokens"),
        ("llama", {"sites": "layer.2.attn.z"}, SiteError, "attn.z is not written to"),
        ("llama", {"sites": "layer.2.mlp.neurons"}, SiteError, "is not written to"),
        ("t5", {"sites": "encoder.layer.1"}, SiteError, "the head reads the decoder"),
        ("llama", {"targets": ONE}, PassError, "has one stack"),
        ("t5", {"targets": [ONE, TWO]}, TextError, "2 targets with 1 texts"),
        ("llama", {"lens": "tuned"}, StatesError, "has to be fitted first"),
        ("llama", {"lens": "jacobian"}, StatesError, "has to be fitted first"),
        ("llama", {"lens": "other"}, StatesError, "no lens of that name"),
        ("llama", {"lens": 5}, StatesError, "got int"),
        ("llama", {"lens": tuned[1]}, StatesError, "fitted to the weights of Llama"),
    ]
    for family, given, kind, words in refused:
        check_refused(kind, words, hs.lens, tiny(family), ONE, **given)
    llama, no_head, fit = tiny("llama"), tiny("llama", "base"), hs.Lens.fit
    check_refused(PassError, "it has no head", hs.lens, no_head, ONE)
    check_refused(PassError, "no language-model head", fit, no_head, TEXTS)
    check_refused(TextError, "there is only one. Some are held out", fit, llama, ONE)
    check_refused(StatesError, "are tuned and jacobian", fit, llama, TEXTS, "other")
    words, partial = "fitted in one step", "x.safetensors"
    check_refused(StatesError, words, fit, llama, TEXTS, partial=partial)
    with pytest.raises(SiteError, match="it was fitted to whole layers"):
        hs.lens(tuned[0], ONE, lens=tuned[1], sites="*.mlp")
    bare = hs.load((tiny_model("gpt2"), None))
    assert hs.lens(bare, [[5, 6]], target=7).facts["target"]["token"] == "'7'"
    with pytest.raises(TextError, match="without a tokenizer"):
        hs.lens(bare, [[5, 6]], target="a")


TEXTS = [
    "The cat sat on the mat and the dog sat on the sand.",
    "In the cold water the sand is on the land.",
    "A word and another word are in the rest of the text.",
    "It is the end of the week and the start of another.",
    "The rest of the water is in the hat of the cat.",
    "At the end the dog and the cat ran on the sand.",
    "Then the cold wind on the water is for the rest.",
    "One of the cats is in the car and the other is not.",
    "The sand and the sea are the same as in the past.",
    "An hour after that the rain on the land was cold.",
]


@pytest.fixture(scope="module")
def tuned() -> tuple[hs.Model, hs.Lens]:
    model = hs.load((tiny_model("llama", seed=3), tiny_tokenizer()))
    return model, hs.Lens.fit(model, TEXTS)


def column(lens: hs.Lens, name: str) -> list[Any]:
    return [layer[name] for layer in lens.facts["layers"]]


def test_a_tuned_lens_is_its_definition(tuned: tuple[hs.Model, hs.Lens]) -> None:
    model: Any = tuned[0]
    head, norm = model.module.lm_head, model.module.model.norm
    states = model.module(
        **model.tokenizer(ONE, return_tensors="pt"), output_hidden_states=True
    ).hidden_states
    result = hs.lens(model, ONE, lens=tuned[1], k=3)
    assert result.facts["lens"] == "tuned"
    for layer, one in tuned[1].maps.items():
        a, b, h = one.matrix - torch.eye(64), one.bias, states[layer][0]
        assert b is not None
        best = head(norm(h + h @ a.T + b)).softmax(-1).topk(3).values.detach()
        found = result.data["probability"].sel(site=f"layer.{layer}")
        np.testing.assert_allclose(found, best, rtol=1e-3)


def test_the_map_is_a_ridge_regression_towards_the_identity() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 6)), generator.normal(size=(40, 6))
    scale = 6**0.5 / np.linalg.norm(y, axis=1, keepdims=True)
    rows = np.concatenate([x, np.ones((40, 1))], 1) * scale
    rest = (y - x) * scale
    regression = RidgeRegression()
    for half in (slice(0, 15), slice(15, 40)):
        regression.add(torch.from_numpy(x[half]), torch.from_numpy(y[half]))
    for penalty in (0.01, 1.0):
        hold = np.diag(np.sqrt(penalty * (rows**2).sum(0) * [1, 1, 1, 1, 1, 1, 1e-6]))
        wide = np.concatenate([rows, hold]), np.concatenate([rest, np.zeros((7, 6))])
        expected = np.linalg.lstsq(*wide, rcond=None)[0]
        found = regression.map(penalty)
        assert found.bias is not None
        np.testing.assert_allclose(found.matrix, expected[:-1].T + np.eye(6), atol=1e-5)
        np.testing.assert_allclose(found.bias, expected[-1], atol=1e-5)


def test_a_tuned_lens_is_judged_on_other_texts_than_it_is_chosen_by(
    tuned: tuple[hs.Model, hs.Lens],
) -> None:
    model, lens = tuned
    plain, better = (
        hs.lens(model, TEXTS[9], lens=each).data["kl_mean"].values
        for each in ("logit", lens)
    )
    assert (better <= plain + 1e-6).all()
    assert (better[:2] < plain[:2] * 0.9).all(), "and it is worth something"
    assert better[-1] == 0
    np.testing.assert_allclose(column(lens, "kl_before"), plain, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(column(lens, "kl_after"), better, rtol=1e-3, atol=1e-5)
    counts = [len(model.capture(TEXTS[number], "layer.0").tokens) for number in (4, 9)]
    assert lens.facts["held_out"] == {
        "texts": 2,
        "tokens_chosen_on": counts[0],
        "tokens_judged_on": counts[1],
        "judged_on_chosen": False,
    }
    one = hs.Lens.fit(model, TEXTS[:9])
    assert one.facts["held_out"]["judged_on_chosen"]
    assert "optimistic" in one.facts["notes"][0]
    assert one.facts["held_out"]["texts"] == 1


def test_a_map_that_is_worse_on_the_texts_that_judge_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine texts of the same few words and then one of others: a map for the nine is
    worse than none on the tenth.
    """
    model = hs.load((tiny_model("llama", seed=3), None))
    similar = [[5 + (k + step) % 6 for step in range(6)] for k in range(6)]
    similar += [[5, 7, 9], [6, 8, 10], [9, 7, 5]]
    other = [90, 91, 92, 93, 94, 95, 96]
    monkeypatch.setattr("hiddenscope.analyses.lens.fitting.PENALTIES", (0.001,))
    assert set(hs.Lens.fit(model, [*similar, [10, 8, 6]]).maps) == {0, 1, 2}
    lens = hs.Lens.fit(model, [*similar, other])
    assert False in column(lens, "mapped")[:-1]
    plain, better = (
        hs.lens(model, [other], lens=each).data["kl_mean"].values
        for each in ("logit", lens)
    )
    assert (better <= plain).all()
    np.testing.assert_allclose(column(lens, "kl_after"), better, rtol=1e-3, atol=1e-5)


def test_texts_that_belong_together_are_never_both_fitted_and_held_out(
    tuned: tuple[hs.Model, hs.Lens],
) -> None:
    """Eight texts six times each, in other cases and with other spaces: the KL after is
    that of fresh texts.
    """
    model = tuned[0]
    copies = [
        copy
        for text in TEXTS[:8]
        for copy in (text, text.upper(), text.lower(), f"{text} ", f" {text}")
    ]
    copies += [text.replace(".", "!") for text in TEXTS[:8]]
    lens = hs.Lens.fit(model, copies)
    facts = lens.facts
    assert (facts["texts"], facts["held_out"]["texts"], facts["groups"]) == (42, 6, 8)
    fresh = hs.lens(model, TEXTS[8:], lens=lens).data["kl_mean"].values
    after = column(lens, "kl_after")
    assert after[0] > 0.5 * fresh[0], "no better than on texts that were never seen"
    texts = [f"the {word} sat" for word in ("cat", "hat", "mat", "bat", "rat", "fat")]
    facts = hs.Lens.fit(model, hs.read(texts, group=[0, 0, 0, 1, 1, 1])).facts
    assert (facts["texts"], facts["held_out"]["texts"], facts["groups"]) == (3, 3, 2)
    with pytest.raises(TextError, match="of one group"):
        hs.Lens.fit(model, hs.read(texts, group=[0] * 6))
    with pytest.raises(TextError, match="all are copies of one"):
        hs.Lens.fit(model, [ONE, ONE.upper(), f"{ONE} "])


@pytest.mark.parametrize(
    ("family", "kind"), [("t5", "tuned"), ("bert", "tuned"), ("bart", "jacobian")]
)
def test_other_families_have_fitted_lenses(tiny: Tiny, family: str, kind: Any) -> None:
    model = tiny(family)
    texts = [[5, 6, 7], [8, 9]]
    targets = texts if len(model.anatomy.stacks) > 1 else None
    lens = hs.Lens.fit(model, texts, kind, targets=targets)
    found = hs.lens(model, texts, lens=lens, targets=targets)
    assert (found.data["kl"].values[-1] == 0).all()
    assert found.facts["lens"] == kind


def test_a_lens_is_kept(tuned: tuple[hs.Model, hs.Lens], tmp_path: Path) -> None:
    model, lens = tuned
    path = tmp_path / "tuned.safetensors"
    lens.save(path)
    again = hs.Lens.load(path)
    assert repr(again) == repr(lens)
    assert again.facts == lens.facts
    result = hs.lens(model, ONE, lens=lens)
    for each in (path, str(path), again):
        assert hs.lens(model, ONE, lens=each).equals(result)
    with pytest.raises(FileError, match="a .safetensors file"):
        lens.save(tmp_path / "tuned.pt")
    with pytest.raises(FileError, match="no such file"):
        hs.lens(model, ONE, lens=tmp_path / "other.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Damaged, match="not those that were written"):
        hs.Lens.load(path)
    model.capture(ONE).save(tmp_path / "states.safetensors")
    with pytest.raises(FileError, match="other content"):
        hs.Lens.load(tmp_path / "states.safetensors")


def test_the_jacobian_lens_is_the_derivative_of_the_last_layer() -> None:
    """Where all tokens move alike, the mean of the last layer moves by the Jacobian."""
    model = hs.load((tiny_model("gpt2").double(), None))
    texts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    lens = hs.Lens.fit(model, texts, "jacobian")

    def last_states(ids: list[int], k: int, vector: torch.Tensor) -> torch.Tensor:
        made: Any = hs.edit(model, [ids], {f"layer.{k}": hs.Add(vector)}, "layer.3")
        return made.states["layer.3"].mean(0)

    for k in range(3):
        assert lens.maps[k].bias is None
        for channel in (0, 40):
            step = torch.zeros(64, dtype=torch.float64)
            step[channel] = 1e-5
            moves = [
                (last_states(ids, k, step) - last_states(ids, k, -step)) / 2e-5
                for ids in texts
            ]
            expected = torch.stack(moves).mean(0).float()
            found = lens.maps[k].matrix[:, channel]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_interrupted_fit_goes_on(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = tiny("gpt2"), hs.load((tiny_model("gpt2", seed=5), None))
    texts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    whole = hs.Lens.fit(model, texts, "jacobian")
    partial, seen = tmp_path / "partial.safetensors", list[Any]()

    def stops(model: hs.Model, text: Any, sites: Any) -> Any:
        seen.append(list(text.ids[0]))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return jacobians(model, text, sites)

    monkeypatch.setattr("hiddenscope.analyses.lens.fitting.jacobians", stops)
    with pytest.raises(KeyboardInterrupt):
        hs.Lens.fit(model, texts, "jacobian", partial=partial)
    again = hs.Lens.fit(model, texts, "jacobian", partial=partial)
    assert seen == [texts[0], texts[1], texts[1], texts[2]]
    for k, one in whole.maps.items():
        assert torch.equal(one.matrix, again.maps[k].matrix)
    with pytest.raises(FileError, match="begun with other texts"):
        hs.Lens.fit(model, texts[:2], "jacobian", partial=partial)
    with pytest.raises(FileError, match="begun with other weights"):
        hs.Lens.fit(other, texts, "jacobian", partial=partial)


def test_the_command_reads_and_fits(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr("hiddenscope.load", lambda *given, **options: model)
    run, path = CliRunner(), str(tmp_path / "tuned.safetensors")
    done = run.invoke(app, ["lens", *TEXTS[:3], "--fit", "tuned", "--out", path])
    assert done.exit_code == 0, done.output
    assert hs.Lens.load(path).kind == "tuned"
    words = ["lens", "The cat\x1b[31m", "--lens", path, "--target", "next"]
    done = run.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "tuned" in done.output and "\x1b" not in done.output
    done = run.invoke(app, ["lens", ONE, "--fit", "tuned"])
    assert done.exit_code == 2


def test_words_without_a_text_are_named_by_their_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    monkeypatch.setattr(model.text_encoder, "_strings", dict.fromkeys(range(128), ""))
    result = hs.lens(model, [[5, 6, 7]])
    answer = f"(id {result.data['word_id'].values[-1, -1, 0]})"
    assert result.data["word"].values[-1, -1, 0] == answer
    assert result.facts["last_token"]["answer"] == answer


def test_parts_leave_the_findings_of_layers_as_they_are(tiny: Tiny) -> None:
    model = tiny("llama")
    layers = hs.lens(model, ONE, target=9)
    mixed = hs.lens(model, ONE, target=9, sites="layer.*,*.mid,*.attn.head.*")
    for key in ("settled_known_from", "half_settled_from", "last_token", "accuracy"):
        assert mixed.facts[key] == layers.facts[key]
    for key in ("first_best_at", "first_in_top_k_at", "rank"):
        assert mixed.facts["target"][key] == layers.facts["target"][key]
    assert (mixed.data["settled"] == layers.data["settled"]).all()
    share = mixed.data["settled_share"]
    assert np.isnan(share.sel(site="layer.2.attn.head.0"))
    known = share.sel(site=layers.data["site"].values)
    assert (known == layers.data["settled_share"]).all()
    assert mixed.facts["parts"]
    assert not layers.facts["parts"]


def test_parts_alone_say_nothing_of_layers(tiny: Tiny) -> None:
    result = hs.lens(tiny("llama"), ONE, target=9, sites="*.attn.head.*")
    facts = result.facts
    assert facts["settled_known_from"] is None
    assert facts["last_token"]["settled_from"] is None
    assert "accuracy" not in facts
    assert facts["target"]["first_best_at"] is None
    assert facts["target"]["first_in_top_k_at"] is None
    probability = result.data["target_probability"].isel(token=-1)
    best = str(probability["site"].values[np.argmax(probability.values)])
    assert facts["target"]["most_probable_at"] == best
    assert "settled" not in result.data
    grid = next(view for view in views_of(result) if isinstance(view, Grid))
    assert len(grid.sites) == 12
    assert f"Among these sites, {best} gives" in result.summary()
    assert "layers above these were left out" not in result.summary()
    assert story_of(result)


def test_a_figure_of_many_sites_has_no_words_on_one_another(
    tiny: Tiny, tmp_path: Path
) -> None:
    sites = "layer.2.mlp.neuron.*,layer.3.mlp.neuron.*"
    result = hs.lens(tiny("llama"), [[5, 6, 7]], sites=sites)
    path = tmp_path / "neurons.svg"
    result.save(path)
    assert path.read_text("utf-8").count("<text") < result.data.sizes["site"] == 128


def test_a_layer_that_favours_no_word_has_settled_nothing() -> None:
    module: Any = tiny_model("llama")
    # The state of this token is zero, and so are the logits that a lens reads off it.
    silent = 7
    with torch.no_grad():
        module.get_input_embeddings().weight[silent] = 0
    model = hs.load((module, None))
    first = hs.lens(model, [silent], sites="layer.0").data
    any_word = int(first["word_id"].values[0, 0, 0])
    # Make the arbitrary word the model's answer.
    final = model.capture([silent], "final")["final"][0]
    with torch.no_grad():
        module.lm_head.weight[any_word] = final
    result = hs.lens(hs.load((module, None)), [silent])
    assert result.facts["last_token"]["answer_id"] == any_word
    assert result.data["word_id"].values[0, 0, 0] == any_word
    assert result.data["agreement"].values[0] == 0
    assert result.facts["last_token"]["settled_from"] != "layer.0"


def test_a_tie_is_no_best() -> None:
    """Where all words are alike no target is the top one, nor among the top k."""
    module: Any = tiny_model("llama")
    # The states of the first are zero; the head hardly tells words apart in the second.
    silent, faint = 7, 8
    with torch.no_grad():
        module.get_input_embeddings().weight[silent] = 0
        module.lm_head.weight *= 1e-4
    model = hs.load((module, None))
    for token in (silent, faint):
        first = hs.lens(model, [token], k=1, sites="layer.0").data
        for target in (int(first["word_id"].values[0, 0, 0]), 33):
            result = hs.lens(model, [token], target=target)
            found = result.facts["target"]
            assert found["first_best_at"] is None
            assert found["first_in_top_k_at"] is None
            assert found["most_probable_at"] is None
            assert "for the first time" not in result.summary()
            if token == silent:
                # So many words are at least as probable.
                assert result.data["target_rank"].values[0, 0] == 128


def test_two_words_alike_share_the_second_rank() -> None:
    module: Any = tiny_model("llama")
    final = hs.load((module, None)).capture([7], "final")["final"][0]
    with torch.no_grad():
        module.lm_head.weight[[3, 4]] = 100 * final
    model = hs.load((module, None))
    for target in (3, 4):
        found = hs.lens(model, [7], target=target, sites="layer.3").facts["target"]
        assert found["rank"] == 2
        assert found["first_best_at"] is None
        assert found["first_in_top_k_at"] == found["most_probable_at"] == "layer.3"


def test_a_target_without_its_space_is_told_apart(tiny: Tiny) -> None:
    """The token with the space is another one, and mostly the one that was meant."""
    model = tiny("llama")
    note = "'a' has no leading space; ' a' is another token."
    assert note in hs.lens(model, ONE, target="a").summary()
    assert "leading space" not in hs.lens(model, ONE, target=" a").summary()
    result = hs.lens(model, ONE, target="a")
    result.facts["last_token"]["answer"] = " a"
    assert "the model predicts “ a” with" in result.summary()
    assert ", “a” has rank" in result.summary()
