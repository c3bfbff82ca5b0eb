"""Lens: the last layer is the model's own answer, and every chunk says what a naive softmax over all words says."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.analyses.lens import reading
from hiddenscope.errors import NotFinite, PassError, SiteError, TextError
from hiddenscope.passes.tail import Tail
from hiddenscope.sites import Site
from hiddenscope.testing import build, tiny_model, tiny_tokenizer

ONE, TWO = "The cat sat on the mat.", "The rest is in the cold water and the sand."
Tiny = Callable[..., hs.Model]

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # on a CPU without bfloat16

SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1}
SHAPE |= {"eos_token_id": 2}
OTHERS = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"final_logit_softcapping": 3.0, "head_dim": 16}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.25}),
}
FAMILIES = ["llama", "gpt2", "mamba", "gemma2", "cohere", "bert", "roberta", "t5", "bart"]


@pytest.fixture(scope="module")
def others() -> dict[str, hs.Model]:
    made = {}
    for name, (model_class, config_class, config) in OTHERS.items():
        row = {"model_class": model_class, "config_class": config_class, "config": {**SHAPE, **config}}
        made[name] = hs.load((build(row), tiny_tokenizer()))
    return made


@pytest.fixture
def load(tiny: Tiny, others: dict[str, hs.Model]) -> Callable[[str], hs.Model]:
    return lambda family: others[family] if family in others else tiny(family)


def last(model: hs.Model) -> Site:
    stack = model.anatomy.stacks[-1]
    return Site(stack.depth, "", stack.name if len(model.anatomy.stacks) > 1 else None)


def naive(model: hs.Model, text: str) -> torch.Tensor:
    """Log-probabilities [site, token, word] in float64: each layer is put in the last one's place in a true pass."""
    targets = text if len(model.anatomy.stacks) > 1 else None
    stack = last(model).stack
    sites = model.anatomy.select(f"{stack}.layer.*" if stack else "layer.*")
    states = hs.record(model, text, list(sites), targets=targets).states
    assert isinstance(states, hs.States)
    said = [hs.resume(model, text, last(model), states[site], targets=targets).logits for site in sites]
    return torch.stack([one for one in said if one is not None]).double().log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_that_of_a_naive_softmax(load: Callable[[str], hs.Model], family: str) -> None:
    model = load(family)
    targets = ONE if len(model.anatomy.stacks) > 1 else None
    result, logs = hs.lens(model, ONE, target=20, targets=targets), naive(model, ONE)
    best = logs.topk(5, dim=-1)
    np.testing.assert_allclose(result.data["probability"], best.values.exp(), rtol=2e-4, atol=1e-7)
    at = torch.from_numpy(result.data["word_id"].values)
    np.testing.assert_allclose(logs.gather(-1, at), best.values, atol=1e-4)
    np.testing.assert_allclose(result.data["entropy"], -(logs.exp() * logs).sum(-1), atol=2e-5)
    np.testing.assert_allclose(result.data["kl"], (logs[-1].exp() * (logs[-1] - logs)).sum(-1), atol=2e-5)
    np.testing.assert_allclose(result.data["target_probability"], logs[..., 20].exp(), rtol=2e-4, atol=1e-7)
    rank = (logs > logs[..., 20:21]).sum(-1) + 1
    assert (np.abs(result.data["target_rank"].values - rank.numpy()) <= 1).all(), "two words may be nearly as likely"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_is_the_models_own_answer(load: Callable[[str], hs.Model], family: str) -> None:
    model = load(family)
    targets = ONE if len(model.anatomy.stacks) > 1 else None
    result = hs.lens(model, ONE, k=128, targets=targets)
    logits = hs.record(model, ONE, last(model), targets=targets, logits=True).logits
    assert logits is not None
    shares = logits.double().softmax(-1)
    here = result.data.isel(site=-1)
    said = torch.from_numpy(here["word_id"].values)
    np.testing.assert_allclose(here["probability"], shares.gather(-1, said), rtol=1e-4, atol=1e-9)
    np.testing.assert_array_equal(here["word_id"].values[:, 0], shares.argmax(-1))
    assert (here["kl"].values == 0).all()
    assert float(here["agreement"]) == float(here["settled_share"]) == 1
    np.testing.assert_allclose(result.data["probability"].sum("rank"), 1, rtol=1e-5)
    assert (result.data["settled"].values >= 0).all()


