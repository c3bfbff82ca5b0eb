"""Lens: the last layer is the model's own answer, and every chunk says what a naive
softmax over all words says.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.analyses.lens import reading
from hiddenscope.analyses.lens.findings import stays_from
from hiddenscope.analyses.lens.jacobian import jacobians
from hiddenscope.analyses.lens.maps import Map
from hiddenscope.analyses.lens.tuned import RidgeRegression
from hiddenscope.errors import (
    Damaged,
    FileError,
    NotFinite,
    PassError,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.sites import Site
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Grid
from tests.slices import sliced

ONE, TWO = "The cat sat on the mat.", "The rest is in the cold water and the sand."
Tiny = Callable[..., hs.Model]

# On a CPU without bfloat16.

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
}
SHAPE |= {
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
SHAPE |= {"eos_token_id": 2}
OTHERS = {
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"final_logit_softcapping": 3.0, "head_dim": 16},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.25}),
}
FAMILIES = [
    "llama",
    "gpt2",
    "mamba",
    "gemma2",
    "cohere",
    "bert",
    "roberta",
    "t5",
    "bart",
]


@pytest.fixture(scope="module")
def others() -> dict[str, hs.Model]:
    made = {}
    for name, (model_class, config_class, config) in OTHERS.items():
        row = {
            "model_class": model_class,
            "config_class": config_class,
            "config": {**SHAPE, **config},
        }
        made[name] = hs.load((build(row), tiny_tokenizer()))
    return made


@pytest.fixture
def load(tiny: Tiny, others: dict[str, hs.Model]) -> Callable[[str], hs.Model]:
    return lambda family: others[family] if family in others else tiny(family)


def last(model: hs.Model) -> Site:
    stack = model.anatomy.stacks[-1]
    return Site(stack.depth, "", stack.name if len(model.anatomy.stacks) > 1 else None)


def naive(model: hs.Model, text: str) -> torch.Tensor:
    """Log-probabilities [site, token, word] in float64: each layer is put in the last
    one's place in a true pass.
    """
    targets = text if len(model.anatomy.stacks) > 1 else None
    stack = last(model).stack
    sites = model.anatomy.select(f"{stack}.layer.*" if stack else "layer.*")
    states = hs.record(model, text, list(sites), targets=targets).states
    assert isinstance(states, hs.States)
    said = [
        hs.resume(
            model, model.encode(text, targets=targets), last(model), states[site]
        ).logits
        for site in sites
    ]
    return (
        torch.stack([one for one in said if one is not None]).double().log_softmax(-1)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_that_of_a_naive_softmax(
    load: Callable[[str], hs.Model], family: str
) -> None:
    model = load(family)
    targets = ONE if len(model.anatomy.stacks) > 1 else None
    result, logs = hs.lens(model, ONE, target=20, targets=targets), naive(model, ONE)
    best = logs.topk(5, dim=-1)
    np.testing.assert_allclose(
        result.data["probability"], best.values.exp(), rtol=2e-4, atol=1e-7
    )
    at = torch.from_numpy(result.data["word_id"].values)
    np.testing.assert_allclose(logs.gather(-1, at), best.values, atol=1e-4)
    np.testing.assert_allclose(
        result.data["entropy"], -(logs.exp() * logs).sum(-1), atol=2e-5
    )
    np.testing.assert_allclose(
        result.data["kl"], (logs[-1].exp() * (logs[-1] - logs)).sum(-1), atol=2e-5
    )
    np.testing.assert_allclose(
        result.data["target_probability"], logs[..., 20].exp(), rtol=2e-4, atol=1e-7
    )
    rank = (logs > logs[..., 20:21]).sum(-1) + 1
    assert (np.abs(result.data["target_rank"].values - rank.numpy()) <= 1).all(), (
        "two words may be nearly as likely"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_is_the_models_own_answer(
    load: Callable[[str], hs.Model], family: str
) -> None:
    model = load(family)
    targets = ONE if len(model.anatomy.stacks) > 1 else None
    result = hs.lens(model, ONE, k=128, targets=targets)
    logits = hs.record(model, ONE, last(model), targets=targets, logits=True).logits
    assert logits is not None
    shares = logits.double().softmax(-1)
    here = result.data.isel(site=-1)
    said = torch.from_numpy(here["word_id"].values)
    np.testing.assert_allclose(
        here["probability"], shares.gather(-1, said), rtol=1e-4, atol=1e-9
    )
    np.testing.assert_array_equal(here["word_id"].values[:, 0], shares.argmax(-1))
    assert (here["kl"].values == 0).all()
    assert float(here["agreement"]) == float(here["settled_share"]) == 1
    np.testing.assert_allclose(result.data["probability"].sum("rank"), 1, rtol=1e-5)
    assert (result.data["settled"].values >= 0).all()


def test_a_llama_by_its_own_modules(tiny: Tiny) -> None:
    model: Any = tiny("llama")
    states = model.module(
        **model.tokenizer(ONE, return_tensors="pt"), output_hidden_states=True
    ).hidden_states
    result = hs.lens(model, ONE, k=3, sites="layer.0-2,final")
    assert result.data["site"].values.tolist() == [
        "layer.0",
        "layer.1",
        "layer.2",
        "final",
    ]
    for row, state in enumerate(states[:3]):
        best = (
            model.module.lm_head(model.module.model.norm(state))[0].softmax(-1).topk(3)
        )
        np.testing.assert_allclose(
            result.data["probability"][row], best.values.detach(), rtol=1e-4
        )
        np.testing.assert_array_equal(result.data["word_id"][row], best.indices)
    normed = model.module.lm_head(states[3])[0].softmax(-1).topk(3)
    np.testing.assert_allclose(
        result.data["probability"][3], normed.values.detach(), rtol=1e-4
    )
    assert (result.data["kl"].values[3] < 1e-5).all()


@pytest.mark.parametrize("family", ["gpt2", "bart", "gemma2"])
@pytest.mark.parametrize(
    ("rows", "words"),
    sliced([(1, 50), (9, 7), (500, 100), (500, 64), (500, 128)], 3),
)
@pytest.mark.parametrize("target", [20, 120, "next"])
def test_every_size_of_block_measures_the_same(
    load: Callable[[str], hs.Model],
    family: str,
    rows: int,
    words: int,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(family)
    given: dict[str, Any] = {
        "k": 5,
        "target": target,
        "targets": [ONE, TWO] if family == "bart" else None,
    }
    expected = hs.lens(model, [ONE, TWO], **given).data
    monkeypatch.setattr(reading, "ROWS", rows)
    monkeypatch.setattr(reading, "WORDS", words)
    monkeypatch.setattr(reading, "CPU_MEMORY", rows * 128 * 4 * 2)
    found = hs.lens(model, [ONE, TWO], **given).data
    for name in ("probability", "entropy", "kl", "target_probability"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(found["word_id"][..., 0], expected["word_id"][..., 0])
    np.testing.assert_array_equal(found["target_rank"], expected["target_rank"])
    if target != "next":
        assert (
            (found["target_rank"] == 1).values
            == (found["word_id"].values[..., 0] == target)
        ).all()


@pytest.mark.parametrize("family", ["gemma2", "cohere", "llama", "t5", "bert"])
def test_one_product_is_used_where_it_is_shown_to_do(
    load: Callable[[str], hs.Model], family: str
) -> None:
    model = load(family)
    recipe = Unembedding(model, last(model)).recipe
    assert recipe.transform == {"gemma2": "softcap", "cohere": "scale"}.get(
        family, "none"
    )
    assert recipe.constant == {"gemma2": 3.0, "cohere": 0.25}.get(family, 1.0)
    assert recipe.method == ("pass" if family in ("t5", "bert") else "modules"), (
        "T5 scales, BERT transforms"
    )


def test_another_soft_cap_is_tried_anew(others: dict[str, hs.Model]) -> None:
    model: Any = others["gemma2"]
    config = model.module.config
    before = hs.lens(model, ONE).data["entropy"].values
    try:
        for cap, transform in ((0.5, "softcap"), (None, "none")):
            config.final_logit_softcapping = cap
            result, logs = hs.lens(model, ONE), naive(model, ONE)
            np.testing.assert_allclose(
                result.data["entropy"], -(logs.exp() * logs).sum(-1), atol=2e-5
            )
            assert result.facts["unembedding"]["transform"] == transform
            assert (np.abs(result.data["entropy"].values - before) > 1e-3).any()
    finally:
        config.final_logit_softcapping = 3.0


MOBILEBERT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
MOBILEBERT |= {
    "intra_bottleneck_size": 32,
    "embedding_size": 32,
    "true_hidden_size": 32,
    "vocab_size": 128,
}
PROPHETNET = {
    "hidden_size": 64,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 128,
}
PROPHETNET |= {"num_encoder_layers": 3, "num_decoder_layers": 3}
PROPHETNET |= {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
PROPHETNET |= {
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
}


def test_logits_that_no_module_of_their_own_makes() -> None:
    """MobileBERT multiplies with two weights joined, inside the module that holds them."""
    row = {
        "model_class": "MobileBertForMaskedLM",
        "config_class": "MobileBertConfig",
        "config": MOBILEBERT,
    }
    model = hs.load((build(row), tiny_tokenizer()))
    result, logs = hs.lens(model, ONE), naive(model, ONE)
    np.testing.assert_allclose(
        result.data["entropy"], -(logs.exp() * logs).sum(-1), atol=2e-5
    )
    assert result.facts["unembedding"]["method"] == "whole"


@pytest.mark.parametrize(
    "model_class", ["ProphetNetForConditionalGeneration", "ProphetNetForCausalLM"]
)
def test_logits_that_come_from_streams_of_their_own_are_refused(
    model_class: str,
) -> None:
    """ProphetNet predicts from streams beside the one whose states are layers."""
    row = {
        "model_class": model_class,
        "config_class": "ProphetNetConfig",
        "config": PROPHETNET,
    }
    model = hs.load((build(row), None))
    with pytest.raises(
        PassError, match="depend on more than the state of their own token"
    ):
        hs.lens(model, [[5, 6, 7, 8]])


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
    recipe = Unembedding(model, Site(3)).recipe
    assert recipe.method == "whole"
    assert "Strange" in recipe.reason
    assert "Strange" in hs.lens(model, ONE).summary()
    np.testing.assert_allclose(
        hs.lens(model, ONE).data["entropy"],
        -(naive(model, ONE).exp() * naive(model, ONE)).sum(-1),
        atol=2e-5,
    )


def test_words_that_are_never_said_change_nothing(tiny: Tiny) -> None:
    module: Any = tiny_model("llama")
    del module.lm_head.bias
    # A weight may not be infinite, a buffer may.
    module.lm_head.register_buffer("bias", torch.zeros(128))
    module.lm_head.bias[[7, 9]] = -torch.inf
    model = hs.load((module, tiny_tokenizer()))
    result, logs = hs.lens(model, ONE, k=128, target=7), naive(model, ONE)
    np.testing.assert_allclose(
        result.data["entropy"], -(logs.exp() * logs.clamp_min(-1e9)).sum(-1), atol=2e-5
    )
    assert (result.data["target_probability"].values == 0).all()
    assert (result.data["kl"].values[-1] == 0).all()
    assert np.isfinite(result.data["kl"]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = hs.load((tiny_model("llama").to(dtype), tiny_tokenizer()))
    result = hs.lens(model, ONE, k=128)
    logits = hs.record(model, ONE, "layer.3", logits=True).logits
    assert logits is not None
    said = torch.from_numpy(result.data["word_id"].values[-1])
    shares = logits.double().softmax(-1).gather(-1, said)
    np.testing.assert_allclose(
        result.data["probability"][-1],
        shares,
        rtol=0.05 if dtype == torch.bfloat16 else 1e-6,
    )
    assert (result.data["kl"].values[-1] == 0).all()


def test_the_next_token_and_how_often_it_is_said(tiny: Tiny) -> None:
    model = tiny("gpt2")
    result = hs.lens(model, [ONE, TWO], target="next", k=3)
    data, tokens = result.data, model.capture([ONE, TWO], "layer.0").tokens
    last_of_each = np.append(tokens.text[1:] != tokens.text[:-1], True)
    assert np.isnan(data["target_rank"].values[:, last_of_each]).all()
    assert np.isfinite(data["target_rank"].values[:, ~last_of_each]).all()
    true = tokens.ids[1:][~last_of_each[:-1]]
    right = data["word_id"].values[:, ~last_of_each, 0] == true
    np.testing.assert_allclose(data["accuracy"], right.mean(1), rtol=1e-6)
    assert ((data["target_rank"].values[:, ~last_of_each] == 1) == right).all()
    apart = [hs.lens(model, text, target="next", k=3).data for text in (ONE, TWO)]
    for name in ("target_probability", "entropy", "kl"):
        np.testing.assert_allclose(
            data[name],
            np.concatenate([one[name] for one in apart], 1),
            rtol=1e-3,
            atol=1e-4,
        )
    assert result.facts["accuracy"]["tokens"] == int((~last_of_each).sum())
    assert "accuracy" not in hs.lens(tiny("bert"), ONE).data, "it sees the next token"


def test_settled_is_the_first_layer_from_which_the_answer_stays(tiny: Tiny) -> None:
    same = np.array(
        [
            [True, False, False],
            [False, True, False],
            [True, True, False],
            [True, True, True],
        ]
    )
    assert [row.tolist().index(True) for row in stays_from(same).T] == [2, 1, 3]
    result = hs.lens(tiny("gpt2"), [ONE, TWO])
    words, settled = (
        result.data["word_id"].values[:, :, 0],
        result.data["settled"].values,
    )
    for token, layer in enumerate(settled):
        assert (words[layer:, token] == words[-1, token]).all()
        assert layer == 0 or words[layer - 1, token] != words[-1, token]
    share = [(settled <= layer).mean() for layer in range(4)]
    np.testing.assert_allclose(result.data["settled_share"], share, rtol=1e-6)


def test_of_some_layers_no_more_is_said_than_is_known(tiny: Tiny) -> None:
    """Whichever sites are read, the answer is the model's, and settled is what a
    reading of all layers says.
    """
    model = tiny("gpt2")
    whole = hs.lens(model, TWO)
    settled, answer = whole.data["settled"].values, whole.facts["last_token"]["answer"]
    assert {2, 3} <= set(settled.tolist())
    grid = views_of(whole)[0]
    assert isinstance(grid, Grid) and grid.words is not None and grid.words.framed
    outlined = grid.words.settled_rows()
    assert outlined == np.where(settled < 3, settled, -1).tolist()
    assert whole.data["word"].sel(site="layer.1").values[-1, 0] != answer
    for sites in (
        "layer.0",
        "layer.1",
        "layer.0-1",
        "layer.2,final",
        "layer.1,final",
        "layer.1-2",
        "final",
    ):
        found = hs.lens(model, TWO, sites=sites)
        last = found.facts["last_token"]
        assert (last["answer"], last["probability"]) == (
            answer,
            whole.facts["last_token"]["probability"],
        )
        assert "known" in found.summary()
        if sites in ("layer.0", "layer.1", "layer.0-1"):
            assert found.facts["settled_known_from"] is None
            assert "settled" not in found.data
            assert "settled_share" not in found.data
            assert last["settled_from"] is None
        assert len(sections_of(found)) == 2
        grid = views_of(found)[0]
        assert isinstance(grid, Grid) and grid.words is not None
        # The others leave out layers above, or between their rows.
        assert grid.words.framed == (sites in ("layer.2,final", "final"))
        assert grid.words.framed or "outline" not in grid.note
    two = hs.lens(model, TWO, sites="layer.2,final").data
    assert two["settled"].values.tolist() == np.maximum(settled, 2).tolist()
    assert two["settled_share"].values.tolist() == [
        float(whole.data["settled_share"].sel(site="layer.2")),
        1,
    ]
    gap = hs.lens(model, TWO, sites="layer.1,final").data
    assert np.isnan(gap["settled_share"].values).tolist() == [True, False]
    assert set(gap["settled"].values.tolist()) == {3}
    some = hs.lens(model, TWO, sites="layer.1-2").data["settled"].values
    assert some.tolist() == np.where(settled > 2, -1, np.maximum(settled, 1)).tolist()


def test_groups_of_texts_are_read_one_after_another(
    tiny: Tiny, monkeypatch: Any
) -> None:
    model = tiny("llama")
    expected = hs.lens(model, [ONE, TWO, ONE])
    monkeypatch.setattr("hiddenscope.analyses.lens.lens.BATCH_TOKENS", 10)
    found = hs.lens(model, [ONE, TWO, ONE])
    np.testing.assert_allclose(
        found.data["probability"], expected.data["probability"], rtol=1e-4
    )
    assert found.data["text"].values.tolist() == expected.data["text"].values.tolist()
    assert found.data.attrs == expected.data.attrs
    assert found.facts["tokens"] == expected.facts["tokens"]


def test_a_decoder_is_read_over_its_targets(tiny: Tiny) -> None:
    result = hs.lens(tiny("t5"), ONE, targets=TWO, target="next")
    assert set(result.data["stack"].values) == {"decoder"}
    assert result.data["site"].values.tolist() == [
        f"decoder.layer.{k}" for k in range(4)
    ]
    assert result.data.attrs["targets"] == [TWO]
    assert hs.lens(tiny("t5"), ONE).data.sizes["token"] == 1, "the start token alone"


def test_one_token_is_enough_unless_the_next_is_asked_for(tiny: Tiny) -> None:
    model = tiny("gpt2")
    assert hs.lens(model, [[5]]).data.sizes["token"] == 1
    with pytest.raises(TextError, match="Text 1 has no next token"):
        hs.lens(model, [[5, 6], [5]], target="next")


def test_nothing_is_left_behind(
    tiny: Tiny, hanging: Callable[[nn.Module], Any]
) -> None:
    model = tiny("llama")
    before = hanging(model.module)
    hs.lens(model, ONE)
    assert hanging(model.module) == before


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "llama",
        {"target": " cats and"},
        TextError,
        r"it is \d+ tokens: ' c' .* Give a single token",
    ),
    ("llama", {"target": ""}, TextError, "it is empty"),
    ("llama", {"target": 500}, TextError, "the ids of .* are 0 to 127"),
    ("bert", {"target": "next"}, TextError, "sees the whole text"),
    ("llama", {"k": 0}, PassError, "has 128 tokens"),
    ("llama", {"k": 129}, PassError, "has 128 tokens"),
    ("llama", {"k": True}, PassError, "k must be an integer from 1 to 128, got True"),
    ("llama", {"sites": "layer.9"}, SiteError, "No site 'layer.9'"),
    ("llama", {"sites": "layer.2.attn.z"}, SiteError, "layer.2.attn.z is not written"),
    ("t5", {"sites": "encoder.layer.1"}, SiteError, "the head reads the decoder"),
    ("llama", {"targets": ONE}, PassError, "has one stack"),
    ("t5", {"targets": [ONE, TWO]}, TextError, "2 targets with 1 texts"),
]


@pytest.mark.parametrize(("family", "given", "error", "said"), BAD)
def test_bad_input(
    tiny: Tiny, family: str, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        hs.lens(tiny(family), ONE, **given)


def test_a_model_without_a_head(tiny: Tiny) -> None:
    with pytest.raises(PassError, match="it has no language-model head"):
        hs.lens(tiny("llama", "base"), ONE)


def test_a_text_that_is_ids_and_a_target_without_a_tokenizer() -> None:
    model = hs.load((tiny_model("gpt2"), None))
    assert hs.lens(model, [[5, 6]], target=7).facts["target"]["token"] == "'7'"
    with pytest.raises(TextError, match="without a tokenizer"):
        hs.lens(model, [[5, 6]], target="a")


def test_a_nan_in_the_head_is_an_error() -> None:
    module: Any = tiny_model("llama")
    model = hs.load((module, tiny_tokenizer()))
    hs.lens(model, ONE)
    module.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(NotFinite):
        hs.lens(model, ONE)


def test_the_parameters_are_those_of_the_docs() -> None:
    assert [*inspect.signature(hs.lens).parameters] == [
        "model",
        "texts",
        "k",
        "target",
        "lens",
        "sites",
        "targets",
    ]


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
    lens = tuned[1]
    states = model.module(
        **model.tokenizer(ONE, return_tensors="pt"), output_hidden_states=True
    ).hidden_states
    found = hs.lens(model, ONE, lens=lens, k=3)
    assert found.facts["lens"] == "tuned"
    for layer, one in lens.maps.items():
        a, b, h = one.matrix - torch.eye(64), one.bias, states[layer][0]
        assert b is not None
        best = (
            model.module.lm_head(model.module.model.norm(h + h @ a.T + b))
            .softmax(-1)
            .topk(3)
        )
        np.testing.assert_allclose(
            found.data["probability"].sel(site=f"layer.{layer}"),
            best.values.detach(),
            rtol=1e-3,
        )


def test_the_map_is_a_ridge_regression_towards_the_identity() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 6)), generator.normal(size=(40, 6))
    rows = np.concatenate([x, np.ones((40, 1))], 1) * (
        6**0.5 / np.linalg.norm(y, axis=1, keepdims=True)
    )
    rest = (y - x) * (6**0.5 / np.linalg.norm(y, axis=1, keepdims=True))
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
    held = TEXTS[9]
    plain, better = (
        hs.lens(model, held).data["kl_mean"],
        hs.lens(model, held, lens=lens).data["kl_mean"],
    )
    assert (better.values <= plain.values + 1e-6).all()
    assert (better.values[:2] < plain.values[:2] * 0.9).all(), (
        "and it is worth something"
    )
    assert better.values[-1] == 0
    np.testing.assert_allclose(column(lens, "kl_before"), plain, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(column(lens, "kl_after"), better, rtol=1e-3, atol=1e-5)
    counts = [len(model.capture(TEXTS[number], "layer.0").tokens) for number in (4, 9)]
    held_out = {
        "texts": 2,
        "tokens_chosen_on": counts[0],
        "tokens_judged_on": counts[1],
        "judged_on_chosen": False,
    }
    assert lens.facts["held_out"] == held_out
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
    similar = [[5 + (k + step) % 6 for step in range(6)] for k in range(6)] + [
        [5, 7, 9],
        [6, 8, 10],
        [9, 7, 5],
    ]
    other = [90, 91, 92, 93, 94, 95, 96]
    monkeypatch.setattr("hiddenscope.analyses.lens.tuned.PENALTIES", (0.001,))
    assert set(hs.Lens.fit(model, [*similar, [10, 8, 6]]).maps) == {0, 1, 2}
    lens = hs.Lens.fit(model, [*similar, other])
    assert False in column(lens, "mapped")[:-1]
    plain, better = (
        hs.lens(model, [other], lens=each).data["kl_mean"].values
        for each in ("logit", lens)
    )
    assert (better <= plain).all()
    np.testing.assert_allclose(column(lens, "kl_after"), better, rtol=1e-3, atol=1e-5)


def test_copies_of_a_text_are_never_both_fitted_and_held_out() -> None:
    """Eight texts six times each, in other cases and with other spaces: the KL after is
    that of fresh texts.
    """
    model = hs.load((tiny_model("llama", seed=3), tiny_tokenizer()))
    ways: list[Callable[[str], str]] = [
        str,
        str.upper,
        str.lower,
        lambda text: f"{text} ",
        lambda text: f" {text}",
    ]
    ways.append(lambda text: text.replace(".", "!"))
    for texts in ([way(text) for way in ways for text in TEXTS[:8]], TEXTS[:8] * 6):
        lens = hs.Lens.fit(model, texts)
        assert (
            lens.facts["texts"],
            lens.facts["held_out"]["texts"],
            lens.facts["groups"],
        ) == (42, 6, 8)
        fresh = [
            hs.lens(model, TEXTS[8:], lens=lens).data["kl_mean"].values,
            column(lens, "kl_after"),
        ]
        assert fresh[1][0] > 0.5 * fresh[0][0], (
            "no better than on texts that were never seen"
        )
    with pytest.raises(TextError, match="all are copies of one"):
        hs.Lens.fit(model, [ONE, ONE.upper(), f"{ONE} "])


def test_a_layer_that_no_map_makes_better_is_left_as_it_is(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    monkeypatch.setattr(RidgeRegression, "map", lambda *given: Map(-torch.eye(64)))
    lens = hs.Lens.fit(model, TEXTS[:3])
    assert lens.maps == {}
    assert column(lens, "mapped") == [False] * 4
    assert column(lens, "kl_after") == column(lens, "kl_before")
    np.testing.assert_array_equal(
        hs.lens(model, ONE, lens=lens).data["kl"], hs.lens(model, ONE).data["kl"]
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [("t5", "tuned"), ("t5", "jacobian"), ("bert", "tuned"), ("bart", "jacobian")],
)
def test_other_families_have_fitted_lenses(tiny: Tiny, family: str, kind: Any) -> None:
    model = tiny(family)
    texts = [[5, 6, 7], [8, 9]]
    targets = texts if len(model.anatomy.stacks) > 1 else None
    lens = hs.Lens.fit(model, texts, kind, targets=targets)
    found = hs.lens(model, texts, lens=lens, targets=targets)
    assert (found.data["kl"].values[-1] == 0).all()
    assert found.facts["lens"] == kind


def test_a_lens_is_kept_and_refused_for_another_model(
    tuned: tuple[hs.Model, hs.Lens], tiny: Tiny, tmp_path: Path
) -> None:
    model, lens = tuned
    path = tmp_path / "tuned.safetensors"
    lens.save(path)
    again = hs.Lens.load(path)
    assert repr(again) == repr(lens)
    assert again.facts == lens.facts
    assert hs.lens(model, ONE, lens=path).equals(hs.lens(model, ONE, lens=lens))
    assert hs.lens(model, ONE, lens=str(path)).equals(hs.lens(model, ONE, lens=again))
    with pytest.raises(
        StatesError,
        match="fitted to the weights of LlamaForCausalLM, and these are others",
    ):
        hs.lens(tiny("llama"), ONE, lens=path)
    with pytest.raises(FileError, match="a .safetensors file"):
        lens.save(tmp_path / "tuned.pt")
    with pytest.raises(FileError, match="no such file"):
        hs.lens(model, ONE, lens=tmp_path / "other.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Damaged, match="not those that were written"):
        hs.Lens.load(path)
    states = model.capture(ONE)
    states.save(tmp_path / "states.safetensors")
    with pytest.raises(FileError, match="other content"):
        hs.Lens.load(tmp_path / "states.safetensors")


@pytest.mark.parametrize("kind", ["tuned", "jacobian", "other", 5])
def test_a_lens_that_was_not_fitted(tiny: Tiny, kind: Any) -> None:
    said = {"other": "no lens of that name", 5: "got int"}.get(
        kind, "has to be fitted first"
    )
    with pytest.raises(StatesError, match=said):
        hs.lens(tiny("llama"), ONE, lens=kind)


def test_fits_that_cannot_be(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="there is only one. Some are held out"):
        hs.Lens.fit(tiny("llama"), ONE)
    with pytest.raises(StatesError, match="the kinds are tuned and jacobian"):
        hs.Lens.fit(tiny("llama"), TEXTS, "other")  # type: ignore[arg-type]
    with pytest.raises(StatesError, match="fitted in one step"):
        hs.Lens.fit(tiny("llama"), TEXTS, partial=tmp_path / "partial.safetensors")
    with pytest.raises(PassError, match="it has no language-model head"):
        hs.Lens.fit(tiny("llama", "base"), TEXTS)


def jacobian(module: Any, ids: list[int], k: int) -> torch.Tensor:
    """From its definition, by torch.func: the last layer as a function of layer k,
    summed and averaged over tokens.
    """
    kept: list[torch.Tensor] = []
    blocks = module.model.layers
    handle = blocks[-1].register_forward_hook(
        lambda part, given, output: kept.append(output)
    )

    def rest(states: torch.Tensor) -> torch.Tensor:
        hook = blocks[k].register_forward_pre_hook(
            lambda part, given: (states[None], *given[1:])
        )
        module(torch.tensor([ids]))
        hook.remove()
        return kept.pop()[0]

    states = (
        module(torch.tensor([ids]), output_hidden_states=True)
        .hidden_states[k][0]
        .detach()
    )
    kept.clear()
    # [token, width, source token, source width].
    found = torch.func.jacrev(rest)(states)
    handle.remove()
    return found.sum(0).mean(1).detach()


def test_the_jacobian_lens_is_that_of_torch() -> None:
    module: Any = tiny_model("llama")
    model = hs.load((module, None))
    own: Any = tiny_model("llama")
    own.set_attn_implementation("eager")  # torch.func has no rule for the other
    texts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    lens = hs.Lens.fit(model, texts, "jacobian")
    for k in range(3):
        expected = torch.stack([jacobian(own, ids, k) for ids in texts]).mean(0)
        assert lens.maps[k].bias is None
        torch.testing.assert_close(lens.maps[k].matrix, expected, rtol=1e-4, atol=1e-5)
    states = hs.record(model, [texts[0]], "layer.1").states
    assert isinstance(states, hs.States)
    seen = hs.resume(
        model, [texts[0]], "layer.3", states["layer.1"] @ lens.maps[1].matrix.T
    ).logits
    assert seen is not None
    found = (
        hs.lens(model, [texts[0]], lens=lens, k=1)
        .data["probability"]
        .sel(site="layer.1")
        .values[:, 0]
    )
    np.testing.assert_allclose(found, seen.softmax(-1).amax(-1), rtol=1e-4)


def test_an_interrupted_fit_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hs.load((tiny_model("gpt2"), None))
    texts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    whole = hs.Lens.fit(model, texts, "jacobian")
    partial, seen = tmp_path / "partial.safetensors", list[Any]()

    def stops(model: hs.Model, text: Any, sites: Any) -> Any:
        seen.append(list(text.ids[0]))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return jacobians(model, text, sites)

    monkeypatch.setattr("hiddenscope.analyses.lens.jacobian.jacobians", stops)
    with pytest.raises(KeyboardInterrupt):
        hs.Lens.fit(model, texts, "jacobian", partial=partial)
    again = hs.Lens.fit(model, texts, "jacobian", partial=partial)
    assert seen == [texts[0], texts[1], texts[1], texts[2]]
    for k, one in whole.maps.items():
        assert torch.equal(one.matrix, again.maps[k].matrix)
    with pytest.raises(FileError, match="begun with other texts"):
        hs.Lens.fit(model, texts[:2], "jacobian", partial=partial)
    with pytest.raises(FileError, match="begun with other weights"):
        hs.Lens.fit(
            hs.load((tiny_model("gpt2", seed=5), None)),
            texts,
            "jacobian",
            partial=partial,
        )


def test_the_command_reads_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from hiddenscope.cli.main import app

    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    monkeypatch.setattr("hiddenscope.load", lambda *given, **options: model)
    run, path = CliRunner(), str(tmp_path / "tuned.safetensors")
    done = run.invoke(app, ["lens", *TEXTS[:3], "--fit", "tuned", "--out", path])
    assert done.exit_code == 0, done.output
    assert hs.Lens.load(path).kind == "tuned"
    done = run.invoke(
        app, ["lens", "The cat\x1b[31m", "-k", "2", "--lens", path, "--target", "next"]
    )
    assert done.exit_code == 0, done.output
    assert "top tokens" in done.output
    assert "layer.3" in done.output
    assert "tuned" in done.output
    assert "\x1b" not in done.output
    done = run.invoke(app, ["lens", ONE, "--fit", "tuned"])
    assert done.exit_code == 2


def test_its_pictures_and_what_is_told(tiny: Tiny, tmp_path: Path) -> None:
    result = hs.lens(tiny("llama"), ONE, target=20)
    grid, *lines = views_of(result)
    assert isinstance(grid, Grid)
    assert [measure.name for measure in grid.measures][:3] == [
        "probability of the top token",
        "entropy",
        "KL divergence from the model's own prediction",
    ]
    assert grid.words is not None
    assert grid.words.chosen.shape == (4, result.data.sizes["token"], 5)
    assert len(lines) == 3
    assert result.facts["last_token"]["answer"].strip() in sections_of(result)[0].prose
    for suffix in (".html", ".png", ".json", ".csv"):
        result.save(tmp_path / f"lens{suffix}")
    assert hs.Result.load(tmp_path / "lens.json").equals(result)


@pytest.mark.parametrize(
    "words",
    [["<script>alert(1)</script>", "\x1b[31m", "\u202e"], ["", "\u2028\ufffd", "a\0b"]],
)
def test_words_are_hostile(
    tiny: Tiny, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    monkeypatch.setattr(
        model.text_encoder, "_strings", {k: words[k % 3] for k in range(128)}
    )
    result = hs.lens(model, [[5, 6, 7]], target=7)
    assert "" not in result.data["word"].values
    for suffix in (".html", ".png", ".json", ".csv", ".nc"):
        result.save(tmp_path / f"lens{suffix}")
    assert "<script>alert(1)" not in (tmp_path / "lens.html").read_text("utf-8")
    assert hs.Result.load(tmp_path / "lens.nc").equals(result)
    assert "\x1b" not in result.summary()


@pytest.mark.real
def test_paris_comes_up_only_near_the_top(smollm2: hs.Model) -> None:
    result = hs.lens(smollm2, "The capital of France is", target=" Paris")
    rank = result.data["target_rank"].values[:, -1]
    assert rank[-1] == 1
    assert (rank[:25] > 300).all()
    facts = result.facts["target"]
    assert (
        facts["first_best_at"]
        == result.facts["last_token"]["settled_from"]
        == "layer.30"
    )
    assert facts["first_in_top_k_at"] == "layer.29"
    assert facts["probability"] == pytest.approx(0.7725, abs=2e-3)


def test_texts_of_a_group_are_held_out_together(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [f"the {word} sat" for word in ("cat", "hat", "mat", "bat", "rat", "fat")]
    facts = hs.Lens.fit(model, hs.read(texts, group=[0, 0, 0, 1, 1, 1])).facts
    assert (facts["groups"], facts["texts"], facts["held_out"]["texts"]) == (2, 3, 3)
    with pytest.raises(TextError, match="of one group"):
        hs.Lens.fit(model, hs.read(texts, group=[0] * 6))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "t5"])
def test_a_part_is_read_as_if_it_were_the_last_layer(
    tiny: Tiny, others: dict[str, hs.Model], family: str
) -> None:
    """The module's own norm and head make the same logits of what a part adds."""
    model = others[family] if family in others else tiny(family)
    stack = "decoder." if family == "t5" else ""
    names = ["layer.2.attn", "layer.2.mid", "layer.3.mlp", "layer.3.attn.head.1"]
    sites = [f"{stack}{name}" for name in names]
    ids = [[5, 6, 7, 8]]
    targets = ids if family == "t5" else None
    result = hs.lens(model, ids, sites=sites, k=4, target=9, targets=targets)
    assert result.data["site"].values.tolist() == sorted(sites, key=hs.Site.parse)
    states: Any = hs.record(model, ids, sites, targets=targets).states
    unembedding = Unembedding(model, Site(3, "", "decoder" if stack else None))
    for site in sites:
        rows = unembedding.head_inputs(states[site])
        probability = unembedding.logits(rows).double().softmax(-1)
        here = result.data.sel(site=site)
        np.testing.assert_allclose(
            here["target_probability"], probability[:, 9], rtol=1e-4
        )
        top = probability.argmax(-1).numpy()
        assert (here["word_id"].isel(rank=0).to_numpy() == top).all()


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
    assert sections_of(result)


