"""The parts of every family sum to the logit; two families are split once more by hand;
freezing the norm and removing a part takes away what the part adds.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.analyses.contributions import parts as parts_module
from hiddenscope.analyses.contributions.final_norm import freeze_norm
from hiddenscope.errors import PassError, StatesError, TextError
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import story_of, views_of
from hiddenscope.sites import Site
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


def own_logits(module: Any, ids: list[int], tokens: list[int]) -> Tensor:
    """The logits that the module itself gives at the tokens of an answer."""
    with torch.no_grad():
        if module.config.is_encoder_decoder:
            logits = module(
                input_ids=torch.tensor([ids]),
                decoder_input_ids=torch.tensor([[0, *tokens[:-1]]]),
            ).logits[0]
        else:
            logits = module(torch.tensor([[*ids, *tokens[:-1]]])).logits[0]
    return logits[-len(tokens) :].double()


def all_parts(result: hs.Result) -> np.ndarray:
    """The sum of the parts, as a reader of the data would take it."""
    data = result.data
    total = np.zeros(data.sizes["step"])
    for name in data.data_vars:
        if name in ("logit", "total", "error", "neuron", "probability"):
            continue
        rest = [dim for dim in data[name].dims if dim != "step"]
        total = total + data[name].sum(rest).to_numpy()
    return total


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE)],
)
def test_parts_sum_to_the_models_own_logit(family: str) -> None:
    model = loaded(family)
    result = hs.contributions(model, IDS, [ANSWER, OTHER])
    logits = own_logits(model.module, IDS, [ANSWER, OTHER])
    probability = logits.softmax(-1)
    expected = [probability[0, ANSWER], probability[1, OTHER]]
    np.testing.assert_allclose(result.data["probability"], expected, rtol=1e-4)
    capped = family in ("gemma2", "gemma3_text")
    assert result.facts["softcap"] == (3 if capped else None)
    assert result.facts["scale"] == (0.25 if family == "cohere" else None)
    if capped:
        logits = 3 * torch.arctanh(logits / 3)
    own = np.array([logits[0, ANSWER], logits[1, OTHER]])
    pair = hs.contributions(model, IDS, ANSWER, OTHER).data["logit"].item()
    assert np.isclose(pair, (logits[0, ANSWER] - logits[0, OTHER]).item(), atol=1e-5)
    np.testing.assert_allclose(result.data["logit"], own, atol=5e-6)
    np.testing.assert_allclose(all_parts(result), own, atol=5e-6)
    assert np.isclose(result.data["total"], all_parts(result), atol=1e-12).all()
    error = np.abs(result.facts["error"])
    assert (error <= result.facts["allowed_error"]).all()
    # What rounding may do is far below what any part adds.
    heads = result.data["attn_head"].to_numpy()
    assert np.max(result.facts["allowed_error"]) < 1e-3
    assert family == "hrm_text" or (np.nanmax(np.abs(heads)) > 1e-3)
    assert NOTES.get(family, "") in " ".join(result.facts["notes"])
    assert ("neuron" in result.data) == (family != "mixtral")
    assert views_of(result)
    assert story_of(result)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_parts_sum_to_the_logit_in_bfloat16(family: str) -> None:
    module = module_of(family, torch.bfloat16)
    result = hs.contributions((module, None), IDS, ANSWER)
    assert result.facts["dtype"] == "bfloat16"
    exact = hs.contributions((module.float(), None), IDS, ANSWER)
    np.testing.assert_allclose(result.data["total"], exact.data["total"], atol=0.1)
    scale = np.abs(exact.data["mlp"].to_numpy()).max()
    for name in ("attn_head", "mlp", "embedding"):
        difference = np.abs(result.data[name] - exact.data[name]).max()
        assert difference < 0.05 * scale


def test_llama_split_by_hand_gives_the_same() -> None:
    module = module_of("llama")
    result = hs.contributions((module, None), IDS, ANSWER, OTHER)
    data, core, seen = result.data.isel(step=0), module.model, {}

    def keep(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[name] = args[0][0, -1].detach().double()

    core.norm.register_forward_pre_hook(partial(keep, "last"))
    for k, layer in enumerate(core.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(partial(keep, f"z{k}"))
        layer.mlp.down_proj.register_forward_pre_hook(partial(keep, f"n{k}"))
    with torch.no_grad():
        logits = module(torch.tensor([IDS])).logits[0, -1]
    expected = float(logits[ANSWER] - logits[OTHER])
    assert np.isclose(data["logit"].item(), expected, atol=1e-5)
    mean_square = seen["last"].square().mean() + core.norm.variance_epsilon
    word = module.lm_head.weight[ANSWER] - module.lm_head.weight[OTHER]
    direction = word.double() * core.norm.weight.double() / mean_square.sqrt()
    embedding = core.embed_tokens.weight[IDS[-1]].double() @ direction
    assert np.isclose(data["embedding"].item(), embedding.item(), atol=1e-7)
    neurons = {}
    for k, layer in enumerate(core.layers):
        of_layer = data.sel(layer=k + 1)
        channels = direction @ layer.self_attn.o_proj.weight.double() * seen[f"z{k}"]
        heads = channels.view(4, 16).sum(1).detach()
        np.testing.assert_allclose(of_layer["attn_head"], heads, atol=1e-7)
        effects = direction @ layer.mlp.down_proj.weight.double() * seen[f"n{k}"]
        assert np.isclose(of_layer["mlp"].item(), effects.sum().item(), atol=1e-6)
        for index, effect in enumerate(effects.tolist()):
            neurons[k + 1, index] = effect
    strongest = sorted(neurons, key=lambda place: -abs(neurons[place]))[:20]
    places = zip(data["neuron_layer"].values, data["neuron_index"].values, strict=True)
    assert list(places) == strongest
    values = [neurons[place] for place in strongest]
    np.testing.assert_allclose(data["neuron"], values, rtol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gptj", "t5"])
def test_removing_a_part_takes_away_what_it_adds(family: str) -> None:
    """The norm keeps the scale that it has for the whole state."""
    module = module_of(family)
    if family == "gpt2":
        with torch.no_grad():
            # The tiny model's biases are small; these cannot be overlooked.
            for block in module.transformer.h:
                block.attn.c_proj.bias.normal_(0, 0.5)
            module.transformer.ln_f.bias.normal_(0, 0.5)
    model = hs.load((module, None))
    data = hs.contributions(model, IDS, ANSWER).data.isel(step=0)
    stack = "decoder" if family == "t5" else None
    last = Site(3, "", stack)
    parts: dict[Site, float] = {}
    for layer in (1, 2, 3):
        parts[Site(layer, "mlp", stack)] = data["mlp"].sel(layer=layer).item()
        for head in range(4):
            added = data["attn_head"].sel(layer=layer, head=head).item()
            parts[Site(layer, f"attn.head.{head}", stack)] = added
    states: Any = hs.record(model, IDS, [last, *parts]).states
    unembedding = Unembedding(model)
    norm = freeze_norm(unembedding, states[last][-1:])
    weight, bias = unembedding.word_rows([ANSWER])

    def logit(state: Tensor) -> float:
        state = state.double()
        if norm.centred:
            state = state - state.mean()
        return float(weight[0] @ (norm.factor[0] * state + norm.bias))

    whole = logit(states[last][-1])
    assert np.isclose(whole + float(bias[0]), data["logit"].item(), atol=1e-5)
    for site, added in parts.items():
        rest = logit(states[last][-1] - states[site][-1])
        assert np.isclose(whole - rest, added, atol=1e-5), site
    if family == "gpt2":
        for block, added in zip(module.transformer.h, data["attn_bias"], strict=True):
            rest = logit(states[last][-1] - block.attn.c_proj.bias.detach())
            assert np.isclose(whole - rest, added, atol=1e-5)
        norm_bias = weight[0] @ module.transformer.ln_f.bias.double()
        assert np.isclose(data["norm_bias"].item(), norm_bias.item(), atol=1e-7)


def test_each_token_follows_those_before_it_and_is_compared_where_answers_part() -> (
    None
):
    model = loaded("llama")
    both = hs.contributions(model, IDS, [ANSWER, OTHER])
    second = hs.contributions(model, [*IDS, ANSWER], OTHER)
    for name in ("attn_head", "mlp", "embedding", "total", "probability"):
        one, other = both.data[name].isel(step=1), second.data[name].isel(step=0)
        np.testing.assert_allclose(one, other, atol=1e-5)
    parted = hs.contributions(model, IDS, [ANSWER, OTHER, 30], [ANSWER, 20])
    alone = hs.contributions(model, [*IDS, ANSWER], OTHER, 20)
    of_other = hs.contributions(model, [*IDS, ANSWER], 20).data["mlp"]
    for name in ("attn_head", "mlp"):
        np.testing.assert_allclose(parted.data[name], alone.data[name], atol=1e-6)
    difference = second.data["mlp"] - of_other
    np.testing.assert_allclose(alone.data["mlp"], difference, atol=1e-12)
    assert "first tokens that differ" in parted.facts["notes"][0]


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
