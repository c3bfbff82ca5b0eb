"""Heads, neurons and routers: found by behaviour, right or refused with a reason."""

import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.discovery import bias_of, find, find_inside
from hiddenscope.errors import SiteError
from hiddenscope.testing import tiny_model

TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
TARGETS = [[4, 5], [6, 7, 8]]
FAMILIES = [
    "gpt2",
    "llama",
    "gemma3_text",
    "qwen3",
    "opt",
    "bloom",
    "gpt_neox",
    "gptj",
    "falcon",
    "mixtral",
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "t5",
    "bart",
]
WITHOUT_HEADS = ["mamba", "deepseek_v4", "fnet", "longformer", "xlnet", "squeezebert"]


def load(family, **options):
    return hs.load((tiny_model(family, **options), None))


def stacks(states):
    if isinstance(states, hs.Pair):
        return [states.encoder, states.decoder]
    return [states]


def options_of(model):
    return {"targets": TARGETS} if model.encoder_decoder else {}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_writes_of_heads_and_the_bias_sum_up_to_attention(family):
    model = load(family)
    patterns = "*.attn,*.attn.z,*.attn.head.*"
    if model.encoder_decoder:
        patterns += ",*.cross,*.cross.z,*.cross.head.*"
    captured = model.capture(TEXTS, patterns, **options_of(model))
    branches = 0
    for states in stacks(captured):
        for whole in states.sites:
            if whole.part not in ("attn", "cross"):
                continue
            branches += 1
            z = states[hs.Site(whole.layer, f"{whole.part}.z", whole.stack)]
            total = bias_of(model.module, model.anatomy.projection(whole), z)
            for site in states.sites:
                if (site.layer, site.kind) == (whole.layer, f"{whole.part}.head"):
                    total = total + states[site]
            torch.testing.assert_close(total, states[whole], rtol=1e-5, atol=1e-5)
    assert branches >= 3


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_neurons_times_the_last_projection_are_what_the_mlp_adds(family):
    model = load(family)
    patterns = "layer.1.mlp,layer.1.mlp.neurons"
    for states in stacks(model.capture(TEXTS, patterns, **options_of(model))):
        mlp, neurons = states.sites[1], states.sites[0]
        projection = model.anatomy.projection(mlp)
        output = model.module.get_submodule(projection.tap.path)(states[neurons])
        if projection.norm:
            output = model.module.get_submodule(projection.norm)(output)
        torch.testing.assert_close(output, states[mlp], rtol=1e-5, atol=1e-5)


def test_one_neuron_writes_its_column_of_the_last_projection():
    model = load("llama")
    states = model.capture(TEXTS, "layer.2.mlp.neurons,layer.2.mlp.neuron.7")
    column = model.module.model.layers[1].mlp.down_proj.weight[:, 7]
    expected = states["layer.2.mlp.neurons"][:, 7:8] * column
    torch.testing.assert_close(states["layer.2.mlp.neuron.7"], expected)


KNOWN = {
    "llama": "model.layers.1.self_attn.o_proj",
    "gpt2": "transformer.h.1.attn.c_proj",
}


@pytest.mark.parametrize("family", KNOWN)
def test_z_of_known_classes_is_what_enters_their_output_projection(family):
    model = load(family)
    inputs = []
    projection = model.module.get_submodule(KNOWN[family])
    handle = projection.register_forward_pre_hook(
        lambda part, args: inputs.append(args[0][0].clone())
    )
    with torch.no_grad():
        model.module(torch.tensor(TEXTS[:1]))
    handle.remove()
    z = model.capture(TEXTS[:1], "layer.2.attn.z")["layer.2.attn.z"]
    assert torch.equal(z, inputs[0])


