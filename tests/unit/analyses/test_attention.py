"""Attention weights are those of eager attention, and findings are tested."""

import gzip
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.analyses.attention import compute as weights_module
from hiddenscope.analyses.attention.relations import draw_texts
from hiddenscope.errors import PassError, SiteError, TextError, TooLarge
from hiddenscope.passes import attention_weights
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from tests.places import TESTS
from tests.planted import previous_token_model

CONFIGS = TESTS / "conformance" / "tiny_configs.json.gz"
TOKENS, TARGETS = 40, 13
FAMILIES = ["Llama", "Mistral", "Bloom", "Gemma2", "Gemma3", "DeepseekV3", "GptOss"]
MORE = ["Qwen3", "Falcon", "GPTJ", "Mixtral"]


@cache
def rows() -> dict[str, dict[str, Any]]:
    with gzip.open(CONFIGS) as file:
        return {row["model_class"]: row for row in json.load(file)}


def built(name: str, kernel: str | None = None) -> Any:
    """Build a tiny model, with an attention kernel of its own if it is named."""
    row = rows()[name]
    config = dict(row["config"])
    if kernel is not None:
        config["attn_implementation"] = kernel
    return build({**row, "config": config})


@cache
def loaded(name: str, kernel: str | None = None) -> hs.Model:
    """Load a tiny model once: to prove its anatomy takes longer than to run it."""
    return hs.load((built(name, kernel), None))


@cache
def eager(name: str) -> Any:
    return built(name, "eager")


def random_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 100, (length,), generator=generator).tolist()


def reported(module: Any, ids: list[int], targets: list[int] | None = None) -> Any:
    """Return what the model itself reports under eager attention."""
    arguments = {"input_ids": torch.tensor([ids])}
    if targets is not None:
        arguments["decoder_input_ids"] = torch.tensor([targets])
    with torch.no_grad():
        return module(**arguments, output_attentions=True)


def stacked(attentions: Any) -> Any:
    return torch.stack([layer[0].float() for layer in attentions]).numpy()


CASES = [(f"{family}ForCausalLM", None) for family in FAMILIES]
CASES += [("GPT2LMHeadModel", None), ("BertForMaskedLM", None)]
CASES += [("MistralForCausalLM", "eager")]
SLOW = [(f"{family}ForCausalLM", None) for family in MORE]
SLOW += [("DeepseekV3ForCausalLM", "eager"), ("BertForMaskedLM", "eager")]