def test_many_sites_are_read_in_smaller_batches(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    texts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    whole = hs.lens(model, texts, sites="*.attn.head.*")
    monkeypatch.setattr("hiddenscope.analyses.lens.lens.BATCH_SITES", 1)
    monkeypatch.setattr("hiddenscope.analyses.lens.lens.BATCH_TOKENS", 40)
    parts = hs.lens(model, texts, sites="*.attn.head.*")
    np.testing.assert_allclose(whole.data["entropy"], parts.data["entropy"], rtol=1e-4)


@pytest.mark.parametrize("part", ["attn.z", "attn.q", "mlp.neurons"])
def test_what_is_not_in_the_residual_stream_is_refused(tiny: Tiny, part: str) -> None:
    with pytest.raises(SiteError, match="not written to the residual stream"):
        hs.lens(tiny("llama"), ONE, sites=f"layer.2.{part}")


def test_a_fitted_lens_reads_no_parts(tiny: Tiny) -> None:
    model = tiny("llama")
    fitted = hs.Lens.fit(model, [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14]])
    with pytest.raises(SiteError, match="it was fitted to whole layers"):
        hs.lens(model, ONE, lens=fitted, sites="*.mlp")


def test_a_figure_of_many_sites_has_no_words_on_one_another(
    tiny: Tiny, tmp_path: Path
) -> None:
    result = hs.lens(tiny("llama"), ONE, sites="*.mlp.neuron.*")
    path = tmp_path / "neurons.svg"
    result.save(path)
    cells = result.data.sizes["site"] * result.data.sizes["token"]
    assert path.read_text("utf-8").count("<text") < cells / 10


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