def test_queries_and_keys_are_those_after_rotary_positions():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = load("llama")
    block = model.module.model.layers[1]
    states = model.capture(
        TEXTS[:1], "layer.1,layer.2.attn.q,layer.2.attn.k,layer.2.attn.v"
    )
    heads = model.module.config.num_attention_heads
    with torch.no_grad():
        normed = block.input_layernorm(states["layer.1"])[None]
        attention = block.self_attn
        query = attention.q_proj(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
        key = attention.k_proj(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
        positions = torch.arange(len(TEXTS[0]))[None]
        cos, sin = model.module.model.rotary_emb(normed, positions)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        value = attention.v_proj(normed)[0]
    expected = {"q": query, "k": key}
    for name, tensor in expected.items():
        rows = tensor[0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(states[f"layer.2.attn.{name}"], rows)
    torch.testing.assert_close(states["layer.2.attn.v"], value)


def test_grouped_keys_and_values_are_shown_once_for_each_group():
    model = load("falcon")
    states = model.capture(TEXTS, "layer.1.attn.q,layer.1.attn.k,layer.1.attn.v")
    assert states["layer.1.attn.q"].shape[1] == 64
    assert states["layer.1.attn.k"].shape[1] == 16
    assert states["layer.1.attn.v"].shape[1] == 16


def test_keys_that_are_all_zero_are_not_taken_for_shared_ones():
    module = tiny_model("gpt2")
    width = module.config.n_embd
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_attn.weight[:, width : 2 * width] = 0
            block.attn.c_attn.bias[width : 2 * width] = 0
    states = hs.load((module, None)).capture(TEXTS, "layer.1.attn.k")
    assert states["layer.1.attn.k"].shape[1] == width


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "bloom", "bart", "mixtral"])
def test_a_padded_text_has_the_inner_states_that_it_has_alone(family):
    model = load(family)
    patterns = "*.attn.q,*.attn.k,*.attn.v,*.attn.z,*.attn.head.1"
    options = options_of(model)
    together = stacks(model.capture(TEXTS, patterns, **options))
    for text, ids in enumerate(TEXTS):
        if options:
            options = {"targets": TARGETS[text : text + 1]}
        alone = stacks(model.capture([ids], patterns, **options))
        for many, one in zip(together, alone, strict=True):
            for site in one.sites:
                torch.testing.assert_close(
                    many.of(text)[site], one[site], rtol=1e-5, atol=1e-5
                )


def test_a_router_gives_probabilities_over_the_experts():
    model = load("mixtral")
    states = model.capture(TEXTS, "*.router")
    assert states.values.shape == (3, 10, 4)
    torch.testing.assert_close(states.values.sum(-1), torch.ones(3, 10))


@pytest.mark.parametrize("family", WITHOUT_HEADS)
def test_a_family_without_heads_is_refused_with_its_reason(family):
    model = load(family)
    with pytest.raises(SiteError, match=r"not shown inside: .{20}"):
        model.capture([[5, 6, 7, 8, 9, 10, 11, 12]], "*.attn.head.*")


def test_the_mlp_of_experts_has_no_neurons_and_says_why():
    with pytest.raises(SiteError, match="do not add up"):
        load("mixtral").capture(TEXTS, "*.mlp.neurons")


def test_an_mlp_without_experts_has_no_router_and_says_why():
    with pytest.raises(SiteError, match="no softmax over experts"):
        load("llama").capture(TEXTS, "layer.1.router")


def test_a_head_beyond_the_last_is_refused_with_their_number():
    with pytest.raises(SiteError, match="4 heads there, counted from 0"):
        load("llama").capture(TEXTS, "layer.2.attn.head.4")


def test_keys_of_cross_attention_are_refused_as_rows_of_the_encoder():
    with pytest.raises(SiteError, match="encoder's tokens"):
        load("t5").capture(TEXTS, "decoder.layer.1.cross.k", targets=TARGETS)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_either_kernel_shows_the_same_heads(kernel):
    module = tiny_model("llama")
    expected = hs.load((module, None)).capture(TEXTS, "*.attn.q,*.attn.k,*.attn.z")
    module.set_attn_implementation(kernel)
    states = hs.load((module, None)).capture(TEXTS, "*.attn.q,*.attn.k,*.attn.z")
    torch.testing.assert_close(states.values, expected.values, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_is_changed_after_loading_is_found_again():
    model = load("llama")
    before = model.capture(TEXTS, "layer.2.attn.q").values
    model.module.set_attn_implementation("eager")
    after = model.capture(TEXTS, "layer.2.attn.q").values
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bloom"])
def test_heads_are_proved_in_other_dtypes(family, dtype):
    module = tiny_model(family).to(dtype)
    states = hs.load((module, None)).capture(
        TEXTS, "layer.1.attn.z,layer.1.attn.head.0"
    )
    assert states["layer.1.attn.head.0"].dtype == dtype


class _Gated(nn.Module):
    """An output projection whose inputs another module has multiplied by a gate."""

    def __init__(self, projection):
        super().__init__()
        self.projection = projection

    def forward(self, states):
        return self.projection(states * torch.linspace(0.5, 2, states.shape[-1]))


def test_a_projection_that_hides_a_gate_is_still_linear_in_its_input():
    module = tiny_model("llama")
    attention = module.model.layers[1].self_attn
    attention.o_proj = _Gated(attention.o_proj)
    model = hs.load((module, None))
    states = model.capture(TEXTS, "layer.2.attn,layer.2.attn.head.*")
    total = sum(states[f"layer.2.attn.head.{head}"] for head in range(4))
    torch.testing.assert_close(total, states["layer.2.attn"], rtol=1e-5, atol=1e-5)


class _Nonlinear(nn.Module):
    def __init__(self, projection):
        super().__init__()
        self.projection = projection

    def forward(self, states):
        return self.projection(states.tanh())


def test_heads_before_a_map_of_single_numbers_still_add_up():
    module = tiny_model("llama")
    attention = module.model.layers[1].self_attn
    attention.o_proj = _Nonlinear(attention.o_proj)
    states = hs.load((module, None)).capture(TEXTS, "layer.2.attn,layer.2.attn.head.*")
    total = sum(states[f"layer.2.attn.head.{head}"] for head in range(4))
    torch.testing.assert_close(total, states["layer.2.attn"], rtol=1e-5, atol=1e-5)


class _Mixing(nn.Module):
    """A norm over all heads before the output projection, as BitNet has it."""

    def __init__(self, projection):
        super().__init__()
        self.projection = projection

    def forward(self, states):
        return self.projection(states / states.norm(dim=-1, keepdim=True))


def test_heads_that_a_norm_mixes_are_refused():
    module = tiny_model("llama")
    attention = module.model.layers[1].self_attn
    attention.o_proj = _Mixing(attention.o_proj)
    with pytest.raises(SiteError, match="not a pattern times values|do not add up"):
        hs.load((module, None)).capture(TEXTS, "layer.2.attn.head.0")


def test_what_is_inside_is_remembered_for_a_folder(tmp_path, monkeypatch):
    module = tiny_model("llama")
    module.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "cache"))
    first = hs.load(tmp_path / "model")
    expected = first.capture(TEXTS, "*.attn.z").values
    second = hs.load(tmp_path / "model")
    assert torch.equal(second.capture(TEXTS, "*.attn.z").values, expected)
    assert second.trials.recalled("inside")


