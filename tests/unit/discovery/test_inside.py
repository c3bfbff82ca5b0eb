"""Heads, neurons and routers: found by behaviour, right or refused with a reason."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hiddenscope as hs
from hiddenscope.discovery import Inside, Write
from hiddenscope.errors import SiteError
from hiddenscope.modules.trials import Memory
from hiddenscope.testing import build, tiny_model
from labs.fuzz import folders

TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
TARGETS = [[4, 5], [6, 7, 8]]
FAMILIES = [
    *("gpt2", "llama", "gemma3_text", "qwen3", "opt", "bloom", "gpt_neox", "gptj"),
    *("falcon", "mixtral", "bert", "roberta", "distilbert", "albert", "t5", "bart"),
]
WITHOUT_HEADS = ["mamba", "deepseek_v4", "fnet", "longformer", "xlnet", "squeezebert"]
close = torch.testing.assert_close
NEAR = {"rtol": 1e-5, "atol": 1e-5}


@cache
def load(family):
    """Load a tiny model once; no test may change it."""
    return hs.load((tiny_model(family), None))


def stacks(states):
    if isinstance(states, hs.Pair):
        return [states.encoder, states.decoder]
    return [states]


def options_of(model):
    return {"targets": TARGETS} if model.encoder_decoder else {}


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_and_the_bias_sum_up_to_attention_and_neurons_to_the_mlp(family):
    model = load(family)
    patterns = "*.attn,*.attn.z,*.attn.head.*,layer.1.mlp"
    if model.encoder_decoder:
        patterns += ",*.cross,*.cross.z,*.cross.head.*"
    if family != "mixtral":
        patterns += ",layer.1.mlp.neurons"
    branches = 0
    for states in stacks(model.capture(TEXTS, patterns, **options_of(model))):
        for whole in states.sites:
            if whole.part not in ("attn", "cross"):
                continue
            branches += 1
            z = states[hs.Site(whole.layer, f"{whole.part}.z", whole.stack)]
            projection = model.anatomy.projection(whole)
            total = Write(model.module, projection, slice(None)).bias(z)
            for site in states.sites:
                if (site.layer, site.kind) == (whole.layer, f"{whole.part}.head"):
                    total = total + states[site]
            close(total, states[whole], **NEAR)
        if family == "mixtral":
            continue
        (mlp,) = [site for site in states.sites if site.part == "mlp"]
        neurons = hs.Site(1, "mlp.neurons", mlp.stack)
        projection = model.anatomy.projection(mlp)
        output = model.module.get_submodule(projection.tap.path)(states[neurons])
        if projection.norm:
            output = model.module.get_submodule(projection.norm)(output)
        close(output, states[mlp], **NEAR)
    assert branches >= 3


def test_one_neuron_writes_its_column_of_the_last_projection():
    model = load("llama")
    states = model.capture(TEXTS, "layer.2.mlp.neurons,layer.2.mlp.neuron.7")
    column = model.module.model.layers[1].mlp.down_proj.weight[:, 7]
    expected = states["layer.2.mlp.neurons"][:, 7:8] * column
    close(states["layer.2.mlp.neuron.7"], expected)


# The norm before the MLP, of the middle of the block; where there is none, the MLP
# takes the middle as it is.
NORMS = {
    "gpt2": ("transformer.h.1.ln_2", "transformer.h.1.mlp"),
    "llama": ("model.layers.1.post_attention_layernorm", "model.layers.1.mlp"),
    "gemma3_text": ("model.layers.1.pre_feedforward_layernorm", "model.layers.1.mlp"),
    "opt": ("model.decoder.layers.1.final_layer_norm", ""),
    "bloom": ("transformer.h.1.post_attention_layernorm", ""),
    "gpt_neox": ("gpt_neox.layers.1.post_attention_layernorm", "gpt_neox.layers.1.mlp"),
    "gptj": ("transformer.h.1.ln_1", "transformer.h.1.mlp"),
    "mixtral": ("model.layers.1.post_attention_layernorm", "model.layers.1.mlp"),
    "bert": ("", ""),
    "distilbert": ("", "distilbert.transformer.layer.1.ffn"),
}


@pytest.mark.parametrize("family", NORMS)
def test_the_input_of_the_mlp_is_its_norm_of_the_middle_and_makes_what_it_adds(family):
    model = load(family)
    norm, mlp = NORMS[family]
    # A whole batch: the kernels of a product differ by its size.
    states = model.capture([TEXTS[0]], "layer.2.mid,layer.2.mlp.input,layer.2.mlp")
    rows = states["layer.2.mid"][None]
    if norm:
        rows = model.module.get_submodule(norm)(rows)
    assert torch.equal(states["layer.2.mlp.input"], rows[0])
    if mlp:
        output = model.module.get_submodule(mlp)(rows)
        if family == "gemma3_text":
            after = model.module.model.layers[1].post_feedforward_layernorm
            output = after(output)
        assert torch.equal(states["layer.2.mlp"], output[0])


@pytest.mark.parametrize("family", ["gptj", "falcon", "opt", "bloom", "t5", "mixtral"])
def test_the_input_of_the_mlp_changes_what_it_adds_and_nothing_before(family):
    model = load(family)
    stack = "encoder." if model.encoder_decoder else ""
    sites = [f"{stack}layer.2.{part}" for part in ("attn", "mid", "mlp")]
    before = stacks(model.capture(TEXTS, sites, **options_of(model)))[0]
    changes = {f"{stack}layer.2.mlp.input": hs.Scale(0.0, tokens=1)}
    edited = hs.edit(model, TEXTS, changes, sites, **options_of(model))
    after = stacks(edited.states)[0]
    for site in sites[:2]:
        assert torch.equal(before[site], after[site])
    moved = (before[sites[2]] != after[sites[2]]).any(-1).nonzero().flatten()
    assert moved.tolist() == [1, len(TEXTS[0]) + 1]


class Joined(nn.Module):
    """An MLP that also adds something else: what `other` makes of its input, or kept."""

    def __init__(self, mlp, other):
        super().__init__()
        self.mlp, self.other = mlp, other

    def forward(self, states):
        return self.mlp(states) + self.other(states)


class Keeping(nn.Module):
    """A norm that keeps what it made, and hands it out when it is called as a part."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.output = norm, []

    def forward(self, states):
        self.output[:] = [self.norm(states)]
        return self.output[0]

    def again(self, states):
        return self.output[0]