@pytest.mark.parametrize(
    ("name", "kernel"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_weights_are_those_of_eager_attention(name: str, kernel: str | None) -> None:
    """The text is longer than the sliding windows of 16 tokens."""
    ids = random_ids(TOKENS)
    model = loaded(name, kernel)
    result = hs.attention(model, [ids], draws=0)
    assert result.facts["kernel"] == model.module.config._attn_implementation
    expected = stacked(reported(eager(name), ids).attentions)
    pattern = result.data["pattern"].values
    assert pattern.shape == expected.shape
    np.testing.assert_allclose(pattern, expected, rtol=0, atol=1e-5)
    assert result.facts["error"] < 1e-5
    at = np.arange(1, TOKENS)
    for relation, keys in {"previous": at - 1, "first": 0 * at, "same": at}.items():
        means = expected[:, :, at, keys].mean(-1)
        np.testing.assert_allclose(result.data[relation], means, atol=1e-5)
    if name == "GptOssForCausalLM":
        # The sink takes weight and is no token.
        smallest = expected.sum(-1).min()
        assert result.facts["rows_sum_to"] == pytest.approx(smallest, abs=1e-5)
        assert smallest < 0.9
    else:
        assert result.facts["rows_sum_to"] == 1


@pytest.mark.parametrize(
    ("mask", "key_heads"), [("none", 4), ("bool", 2), ("float", 1), ("causal", 2)]
)
def test_every_form_of_torch_attention_is_understood(mask: str, key_heads: int) -> None:
    """Weights times values is what torch returns."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 7, 8, generator=generator)
    key, value = torch.randn(2, 2, key_heads, 9, 8, generator=generator)
    visible = torch.rand(1, 1, 7, 9, generator=generator) < 0.6
    # The first query sees no key at all.
    visible[..., 0, :] = False
    shifts = torch.randn(2, 1, 1, 9, generator=generator)
    arguments: dict[str, Any] = {
        "none": {},
        "bool": {"attn_mask": visible},
        "float": {"attn_mask": shifts},
        "causal": {"is_causal": True},
    }[mask]
    attend = torch.nn.functional.scaled_dot_product_attention
    output = attend(query, key, value, scale=0.7, enable_gqa=True, **arguments)
    heads = (0, 1, 2, 3)
    source = attention_weights._FusedWeights(
        query,
        attention_weights._take_heads(key, heads, 4),
        attention_weights._take_heads(value, heads, 4),
        arguments.get("attn_mask"),
        mask == "causal",
        0.7,
    )
    expected = source.weights(list(range(7))) @ source.values
    torch.testing.assert_close(expected, output, rtol=1e-5, atol=1e-6)


def test_some_heads_rows_and_layers_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what is asked for is computed, a few rows at a time."""
    model = loaded("MistralForCausalLM")
    ids = [random_ids(TOKENS)]
    whole = hs.attention(model, ids, draws=0).data
    original, sizes = attention_weights._FusedWeights.weights, []

    def watched(self: Any, positions: list[int]) -> torch.Tensor:
        weights = original(self, positions)
        sizes.append(weights.nbytes)
        return weights

    monkeypatch.setattr(attention_weights._FusedWeights, "weights", watched)
    some = hs.attention(model, ids, [-1, 1], heads="1-2", queries=[-1, 4], draws=0).data
    # Of two layers, two heads and two rows at once, in float32.
    assert sizes == [2 * 2 * 2 * TOKENS * 4]
    assert some["site"].values.tolist() == ["layer.1.attn", "layer.3.attn"]
    assert some["query_position"].values.tolist() == [4, TOKENS - 1]
    chosen = whole.sel(layer=[1, 3], head=[1, 2]).isel(query=[4, TOKENS - 1])
    for name in ("pattern", "weighted", "write_norm"):
        np.testing.assert_allclose(some[name].values, chosen[name].values, rtol=1e-5)
    monkeypatch.setattr(attention_weights, "MOST_BYTES", 10_000)
    sizes.clear()
    blocks = hs.attention(model, ids, draws=0).data["pattern"].values
    np.testing.assert_allclose(blocks, whole["pattern"].values, rtol=0, atol=1e-7)
    assert max(sizes) <= 10_000


def test_write_norms_of_a_projection_with_a_foreign_hook_and_a_norm_after_it() -> None:
    """The code of the projection is run in place of its weight; a norm after it changes
    no ratio within a row.
    """
    name, ids = "Gemma3ForCausalLM", [random_ids(9)]
    module = built(name)
    for block in module.model.layers:
        block.self_attn.o_proj.register_forward_hook(lambda *arguments: None)
    by_code = hs.attention((module, None), ids, layers=2, draws=0).data["write_norm"]
    result = hs.attention(loaded(name), ids, layers=2, draws=0)
    by_weight = result.data["write_norm"].values
    np.testing.assert_allclose(by_code.values, by_weight, rtol=1e-4)
    assert "norm comes after attention" in result.facts["notes"][0]


def test_operands_that_are_written_to_before_they_are_read_are_refused() -> None:
    module = built("LlamaForCausalLM")
    model = hs.load((module, None))
    attention = module.model.layers[0].self_attn
    overwrite = attention.v_proj.register_forward_hook(
        lambda part, inputs, output: setattr(part, "kept", output)
    )

    def zero(*arguments: Any) -> None:
        """Write over the operand; what a hook returns would stand for the output."""
        attention.v_proj.kept.zero_()

    spoil = module.model.layers[0].mlp.register_forward_hook(zero)
    with pytest.raises(PassError, match=r"layer\.1\.attn: weights times values differ"):
        hs.attention(model, [random_ids(TOKENS)], draws=0)
    overwrite.remove()
    spoil.remove()
    hs.attention(model, [random_ids(TOKENS)], draws=0)


def test_weights_that_do_not_make_the_pass_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The law is checked on every call."""
    original = attention_weights._FusedWeights.scores

    def without_scale(self: Any, positions: list[int]) -> torch.Tensor:
        return original(self, positions) * 1.01

    monkeypatch.setattr(attention_weights._FusedWeights, "scores", without_scale)
    with pytest.raises(PassError, match="Cannot trust the attention weights at layer"):
        hs.attention(loaded("LlamaForCausalLM"), [random_ids(9)], draws=0)


def test_what_does_not_fit_in_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_module, "free_memory", lambda: 10_000)
    model, ids = loaded("LlamaForCausalLM"), [random_ids(40)]
    with pytest.raises(TooLarge, match=r"queries=-1, or some layers, such as layers=1"):
        hs.attention(model, ids, draws=0)
    hs.attention(model, ids, queries=-1, layers=1, draws=0)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": 9}, SiteError, "its 3 blocks make layer 1 to layer 3"),
    ({"layers": 0}, SiteError, "No attention in layer 0"),
    ({"layers": "layer.2"}, SiteError, r"Choose 'layer\.2\.attn'"),
    ({"heads": 4}, SiteError, "4 heads there, counted from 0. Choose 0 to 3"),
    ({"heads": -1}, SiteError, "Choose 0 to 3"),
    ({"queries": 5}, TextError, "the text has 3 tokens. Choose 0 to 2"),
    ({"draws": 3}, TextError, "or draws=0 for no test"),
]


def test_what_is_not_there_is_refused_in_one_sentence(
    tiny: Callable[..., hs.Model],
) -> None:
    for arguments, error, message in BAD:
        with pytest.raises(error, match=message):
            hs.attention(tiny("llama"), [[5, 6, 7]], **arguments)
    with pytest.raises(TextError, match="Give one text at a time"):
        hs.attention(tiny("llama"), [[5, 6], [7, 8]])
    with pytest.raises(TextError, match="window|longer|tokens"):
        hs.attention(tiny("llama"), [random_ids(500)])


@pytest.mark.parametrize("family", ["mamba", "fnet", "longformer"])
def test_a_family_without_weights_is_refused_with_its_reason(
    tiny: Callable[..., hs.Model], family: str
) -> None:
    with pytest.raises(SiteError, match=r"No attention weights at layer\.1\.attn of"):
        hs.attention(tiny(family), [[5, 6, 7]])


def test_a_hybrid_shows_the_layers_that_have_attention() -> None:
    model = loaded("BambaForCausalLM")
    result = hs.attention(model, [random_ids(9)], draws=0)
    assert result.data["site"].values.tolist() == ["layer.2.attn"]
    assert result.facts["notes"][0].startswith("Without layer.1.attn, layer.3.attn: ")
    with pytest.raises(SiteError, match=r"No attention weights at layer\.1\.attn"):
        hs.attention(model, [random_ids(9)], layers=[1, 2])


def test_an_encoder_is_tested_without_induction() -> None:
    model = hs.load((tiny_model("bert"), tiny_tokenizer(cls=True)))
    result = hs.attention(model, "The rest.", draws=6)
    assert result.data["relation"].values.tolist() == ["previous", "first", "same"]
    assert any("Induction was not tested" in note for note in result.facts["notes"])
    assert "induction_heads" not in result.facts
    assert "induction" not in result.summary().partition("Induction was not")[0]
    texts = draw_texts(model, None, 6, 0, causal=False)
    assert texts is not None and texts.inputs.ids[0][-1] == 5 and len(texts.inputs) == 6


def test_a_planted_head_is_found_and_no_other_is_said_to_be_like_it() -> None:
    result = hs.attention((previous_token_model(), tiny_tokenizer()), "The rest.")
    heads = result.facts["previous_heads"]
    assert heads[0]["site"] == "layer.1.attn.head.2"
    assert heads[0]["score"] > 0.9 and heads[0]["p_half"] < 0.001
    assert all(head["p_half"] > 0.05 for head in heads[1:])
    assert result.data["previous"].sel(layer=1, head=2) > 0.9
    assert not result.facts["induction_heads"]
    # What is said first is who does it in earnest, of the sink too.
    told = result.summary()
    assert "1 of 12 attention heads gives the previous token more than half" in told
    if first := result.facts["first_heads"]:
        earnest, few = "to give the first token more than half", "read it, if little"
        told = told[told.index(earnest) :]
        assert f"{len(first)} of 12 {few}, as idle heads do" in told


def test_even_weights_are_even_beyond_rounding() -> None:
    module = tiny_model("llama")
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.q_proj.weight.zero_()
    result = hs.attention((module, tiny_tokenizer()), "The rest.")
    for relation in ("previous", "first", "same", "induction"):
        assert not result.facts[f"{relation}_heads"], relation


def test_a_text_of_random_tokens_begins_as_the_tokenizer_begins(
    tiny: Callable[..., hs.Model],
) -> None:
    texts = draw_texts(tiny("llama"), None, 6, 0, causal=True)
    assert texts is not None and texts.start == 1
    special = tiny_tokenizer().all_special_ids
    for ids in texts.inputs.ids:
        assert ids[0] == 1 and len(ids) == 49
        assert not set(ids[1:]) & set(special), "special tokens are not ordinary"


def test_coarse_digits_of_a_gpu_are_no_excuse_on_a_cpu() -> None:
    values = torch.ones(2)
    fine = attention_weights._tolerance(values)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert attention_weights._tolerance(values) == fine
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