def test_finding_changes_nothing_of_the_users_module():
    module = tiny_model("llama")
    anatomy = find(module)
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    find_inside(module, anatomy)
    for part in module.modules():
        assert "forward" not in vars(part)
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    for name, weight in module.named_parameters():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_is_inside_is_read_back_from_the_disk_as_it_was(family):
    from hiddenscope.discovery import Inside
    from hiddenscope.modules.trials import _decoded, _encoded

    inside = load(family).anatomy.inside
    assert _decoded(_encoded(inside), Inside) == inside


class _Scaled(nn.Module):
    """A scale of each channel after a projection, as LayerScale is."""

    def __init__(self, projection):
        super().__init__()
        self.projection = projection
        self.scale = _Scale()

    def forward(self, states):
        return self.scale(self.projection(states))


class _Scale(nn.Module):
    def forward(self, states):
        return states * torch.linspace(0.5, 2, states.shape[-1])


def test_neurons_are_not_the_channels_before_a_scale():
    module = tiny_model("gpt2")
    mlp = module.transformer.h[1].mlp
    mlp.c_proj = _Scaled(mlp.c_proj)
    states = hs.load((module, None)).capture(TEXTS, "layer.2.mlp.neurons")
    assert states.values.shape[-1] == 256


def test_a_head_that_writes_to_few_channels_is_a_head():
    """Its own channels by number are no sign that the projection is a scale."""
    module = tiny_model("gpt2")
    width = module.config.n_embd
    third = width // 3
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_proj.weight[:third, third:] = 0
    model = hs.load((module, None))
    states = model.capture(TEXTS, "*.attn.head.*")
    heads = module.config.n_layer * module.config.n_head
    assert states.values.shape[0] == heads


def test_a_router_of_chosen_experts_alone_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    module = transformers.GptOssForCausalLM(config).eval()
    model = hs.load((module, None))
    with pytest.raises(SiteError, match="chosen experts alone"):
        model.capture(TEXTS, "layer.1.router")
    assert model.capture(TEXTS, "layer.1.attn.head.*").values.shape[0] == 4


def test_a_part_of_another_kind_is_looked_into_again():
    model = load("llama")
    model.capture(TEXTS, "layer.2.attn.z")
    attention = model.module.model.layers[1].self_attn
    attention.o_proj = _Mixing(attention.o_proj)
    with pytest.raises(SiteError, match="not a pattern times values|do not add up"):
        model.capture(TEXTS, "layer.2.attn.z")