def test_an_mlp_that_reads_the_stream_and_its_norm_takes_in_the_stream():
    module = tiny_model("llama")
    for block in module.model.layers:
        normed = nn.Sequential(block.post_attention_layernorm, block.mlp)
        block.mlp = Joined(block.mlp, normed)
        block.post_attention_layernorm = nn.Identity()
    model = hs.load((module, None))
    states = model.capture(TEXTS, "layer.1.mid,layer.1.mlp.input")
    assert torch.equal(states["layer.1.mid"], states["layer.1.mlp.input"])


class Gated(nn.Module):
    """A norm with a gate of its output, as AXK2 has it."""

    def __init__(self, norm, width):
        super().__init__()
        self.norm, self.gate = norm, nn.Linear(width, width)

    def forward(self, states):
        normed = self.norm(states)
        return normed * self.gate(normed).sigmoid()


def test_the_input_of_the_mlp_is_what_a_norm_with_a_gate_gives():
    module = tiny_model("llama")
    for block in module.model.layers:
        norm = block.post_attention_layernorm
        block.post_attention_layernorm = Gated(norm, module.config.hidden_size)
    model = hs.load((module, None))
    states = model.capture([TEXTS[0]], "layer.1.mid,layer.1.mlp.input")
    norm = module.model.layers[0].post_attention_layernorm
    expected = norm(states["layer.1.mid"][None])[0]
    assert torch.equal(states["layer.1.mlp.input"], expected)