def test_a_llama_by_its_own_modules(tiny: Tiny) -> None:
    model: Any = tiny("llama")
    states = model.module(**model.tokenizer(ONE, return_tensors="pt"), output_hidden_states=True).hidden_states
    result = hs.lens(model, ONE, k=3, sites="layer.0-2,final")
    assert result.data["site"].values.tolist() == ["layer.0", "layer.1", "layer.2", "final"]
    for row, state in enumerate(states[:3]):
        best = model.module.lm_head(model.module.model.norm(state))[0].softmax(-1).topk(3)
        np.testing.assert_allclose(result.data["probability"][row], best.values.detach(), rtol=1e-4)
        np.testing.assert_array_equal(result.data["word_id"][row], best.indices)
    normed = model.module.lm_head(states[3])[0].softmax(-1).topk(3)
    np.testing.assert_allclose(result.data["probability"][3], normed.values.detach(), rtol=1e-4)
    assert (result.data["kl"].values[3] < 1e-5).all()


@pytest.mark.parametrize("family", ["gpt2", "bart"])
@pytest.mark.parametrize("most", [1, 8 * 128, 9 * 128 * 8, 2**30])
def test_every_size_of_chunk_says_the_same(tiny: Tiny, family: str, most: int, monkeypatch: Any) -> None:
    model = tiny(family)
    targets = [ONE, TWO] if family == "bart" else None
    expected = hs.lens(model, [ONE, TWO], target=20, targets=targets).data
    monkeypatch.setitem(reading.read.__kwdefaults__, "most", most)
    found = hs.lens(model, [ONE, TWO], target=20, targets=targets).data
    for name in ("probability", "entropy", "kl", "target_probability"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(found["word_id"][..., 0], expected["word_id"][..., 0])


@pytest.mark.parametrize("words", [40, 128, 1000, 5000])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_best_words_are_those_of_topk(words: int, k: int) -> None:
    logits = torch.randn(17, words, generator=torch.Generator().manual_seed(words))
    best, places = reading.top(logits, k)
    assert torch.equal(best, logits.topk(k).values)
    assert torch.equal(places, logits.topk(k).indices)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "llama", "t5", "bert"])
def test_one_product_is_used_where_it_is_shown_to_do(load: Callable[[str], hs.Model], family: str) -> None:
    model = load(family)
    found = Tail(model, last(model)).found
    assert found.form == {"gemma2": "soft-capped", "cohere": "scaled"}.get(family, "as they are")
    assert found.constant == {"gemma2": 3.0, "cohere": 0.25}.get(family, 1.0)


