"""The parts of every family sum to the logit; two families are split once more by hand;
freezing the norm and removing a part takes away what the part adds.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.analyses.contributions import parts as parts_module
from hiddenscope.errors import PassError, StatesError, TextError
from hiddenscope.testing import build, tiny_model, tiny_tokenizer

IDS, ANSWER, OTHER = [5, 6, 7, 8], 11, 12
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128} | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
BUILT = {
    "gemma2": ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 16}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
}
FAMILIES = ["llama", "gpt2", "gemma2", "gptj", "mixtral", "cohere", "t5", "hrm_text"]
# Other forms of the same parts.
MORE = ["gemma3_text", "qwen3", "opt", "bloom", "gpt_neox", "falcon"]
NOTES = {
    "mixtral": "Neurons of some blocks were left out",
    "hrm_text": "is not split into heads",
}


def module_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    if family in BUILT:
        name, changes = BUILT[family]
        row = {"model_class": f"{name}ForCausalLM", "config_class": f"{name}Config"}
        return build({**row, "config": SHAPE | changes}).to(dtype)
    module: Any = tiny_model(family).to(dtype)
    if module.config.is_encoder_decoder:
        module.config.decoder_start_token_id = 0
    return module


@cache
def loaded(family: str) -> hs.Model:
    """A model that no test may change."""
    return hs.load((module_of(family), None))


@cache
def worded() -> hs.Model:
    return hs.load((module_of("llama"), tiny_tokenizer()))


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE)],
)
def test_parts_sum_to_the_models_own_logit(family: str) -> None:
    """Sums that are off by more than rounding are refused."""
    result = hs.contributions(loaded(family), IDS, [ANSWER, OTHER])
    capped = family in ("gemma2", "gemma3_text")
    assert result.facts["softcap"] == (3 if capped else None)
    assert result.facts["scale"] == (0.25 if family == "cohere" else None)
    # What rounding may do is far below what any part adds.
    heads = result.data["attn_head"].to_numpy()
    assert np.max(result.facts["allowed_error"]) < 1e-3
    assert family == "hrm_text" or (np.nanmax(np.abs(heads)) > 1e-3)
    assert NOTES.get(family, "") in " ".join(result.facts["notes"])
    assert ("neuron" in result.data) == (family != "mixtral")


def test_text_and_answer_may_be_words() -> None:
    result = hs.contributions(worded(), "The cat", " sat", " in")
    assert result.facts["answer"] == " s" or result.facts["answer"] == " sat"
    ids = worded().encode("The cat").ids[0]
    assert result.facts["tokens"] == result.data.sizes["token"] == len(ids)


def test_no_neurons_are_named_where_none_are_asked_for() -> None:
    none = hs.contributions(loaded("llama"), IDS, ANSWER, neurons=0)
    assert "neuron" not in none.data
    assert none.facts["notes"] == []


@pytest.mark.parametrize(
    ("family", "task", "reason"),
    [
        ("bert", None, "sees the whole text.*hs.lens or hs.patch"),
        ("bart", None, "block 1 norms the sum.*hs.lens or hs.patch"),
        ("mamba", None, "parts of block 1 are not known.*hs.lens or hs.patch"),
        ("llama", "base", "no head.*task='causal-lm'"),
    ],
)
def test_models_whose_parts_do_not_sum_up_are_refused(
    tiny: Callable[..., hs.Model], family: str, task: str | None, reason: str
) -> None:
    with pytest.raises(PassError, match=reason):
        hs.contributions(tiny(family, task), IDS, ANSWER)


def test_what_is_no_norm_is_refused() -> None:
    module = module_of("llama")
    inner = module.model.norm

    class Bent(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            return torch.tanh(inner(states))

    module.model.norm = Bent()
    with pytest.raises(PassError, match="is no plain norm: it is not a gain"):
        hs.contributions((module, None), IDS, ANSWER)


def test_what_cannot_be_asked_is_refused_in_a_sentence() -> None:
    model = worded()
    longest = [5] * (model.text_encoder.window or 0)
    hs.contributions(model, longest, 11)
    cases: list[tuple[Any, Any, Any, str]] = [
        (IDS, [], None, "it is empty"),
        (IDS, "", None, "Cannot use the answer ''"),
        (IDS, 999, None, "ids of LlamaForCausalLM are 0 to 127"),
        (IDS, 11, 11, "both are the same tokens"),
        (IDS, [11, 12], [11], "one begins with all tokens of the other"),
        ([IDS, IDS], 11, None, "Cannot take 2 texts"),
        ([], 11, None, "the list is empty|no tokens"),
        ([5] * 500, 11, None, "takes at most"),
        (longest, [11, 12], None, "text and its answer are too long"),
    ]
    for text, answer, other, message in cases:
        with pytest.raises(TextError, match=message):
            hs.contributions(model, text, answer, other)
    for neurons in (-1, True):
        with pytest.raises(StatesError, match="neurons must be an integer"):
            hs.contributions(model, IDS, 11, neurons=neurons)


def test_coarser_products_of_float32_are_allowed_for() -> None:
    model = loaded("llama")
    usual = hs.contributions(model, IDS, ANSWER).facts["allowed_error"]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        coarse = hs.contributions(model, IDS, ANSWER).facts["allowed_error"]
    finally:
        torch.set_float32_matmul_precision(before)
    assert coarse[0] > 100 * usual[0]


def test_a_sum_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that writes a thousandth more than it does is noticed."""
    original = parts_module.effects_along

    def louder(*arguments: Any) -> tuple[Tensor, Tensor]:
        columns, bias = original(*arguments)
        return columns * 1.001, bias

    monkeypatch.setattr(parts_module, "effects_along", louder)
    with pytest.raises(PassError, match="do not sum to its logit: they are off by"):
        hs.contributions(loaded("llama"), IDS, ANSWER)


def test_projections_without_a_plain_weight_are_run_column_by_column() -> None:
    """An adapted projection is split like the same weights in one matrix."""
    module = module_of("llama")
    plain = hs.contributions((module, None), IDS, ANSWER)
    for layer in module.model.layers:
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    adapted = hs.contributions((module, None), IDS, ANSWER)
    for name in ("attn_head", "neuron", "mlp"):
        np.testing.assert_allclose(adapted.data[name], plain.data[name], atol=1e-6)


class Adapted(nn.Module):
    """A projection that is the sum of two, as an adapter makes it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        half: Tensor = self.inner(states)
        return 0.25 * half + 0.75 * half