def test_an_mlp_that_more_than_one_state_decides_has_no_input():
    module = tiny_model("llama")
    for block in module.model.layers:
        block.input_layernorm = Keeping(block.input_layernorm)
        block.mlp = Joined(block.mlp, block.input_layernorm.again)
    model = hs.load((module, None))
    reason = "mlp of block 1 .* decides by itself what it adds"
    with pytest.raises(SiteError, match=reason):
        model.capture(TEXTS, "layer.1.mlp.input")


def test_queries_and_keys_are_those_after_rotary_positions_and_z_is_what_they_make():
    model = load("llama")
    block = model.module.model.layers[1]
    parts = ",".join(f"layer.2.attn.{name}" for name in "qkvz")
    states = model.capture(TEXTS[:1], f"layer.1,{parts}")
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
    for name, tensor in (("q", query), ("k", key)):
        rows = tensor[0].transpose(0, 1).flatten(1)
        close(states[f"layer.2.attn.{name}"], rows)
    close(states["layer.2.attn.v"], value)
    values = value.unflatten(-1, (heads, -1)).transpose(0, 1)[None]
    z = functional.scaled_dot_product_attention(query, key, values, is_causal=True)
    close(states["layer.2.attn.z"], z[0].transpose(0, 1).flatten(1))


def test_grouped_keys_and_values_are_shown_once_for_each_group():
    patterns = "layer.1.attn.q,layer.1.attn.k,layer.1.attn.v"
    states = load("falcon").capture(TEXTS, patterns)
    widths = [states[f"layer.1.attn.{name}"].shape[1] for name in "qkv"]
    assert widths == [64, 16, 16]


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
    patterns = "*.attn.q,*.attn.k,*.attn.v,*.attn.z,*.attn.head.1,*.mlp.input"
    options = options_of(model)
    together = stacks(model.capture(TEXTS, patterns, **options))
    for text, ids in enumerate(TEXTS):
        if options:
            options = {"targets": TARGETS[text : text + 1]}
        alone = stacks(model.capture([ids], patterns, **options))
        for many, one in zip(together, alone, strict=True):
            for site in one.sites:
                close(many.of(text)[site], one[site], **NEAR)


def test_a_router_gives_probabilities_over_the_experts():
    states = load("mixtral").capture(TEXTS, "*.router")
    assert states.values.shape == (3, 10, 4)
    close(states.values.sum(-1), torch.ones(3, 10))


@pytest.mark.parametrize(
    ("family", "pattern", "reason"),
    [
        *(
            (family, "*.attn.head.*", "not shown inside: .{20}")
            for family in WITHOUT_HEADS
        ),
        ("mixtral", "*.mlp.neurons", "do not add up"),
        ("llama", "layer.1.router", "no softmax over experts"),
        ("mamba", "layer.1.mlp.input", "output of one part only"),
        ("llama", "layer.2.attn.head.4", "4 heads there, counted from 0"),
        ("t5", "decoder.layer.1.cross.k", "encoder's tokens"),
    ],
)
def test_what_is_not_inside_is_refused_with_its_reason(family, pattern, reason):
    model = load(family)
    with pytest.raises(SiteError, match=reason):
        model.capture([[5, 6, 7, 8, 9, 10, 11, 12]], pattern, **options_of(model))


@pytest.mark.parametrize("family", ["Gemma4TextModel", "XmodModel"])
@pytest.mark.parametrize("site", ["layer.1.cross", "layer.1.mlp"])
def test_a_block_that_adds_a_third_part_has_no_mlp_and_no_cross_attention(family, site):
    row = next(row for row in folders.rows() if row["model_class"] == family)
    model = hs.load((build(row), None))
    with pytest.raises(SiteError, match="a third part after attention and the MLP"):
        model.capture(TEXTS, site)