class Strange(nn.Linear):
    """A head that is no plain product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch calls it so
        made = super().forward(input)
        return made + made.mean(-1, keepdim=True).tanh() * made


def test_a_head_that_is_no_product_goes_row_by_row() -> None:
    module: Any = tiny_model("llama")
    strange = Strange(64, 128, bias=False)
    strange.weight = module.lm_head.weight
    module.lm_head = strange.eval()
    model = hs.load((module, tiny_tokenizer()))
    tail = Tail(model, Site(3))
    assert not tail.by_product
    assert "Strange" in tail.found.why
    np.testing.assert_allclose(
        hs.lens(model, ONE).data["entropy"], -(naive(model, ONE).exp() * naive(model, ONE)).sum(-1), atol=2e-5
    )


def test_words_that_are_never_said_change_nothing(tiny: Tiny) -> None:
    module: Any = tiny_model("llama")
    module.lm_head.bias = nn.Parameter(torch.zeros(128))
    module.lm_head.bias.data[[7, 9]] = -torch.inf
    model = hs.load((module, tiny_tokenizer()))
    result, logs = hs.lens(model, ONE, k=128, target=7), naive(model, ONE)
    np.testing.assert_allclose(result.data["entropy"], -(logs.exp() * logs.clamp_min(-1e9)).sum(-1), atol=2e-5)
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
    np.testing.assert_allclose(result.data["probability"][-1], shares, rtol=0.05 if dtype == torch.bfloat16 else 1e-6)
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
        np.testing.assert_allclose(data[name], np.concatenate([one[name] for one in apart], 1), rtol=1e-3, atol=1e-4)
    assert result.facts["accuracy"]["tokens"] == int((~last_of_each).sum())
    assert "accuracy" not in hs.lens(tiny("bert"), ONE).data, "it sees the next token"


def test_settled_is_the_first_layer_from_which_the_answer_stays() -> None:
    from hiddenscope.analyses.lens.findings import _settled

    same = np.array([[True, False, False], [False, True, False], [True, True, False], [True, True, True]])
    assert _settled(same).tolist() == [2, 1, 3]
    assert _settled(same[:3]).tolist() == [2, 1, 3], "3 is past the last of three"


def test_groups_of_texts_are_read_one_after_another(tiny: Tiny, monkeypatch: Any) -> None:
    model = tiny("llama")
    expected = hs.lens(model, [ONE, TWO, ONE])
    monkeypatch.setattr("hiddenscope.analyses.lens.TOKENS", 10)
    found = hs.lens(model, [ONE, TWO, ONE])
    np.testing.assert_allclose(found.data["probability"], expected.data["probability"], rtol=1e-4)
    assert found.data["text"].values.tolist() == expected.data["text"].values.tolist()
    assert found.data.attrs == expected.data.attrs
    assert found.facts["tokens"] == expected.facts["tokens"]


def test_a_decoder_is_read_over_its_targets(tiny: Tiny) -> None:
    result = hs.lens(tiny("t5"), ONE, targets=TWO, target="next")
    assert set(result.data["stack"].values) == {"decoder"}
    assert result.data["site"].values.tolist() == [f"decoder.layer.{k}" for k in range(4)]
    assert result.data.attrs["targets"] == [TWO]
    assert hs.lens(tiny("t5"), ONE).data.sizes["token"] == 1, "the start token alone"


def test_one_token_is_enough_unless_the_next_is_asked_for(tiny: Tiny) -> None:
    model = tiny("gpt2")
    assert hs.lens(model, [[5]]).data.sizes["token"] == 1
    with pytest.raises(TextError, match="Text 1: it has one token, and none comes next"):
        hs.lens(model, [[5, 6], [5]], target="next")


def test_nothing_is_left_behind(tiny: Tiny, hanging: Callable[[nn.Module], Any]) -> None:
    model = tiny("llama")
    before = hanging(model.module)
    hs.lens(model, ONE)
    assert hanging(model.module) == before


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("llama", {"target": " cats and"}, TextError, r"it is \d+ tokens: ' c' .* Give one token"),
    ("llama", {"target": ""}, TextError, "it is no token at all"),
    ("llama", {"target": 500}, TextError, "the ids of .* are 0 to 127"),
    ("bert", {"target": "next"}, TextError, "sees the whole text"),
    ("llama", {"k": 0}, PassError, "128 to choose from"),
    ("llama", {"k": 129}, PassError, "128 to choose from"),
    ("llama", {"k": True}, PassError, "Give a whole number"),
    ("llama", {"sites": "layer.9"}, SiteError, "No site 'layer.9'"),
    ("llama", {"sites": "layer.2.attn"}, SiteError, "layer.2.attn is inside a block"),
    ("t5", {"sites": "encoder.layer.1"}, SiteError, "the head reads the decoder"),
    ("llama", {"targets": ONE}, PassError, "has one stack"),
    ("t5", {"targets": [ONE, TWO]}, TextError, "there are 2 targets"),
]


@pytest.mark.parametrize(("family", "given", "error", "said"), BAD)
def test_bad_input(tiny: Tiny, family: str, given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        hs.lens(tiny(family), ONE, **given)


def test_a_model_without_a_head(tiny: Tiny) -> None:
    with pytest.raises(PassError, match="it has no head that gives any"):
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
    assert [*inspect.signature(hs.lens).parameters] == ["model", "text", "k", "target", "lens", "sites", "targets"]


@pytest.mark.real
def test_paris_comes_up_only_near_the_top(smollm2: hs.Model) -> None:
    result = hs.lens(smollm2, "The capital of France is", target=" Paris")
    rank = result.data["target_rank"].values[:, -1]
    assert rank[-1] == 1
    assert (rank[:25] > 300).all()
    facts = result.facts["target"]
    assert facts["first best at"] == result.facts["last token"]["settled from"] == "layer.30"
    assert facts["first among the 5 best at"] == "layer.29"
    assert facts["probability there"] == pytest.approx(0.7725, abs=2e-3)