def test_either_kernel_shows_the_same_heads_also_if_it_is_changed_after_loading():
    patterns = "*.attn.q,*.attn.k,*.attn.z"
    model = hs.load((tiny_model("llama"), None))
    expected = model.capture(TEXTS, patterns).values
    model.module.set_attn_implementation("eager")
    close(model.capture(TEXTS, patterns).values, expected, **NEAR)
    eager = hs.load((model.module, None))
    close(eager.capture(TEXTS, patterns).values, expected, **NEAR)


DTYPES = {
    "llama": torch.bfloat16,
    "gemma3_text": torch.float16,
    "bloom": torch.bfloat16,
    "gpt2": torch.float64,
}


@pytest.mark.parametrize("family", DTYPES)
def test_heads_are_proved_in_other_dtypes(family):
    dtype = DTYPES[family]
    model = hs.load((tiny_model(family).to(dtype), None))
    states = model.capture(TEXTS, "layer.1.attn.z,layer.1.attn.head.0")
    assert states["layer.1.attn.head.0"].dtype == dtype


def with_attention(attend):
    """Load a GPT-2 whose own code attends; `attend` gets [text, token, head, dim]."""

    def forward(self, states, *_, **__):
        heads = (*states.shape[:2], self.num_heads, self.head_dim)
        operands = self.c_attn(states).split(states.shape[-1], -1)
        z = attend(*(operand.view(heads) for operand in operands))
        return self.c_proj(z.flatten(2)), None

    module = tiny_model("gpt2")
    for block in module.transformer.h:
        kind = type(block.attn)
        block.attn.__class__ = type("Own", (kind,), {"forward": forward})
    return hs.load((module, None))


def pattern_of(scores):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scale = load("gpt2").module.transformer.h[0].attn.head_dim ** -0.5
    return (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def einsum_by_heads(q, k, v):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    pattern = pattern_of(torch.einsum("bhqd,bhkd->bhqk", q, k))
    return torch.einsum("b h q k, b h k d -> b h q d", pattern, v).transpose(1, 2)


def einsum_by_tokens(q, k, v):
    pattern = pattern_of(torch.einsum("bqhd,bkhd->bhqk", [q, k]))
    return torch.einsum("bhqk,bkhd->bqhd", pattern, v)


@pytest.mark.parametrize("attend", [einsum_by_heads, einsum_by_tokens])
def test_an_einsum_shows_the_heads_that_a_product_shows(attend):
    model, inner = with_attention(attend), "layer.1.attn.q,*.attn.k,*.attn.v"
    expected, states = (side.capture(TEXTS, inner) for side in (load("gpt2"), model))
    for site in states.sites:
        close(states[site], expected[site], **NEAR)
    changes = {"layer.2.attn.v": hs.Replace(0.5), "layer.1.attn.q": hs.Replace(0.1)}
    patterns, changed = [], []
    for side in (load("gpt2"), model):
        pattern = hs.attention(side, TEXTS[0]).data["pattern"]
        patterns.append(torch.tensor(pattern.values))
        changed.append(hs.edit(side, TEXTS, changes, "final").states["final"])
    close(*patterns, **NEAR)
    close(*changed, **NEAR)


def einsum_with_dots(q, k, v):
    pattern = pattern_of(torch.einsum("bqhd,bkhd->bhqk", q, k))
    return torch.einsum("...hqk,...khd->...qhd", pattern, v)


def by_groups(q, k, v):
    groups = zip(*(part.transpose(1, 2).chunk(2, 1) for part in (q, k, v)), strict=True)
    attend = functional.scaled_dot_product_attention
    pieces = [attend(*group, is_causal=True) for group in groups]
    return torch.cat(pieces, 1).transpose(1, 2)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (einsum_with_dots, "in a form that is not understood"),
        (by_groups, "a piece of what enters"),
        (
            lambda *parts: 1.5 * einsum_by_tokens(*parts),
            "changes its result afterwards",
        ),
    ],
)
def test_attention_that_cannot_be_read_is_refused_with_the_true_reason(attend, reason):
    with pytest.raises(SiteError, match=reason):
        with_attention(attend).capture(TEXTS, "layer.1.attn.z")


class Wrapped(nn.Module):
    """A projection with a function before it."""

    def __init__(self, projection, before):
        super().__init__()
        self.projection, self.before = projection, before

    def forward(self, states):
        return self.projection(self.before(states))


def scale(states):
    return states * torch.linspace(0.5, 2, states.shape[-1])


def norm(states):
    """Mix all heads, as BitNet does before its output projection."""
    return states / states.norm(dim=-1, keepdim=True)


def with_wrapped_projection(before):
    module = tiny_model("llama")
    attention = module.model.layers[1].self_attn
    attention.o_proj = Wrapped(attention.o_proj, before)
    return module


@pytest.mark.parametrize("before", [scale, torch.tanh])
def test_heads_before_a_map_of_single_numbers_still_add_up(before):
    model = hs.load((with_wrapped_projection(before), None))
    states = model.capture(TEXTS, "layer.2.attn,layer.2.attn.head.*")
    total = sum(states[f"layer.2.attn.head.{head}"] for head in range(4))
    close(total, states["layer.2.attn"], **NEAR)


def test_heads_that_a_norm_mixes_are_refused_also_if_it_is_put_there_later():
    mixed = "not a pattern times values|do not add up"
    with pytest.raises(SiteError, match=mixed):
        hs.load((with_wrapped_projection(norm), None)).capture(
            TEXTS, "layer.2.attn.head.0"
        )
    model = hs.load((tiny_model("llama"), None))
    model.capture(TEXTS, "layer.2.attn.z")
    attention = model.module.model.layers[1].self_attn
    attention.o_proj = Wrapped(attention.o_proj, norm)
    with pytest.raises(SiteError, match=mixed):
        model.capture(TEXTS, "layer.2.attn.z")


class Scaled(nn.Module):
    """A part of its own that scales each channel, as LayerScale does."""

    def forward(self, states):
        return scale(states)


def test_neurons_are_not_the_channels_before_a_scale():
    module = tiny_model("gpt2")
    mlp = module.transformer.h[1].mlp
    mlp.c_proj = nn.Sequential(mlp.c_proj, Scaled()).eval()
    states = hs.load((module, None)).capture(TEXTS, "layer.2.mlp.neurons")
    assert states.values.shape[-1] == 256


def test_a_head_that_writes_to_few_channels_is_a_head():
    """Its own channels by number are no sign that the projection is a scale."""
    module = tiny_model("gpt2")
    third = module.config.n_embd // 3
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_proj.weight[:third, third:] = 0
    states = hs.load((module, None)).capture(TEXTS, "*.attn.head.*")
    assert states.values.shape[0] == module.config.n_layer * module.config.n_head


def test_what_is_inside_is_remembered_for_a_folder(tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "cache"))
    first = hs.load(tmp_path / "model")
    expected = first.capture(TEXTS, "*.attn.z").values
    second = hs.load(tmp_path / "model")
    assert torch.equal(second.capture(TEXTS, "*.attn.z").values, expected)
    assert second.trials.recalled("inside")
    for family in ("llama", "mixtral"):
        inside = load(family).anatomy.inside
        memory = Memory(tmp_path, family)
        memory.keep("inside", inside)
        assert memory.recall("inside", Inside) == inside


def test_a_router_of_chosen_experts_alone_is_refused():
    rows = folders.rows()
    row = next(row for row in rows if row["model_class"] == "GptOssForCausalLM")
    model = hs.load((build(row), None))
    with pytest.raises(SiteError, match="chosen experts alone"):
        model.capture(TEXTS, "layer.1.router")
    assert model.capture(TEXTS, "layer.1.attn.head.*").values.shape[0] == 4
