"""Drift: faults planted by hand are found where they are, and harmless changes are
none.
"""

import copy
import dataclasses
import importlib.util
import itertools
import json
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hiddenscope as hs
from faults.ports import PORTS
from hiddenscope.analyses.drift.baseline import FORMAT, read_baseline, write_baseline
from hiddenscope.analyses.drift.calls import ModuleCall
from hiddenscope.analyses.drift.dtypes import stored_dtype
from hiddenscope.analyses.drift.noise import Gap, Noise, gap
from hiddenscope.analyses.drift.search import Search
from hiddenscope.analyses.drift.sides import as_live, encode
from hiddenscope.cli.main import app
from hiddenscope.errors import FileError, ModuleError, NotFinite, StatesError, TextError
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Grid, Lines
from tests.places import ROOT
from tests.slices import THOROUGH, long, sliced

TEXTS = [
    [5, 6, 7, 9, 30, 41, 17],
    [50, 60, 70, 80],
    [33, 12, 8, 100, 101, 99, 7, 5, 4, 11],
]
FAMILIES = ["gpt2", "llama", "gemma3_text", "bert", "t5", "mixtral", "mamba", "albert"]
Plant = Callable[[Any], object]


@cache
def reference(family: str) -> hs.Model:
    module: Any = tiny_model(family)
    if family == "t5":
        module.config.decoder_start_token_id = 0
    return hs.load((module, None))


def port(family: str) -> Any:
    return copy.deepcopy(reference(family).module)


def facts_of(family: str, plant: Plant) -> Any:
    candidate = port(family)
    plant(candidate)
    return hs.drift(reference(family), candidate, TEXTS).facts


def rolled(path: str) -> Plant:
    def plant(module: nn.Module) -> None:
        weight = module.get_submodule(path).weight
        weight.data = weight.data.roll(1, 0)  # type: ignore[union-attr, operator]

    return plant


def scaled(path: str, by: float = 1.01) -> Plant:
    return lambda module: module.get_submodule(path).weight.data.mul_(by)


def put(path: str, name: str, value: Any) -> Plant:
    return lambda module: setattr(module.get_submodule(path), name, value)


def calling(path: str, make: Callable[[Any], Callable[..., Any]]) -> Plant:
    """Another forward in the place of a module's own."""

    def plant(module: nn.Module) -> None:
        part = module.get_submodule(path)
        part.__dict__["forward"] = make(part.forward)

    return plant


def swapped(module: Any) -> None:
    blocks = module.model.layers
    blocks[1], blocks[2] = blocks[2], blocks[1]


def in_bfloat16(module: Any) -> None:
    for weight in module.model.layers[1].parameters():
        weight.data = weight.data.bfloat16().float()


def expert(module: Any) -> Any:
    return module.model.layers[1].mlp.experts


def hides_first_token(module: nn.Module) -> None:
    def hide(_: nn.Module, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[:, 0] = 0
        return args, {**kwargs, "attention_mask": mask}

    module.register_forward_pre_hook(hide, with_kwargs=True)


def half_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(input_ids: Any = None, **more: Any) -> Any:
        more["position_ids"] = 2 * torch.arange(input_ids.shape[1])[None]
        return forward(input_ids=input_ids, **more)

    return call


B, G = "model.layers.1", "transformer.h.1"
VALUE, CROSS = (
    "bert.encoder.layer.1.attention.self.value",
    "decoder.block.1.layer.1.EncDecAttention.k",
)
POST, BIAS = (
    f"{B}.post_attention_layernorm",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
)
GROUP = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
FAULTS: list[tuple[str, Plant, str, str]] = [
    ("llama", rolled(f"{B}.self_attn.q_proj"), "layer.2", f"{B}.self_attn.q_proj"),
    ("llama", put(f"{B}.input_layernorm", "variance_epsilon", 1e-5), "layer.2", f"{B}.input_layernorm"),
    ("llama", put(POST, "variance_epsilon", 1e-5), "layer.2", POST),
    ("llama", put(f"{B}.self_attn", "scaling", 0.2525), "layer.2", f"{B}.self_attn"),
    ("llama", put(f"{B}.mlp", "act_fn", nn.GELU().eval()), "layer.2", f"{B}.mlp.act_fn"),
    ("llama", lambda module: module.model.rotary_emb.inv_freq.mul_(0.99), "layer.1", "model.rotary_emb"),
    ("llama", swapped, "layer.2", B),
    ("llama", in_bfloat16, "layer.2", B),
    ("llama", calling(B, lambda forward: lambda state, *args, **kwargs: state), "layer.2", B),
    ("llama", calling(B, lambda forward: lambda h, *a, **k: forward(forward(h, *a, **k), *a, **k)), "layer.2", B),
    ("llama", calling("model.norm", lambda forward: lambda state: forward(forward(state))), "final", "model.norm"),
    ("llama", calling("model", half_steps), "layer.1", "model"),
    ("llama", hides_first_token, "layer.1", ""),
    ("llama", scaled("lm_head"), "logits", "lm_head"),
    ("llama", lambda module: module.model.embed_tokens.weight.data[8].mul_(1.01), "layer.0", "model.embed_tokens"),
    ("gpt2", put(f"{G}.mlp", "act", nn.GELU().eval()), "layer.2", f"{G}.mlp.act"),
    ("gpt2", lambda module: module.transformer.h[1].attn.c_attn.bias.data.zero_(), "layer.2", f"{G}.attn.c_attn"),
    ("gpt2", rolled("transformer.wpe"), "layer.0", "transformer.wpe"),
    ("gpt2", put(f"{G}.ln_1", "eps", 1e-6), "layer.2", f"{G}.ln_1"),
    ("bert", scaled(VALUE), "layer.2", VALUE),
    ("bert", scaled("bert.embeddings.token_type_embeddings"), "layer.0", "bert.embeddings.token_type_embeddings"),
    ("bert", scaled("cls.predictions.transform.dense"), "logits", "cls.predictions.transform.dense"),
    ("t5", rolled(BIAS), "encoder.layer.1", BIAS),
    ("t5", scaled(CROSS), "decoder.layer.2", CROSS),
    ("mixtral", lambda module: expert(module).down_proj.data[1].mul_(1.01), "layer.2", f"{B}.mlp.experts"),
    ("mixtral", rolled(f"{B}.mlp.gate"), "layer.2", f"{B}.mlp.gate"),
    ("gemma3_text", lambda module: module.model.embed_tokens.embed_scale.fill_(1.0), "layer.0", "model.embed_tokens"),
    ("gemma3_text", put(f"{B}.self_attn.q_norm", "eps", 1e-4), "layer.2", f"{B}.self_attn.q_norm"),
    ("albert", scaled(GROUP), "layer.1", GROUP),
    ("mamba", scaled("backbone.layers.1.mixer.x_proj"), "layer.2", "backbone.layers.1.mixer.x_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "plant", "site", "module"), FAULTS)
def test_a_planted_fault_is_found_where_it_is(
    family: str, plant: Plant, site: str, module: str
) -> None:
    facts = facts_of(family, plant)
    assert facts["drifted"] and facts["beyond"] > 1
    assert (facts["first_site"], facts["module"]) == (site, module)


def attention(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """Attention that is given something else."""
    return calling(
        f"{B}.self_attn", lambda forward: lambda **given: forward(**change(given))
    )


def with_tables(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return attention(
        lambda given: {
            **given,
            "position_embeddings": tuple(map(change, given["position_embeddings"])),
        }
    )


def with_mask(seen: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Plant:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        places = torch.arange(given["hidden_states"].shape[1])
        hidden = ~seen(places[:, None], places[None])
        mask = given["attention_mask"]
        real = mask[:, :, -1:] if mask.dtype == torch.bool else mask[:, :, -1:] == 0
        return {**given, "attention_mask": torch.where(real & ~hidden, 0.0, -1e9)}

    return attention(change)


def repeats_in_turn(module: Any) -> None:
    """Key and value heads 0, 1, 0, 1 in the place of 0, 0, 1, 1, by a change of the
    queries and of what comes out.
    """
    part = module.get_submodule(f"{B}.self_attn")
    q, o = part.q_proj, part.o_proj
    order = torch.tensor([0, 2, 1, 3])
    part.forward_of = part.forward

    def forward(**given: Any) -> Any:
        q_weight, o_weight = q.weight.data, o.weight.data
        q.weight.data = q_weight.view(4, 16, -1)[order].reshape(q_weight.shape)
        o.weight.data = o_weight.view(-1, 4, 16)[:, order].reshape(o_weight.shape)
        try:
            return part.forward_of(**given)
        finally:
            q.weight.data, o.weight.data = q_weight, o_weight

    part.forward = forward


def transposed(module: Any) -> None:
    weight = module.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.T.contiguous()


def without_third(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: forward(x).index_fill(1, torch.tensor([2]), 0.0)


def exchanged(module: Any) -> None:
    mlp = module.model.layers[1].mlp
    mlp.up_proj.weight.data, mlp.gate_proj.weight.data = (
        mlp.gate_proj.weight.data,
        mlp.up_proj.weight.data,
    )


SIGNATURES: list[tuple[str, Plant, str]] = [
    ("llama", transposed, "transposed_weight"),
    ("llama", rolled(f"{B}.self_attn.q_proj"), "permuted_weight"),
    ("llama", scaled(f"{B}.mlp.up_proj"), "scaled_weight"),
    ("llama", exchanged, "exchanged_weight"),
    ("llama", in_bfloat16, "rounded_weight"),
    ("gpt2", lambda m: m.transformer.h[1].attn.c_attn.bias.data.zero_(), "missing_bias"),
    ("llama", put(f"{B}.input_layernorm", "variance_epsilon", 1e-5), "norm_eps"),
    ("gpt2", put(f"{G}.ln_1", "eps", 1e-4), "norm_eps"),
    ("gpt2", put(f"{G}.mlp", "act", nn.GELU().eval()), "activation"),
    ("llama", put(f"{B}.self_attn", "scaling", 0.2525), "attribute"),
    ("llama", lambda m: m.model.rotary_emb.inv_freq.copy_(1 / 5000 ** (torch.arange(0, 16, 2) / 16)), "rope_base"),
    ("llama", lambda m: m.model.rotary_emb.inv_freq.mul_(0.5), "rope_scaling"),
    ("llama", with_tables(lambda table: table[..., :8].repeat_interleave(2, -1)), "rope_interleaved"),
    ("llama", with_tables(lambda table: table.roll(-1, -2)), "position_off_by_one"),
    ("llama", with_mask(lambda row, column: column <= row + 1), "mask_looks_ahead"),
    ("llama", with_mask(lambda row, column: (column < row) | (row == 0)), "mask_off_by_one"),
    ("mixtral", repeats_in_turn, "kv_heads"),
    ("llama", swapped, "swapped_layer"),
    ("llama", calling(B, lambda forward: lambda state, *args, **kwargs: state), "layer_skipped"),
    ("llama", calling(B, lambda forward: lambda h, *a, **k: forward(forward(h, *a, **k), *a, **k)), "layer_doubled"),
    ("llama", calling("model.norm", lambda forward: lambda state: forward(forward(state))), "applied_twice"),
    ("llama", calling("model.norm", lambda forward: lambda state: state), "not_applied"),
    ("gemma3_text", lambda m: m.model.embed_tokens.embed_scale.fill_(1.0), "scale"),
    ("llama", calling("model", half_steps), "block_argument"),
    ("llama", calling(f"{B}.self_attn.o_proj", without_third), "zero_rows"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "plant", "fault"), SIGNATURES, ids=[row[2] for row in SIGNATURES]
)
def test_a_fault_is_known_by_its_signature(
    family: str, plant: Plant, fault: str
) -> None:
    facts = facts_of(family, plant)
    assert fault in [hint["fault"] for hint in facts["hints"]], (
        facts["module"],
        facts["hints"],
    )
    assert all(hint["evidence"].endswith(".") for hint in facts["hints"])


def test_states_put_back_restore_the_output() -> None:
    def two(module: Any) -> None:
        scaled("model.layers.0.mlp.up_proj", 1.2)(module)
        scaled("model.layers.2.mlp.up_proj", 1.2)(module)

    one = facts_of("llama", scaled(f"{B}.mlp.up_proj", 1.2))["consequences"]
    assert one["kl_mean"] > 0 and one["restored"] == [
        {"sites": ["layer.2"], "share": pytest.approx(1, abs=1e-6)}
    ]
    parts = facts_of("llama", two)["consequences"]["restored"]
    assert [part["sites"] for part in parts] == [
        ["layer.1"],
        ["layer.3"],
        ["layer.1", "layer.3"],
    ]
    assert parts[0]["share"] < 0.99 and parts[2]["share"] == pytest.approx(1, abs=1e-6)


def eager(module: Any) -> None:
    module.set_attn_implementation("eager")


def reordered(module: Any) -> None:
    """Every linear map in two halves, the second one first: the same maths in another
    order.
    """
    for part in module.modules():
        if type(part) is nn.Linear:
            part.forward = lambda x, p=part: (
                (x[..., 32:] @ p.weight[:, 32:].T + x[..., :32] @ p.weight[:, :32].T)
                + (0 if p.bias is None else p.bias)
            )


HARMLESS: dict[str, Plant] = {
    "same": lambda module: None,
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "float16": lambda module: module.to(torch.float16),
    "float64": lambda module: module.to(torch.float64),
    "eager": eager,
    "eager in bfloat16": lambda module: eager(module.to(torch.bfloat16)),
    "reordered": reordered,
}


@pytest.mark.parametrize(
    ("change", "family"), sliced(list(itertools.product(HARMLESS, FAMILIES)), 19)
)
def test_a_harmless_change_is_no_drift(family: str, change: str) -> None:
    if (family, change) == ("mixtral", "float64"):
        pytest.skip("torch's grouped product knows no float64")
    facts = facts_of(family, HARMLESS[change])
    assert not facts["drifted"], facts["drifting_sites"]
    assert facts["first_site"] is facts["module"] is None


@pytest.mark.parametrize(
    "family", FAMILIES if THOROUGH else ["gpt2", "gemma3_text", "mamba", "albert"]
)
def test_a_reference_with_fewer_digits_than_the_candidate_is_no_drift(
    family: str,
) -> None:
    facts = hs.drift((port(family).to(torch.bfloat16), None), port(family), TEXTS).facts
    assert not facts["drifted"], facts["drifting_sites"]


def test_one_model_in_two_dtypes_is_named_by_them() -> None:
    first, second = (port("llama"), None), (port("llama").to(torch.bfloat16), None)
    title = views_of(hs.drift(first, second, TEXTS))[0].title
    assert "(bfloat16) against" in title and title.endswith("(float32)")


def test_a_module_compiled_in_place_is_compared_by_what_it_returns() -> None:
    compiled, wrapped = port("llama"), torch.compile(port("llama"), backend="eager")
    compiled.compile(backend="eager")
    for candidate in (compiled, wrapped):
        facts = hs.drift(reference("llama"), candidate, TEXTS).facts  # type: ignore[arg-type]
        assert not facts["drifted"] and facts["pairing"]["by"] == "name"
        assert facts["sites"] == 5, "three layers, final and the logits"


def many_texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(5, 100, (length,), generator=generator).tolist()
        for length in lengths
    ]


@pytest.mark.parametrize(
    ("path", "factor"),
    sliced(
        [("mlp.up_proj", 1.02), ("self_attn.v_proj", 1.02), ("input_layernorm", 1.01)],
        1,
    ),
)
def test_a_fault_that_no_token_shows_is_found_over_all_of_them(
    path: str, factor: float
) -> None:
    model = hs.load((tiny_model("llama", layers=3).bfloat16(), None))
    candidate: Any = copy.deepcopy(model.module)
    candidate.model.layers[1].get_submodule(path).weight.data.mul_(factor)
    result = hs.drift(model, candidate, many_texts(60, 70, 80, 90))
    facts = result.facts
    assert facts["beyond"] < 1 < facts["systematic"]["beyond"]
    assert (facts["first_site"], facts["module"]) == (
        "layer.2",
        f"model.layers.1.{path}",
    )
    assert "No token shows it alone" in result.summary()


def test_a_weight_that_no_state_shows_is_named() -> None:
    """Gemma normalises what the MLP returns, so that a factor in its weights is gone
    afterwards.
    """
    model = hs.load((tiny_model("gemma3_text", layers=2).bfloat16(), None))
    candidate: Any = copy.deepcopy(model.module)
    candidate.model.layers[1].mlp.down_proj.weight.data.mul_(1.02)
    result = hs.drift(model, candidate, many_texts(40, 40))
    (weight,) = result.facts["changed_weights"]
    assert weight["name"] == "model.layers.1.mlp.down_proj.weight" and weight[
        "relative"
    ] == pytest.approx(0.02, rel=0.1)
    assert (
        result.facts["drifted"] or "One weight differs all the same" in result.summary()
    )
    assert (
        hs.drift(model, copy.deepcopy(model.module), TEXTS).facts["changed_weights"]
        == []
    )


def test_it_is_said_how_small_a_fault_could_have_been_seen() -> None:
    model = hs.load((tiny_model("llama", layers=2).bfloat16(), None))
    candidate = copy.deepcopy(model.module)
    smallest = hs.drift(model, candidate, many_texts(90, 90)).facts["smallest_fault"]
    assert 0 < smallest["typical"] <= smallest["largest"] < 0.02
    assert hs.drift(model, candidate, many_texts(7)).facts["smallest_fault"] is None


def test_two_kernels_are_compared_on_equal_terms_and_as_they_were_given() -> None:
    model = reference("llama")
    candidate: Any = copy.deepcopy(model.module)
    candidate.set_attn_implementation(
        "eager" if model.module.config._attn_implementation == "sdpa" else "sdpa"
    )  # type: ignore[union-attr]
    result = hs.drift(model, candidate, TEXTS)
    facts = result.facts
    assert not facts["drifted"] and facts["beyond"] == 0 < facts["as_given"]["error"]
    assert facts["as_given"]["error"] == pytest.approx(
        float(result.data["relative"].max()), rel=1e-6
    )
    assert (
        "the same bit for bit" in result.summary()
        and "As they were given" in result.summary()
    )


def test_a_router_that_chooses_otherwise_by_rounding_is_no_drift() -> None:
    """Two experts are nearly as likely at one token, and experts in a loop round
    otherwise than a grouped product.
    """
    layout = PORTS["loop-mixtral"]
    module = layout.reference().bfloat16()
    generator = torch.Generator().manual_seed(3)
    texts = [
        torch.randint(5, 120, (length,), generator=generator).tolist()
        for length in (13, 29, 21)
    ]
    facts = hs.drift((module, None), layout.port(module), texts).facts
    assert not facts["drifted"], (facts["first_site"], facts["beyond"])


def test_two_calls_of_one_module_are_told_apart() -> None:
    """Gemma calls its rotary embedding once for each kind of attention; one of the two
    is wrong.
    """
    facts = facts_of(
        "gemma3_text",
        put("model.rotary_emb", "sliding_attention_attention_scaling", 1.2),
    )
    assert (facts["first_site"], facts["module"]) == ("layer.1", "model.rotary_emb")


def test_local_and_inherited_error_make_up_the_whole() -> None:
    candidate = port("llama")
    scaled(f"{B}.mlp.up_proj", 1.1)(candidate)
    data = hs.drift(reference("llama"), candidate, TEXTS).data
    local, inherited, total = (
        data[name].values for name in ("local", "inherited", "relative")
    )
    sites = data["site"].values.tolist()
    assert (local[sites.index("layer.2")] > 0).all() and (
        inherited[sites.index("layer.2")] == 0
    ).all()
    np.testing.assert_allclose(
        local[sites.index("layer.2")], total[sites.index("layer.2")], rtol=1e-5
    )
    after = sites.index("layer.3")
    assert (local[after:] == 0).all()
    np.testing.assert_allclose(inherited[after], total[after], rtol=1e-5)
    gain = data["gain"].values[after]
    assert gain == pytest.approx(inherited[after].max() / total[after - 1].max())


def test_the_local_error_is_that_of_a_block_called_by_hand() -> None:
    """An oracle that uses no hook of ours: the block called on the reference's own
    hidden states.
    """
    model, candidate = reference("gpt2"), port("gpt2")
    scaled(f"{G}.mlp.c_fc", 1.1)(candidate)
    text = TEXTS[0]
    module: Any = model.module
    with torch.no_grad():
        states = module(torch.tensor([text]), output_hidden_states=True).hidden_states
        mine = candidate.transformer.h[1](states[1])
    mine = mine[0] if isinstance(mine, tuple) else mine
    expected = (mine - states[2])[0].norm(dim=-1) / states[2][0].norm(dim=-1)
    found = hs.drift(model, candidate, [text]).data["local"].sel(site="layer.2").values
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4)


def test_measures_of_whole_passes() -> None:
    candidate = port("llama")
    scaled(f"{B}.mlp.up_proj", 1.5)(candidate)
    result = hs.drift(reference("llama"), candidate, TEXTS)
    one, two = (
        hs.load((module, None)).capture(TEXTS) for module in (port("llama"), candidate)
    )
    for site in one.sites:
        a, b = one[site].double(), two[site].double()
        cell = result.data.sel(site=str(site))
        np.testing.assert_allclose(
            cell["relative"],
            (b - a).norm(dim=-1) / a.norm(dim=-1),
            rtol=1e-5,
            atol=1e-7,
        )
        np.testing.assert_allclose(
            cell["max_abs"], (b - a).abs().amax(-1), rtol=1e-5, atol=1e-7
        )
        np.testing.assert_allclose(
            cell["cosine"], torch.cosine_similarity(a, b, dim=-1), rtol=1e-5
        )
    np.testing.assert_array_equal(result.data["mismatched"].sel(site="layer.1"), 0)
    assert (result.data["mismatched"].sel(site="layer.2") > 0.5).all()


def test_three_passes_of_each_model_and_nothing_is_left_behind(
    hanging: Callable[[nn.Module], Any],
) -> None:
    model, candidate = reference("llama"), port("llama")
    before = hanging(model.module), hanging(candidate)
    weights = [weight.clone() for weight in model.module.parameters()]
    facts = hs.drift(model, candidate, TEXTS).facts
    assert facts["passes"] == {"reference": 2, "candidate": 2}
    assert facts["self_check"] == {"observing_changed_nothing": True}
    assert (hanging(model.module), hanging(candidate)) == before
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights, model.module.parameters(), strict=True)
    )
    narrow = hs.drift(model, port("llama").to(torch.bfloat16), TEXTS).facts
    assert narrow["passes"] == {"reference": 3, "candidate": 2}
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights, model.module.parameters(), strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "mixtral"])
def test_in_low_memory_the_verdict_is_the_same(family: str) -> None:
    path = {"llama": f"{B}.mlp.up_proj", "bert": VALUE, "t5": CROSS}.get(
        family, f"{B}.mlp.gate"
    )
    candidate = port(family)
    scaled(path, 1.1)(candidate)
    whole, streamed = (
        hs.drift(reference(family), candidate, TEXTS, low_memory=low)
        for low in (False, True)
    )
    for key in ("first_site", "module", "beyond", "error", "envelope"):
        assert streamed.facts[key] == whole.facts[key], key
    for name in ("relative", "local", "ulp"):
        np.testing.assert_array_equal(streamed.data[name], whole.data[name])
    assert streamed.facts["passes"] == {"reference": 3, "candidate": 2}
    assert not hs.drift(
        reference(family), reference(family), TEXTS, low_memory=True
    ).facts["drifted"]


def test_low_memory_holds_two_states_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    observing: Any = import_module("hiddenscope.analyses.drift.observe")
    held: set[int] = set()
    most: list[int] = []

    class Counted(observing.ObservedState):  # type: ignore[misc]
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            held.add(id(self))
            most.append(len(held))

        def __del__(self) -> None:
            held.discard(id(self))

    monkeypatch.setattr(observing, "ObservedState", Counted)
    module: Any = tiny_model("llama", layers=8)
    hs.drift((module, None), copy.deepcopy(module), TEXTS, low_memory=True)
    assert len(most) > 8 and max(most) <= 4, (
        "the candidate's, and of the reference one beside it, one on its way, one to"
        " come"
    )


def test_an_error_of_the_reference_is_raised_in_low_memory() -> None:
    module = port("llama")
    model = hs.load((module, None))
    module.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hs.drift(model, port("llama"), TEXTS, low_memory=True)


def test_a_module_that_counts_its_calls_fails_the_self_check() -> None:
    candidate = port("llama")
    calls: list[None] = []

    def drifting(_: nn.Module, __: Any, output: Any) -> Any:
        calls.append(None)
        return output * (1 + 1e-4 * len(calls))

    candidate.lm_head.register_forward_hook(drifting)
    facts = hs.drift(reference("llama"), candidate, TEXTS).facts
    assert facts["self_check"] == {"observing_changed_nothing": False}


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_saved_states_show_the_first_site(family: str, tmp_path: Path) -> None:
    model, candidate = reference(family), port(family)
    path = {
        "llama": f"{B}.mlp.up_proj",
        "bert": "bert.encoder.layer.1.output.dense",
    }.get(family, "encoder.block.1.layer.1.DenseReluDense.wo")
    scaled(path)(candidate)
    targets = TEXTS if family == "t5" else None
    saved = hs.load((candidate, None)).capture(TEXTS, targets=targets)
    saved.save(tmp_path / "run.safetensors")
    facts = hs.drift(model, tmp_path / "run.safetensors", TEXTS).facts
    assert facts["first_site"] == ("encoder.layer.2" if family == "t5" else "layer.2")
    assert facts["module"] is None and facts["compared"] == "passes"
    assert facts["noise"]["made_of"] == ["float64", "kernel_batch_threads"]
    own = model.capture(TEXTS, targets=targets)
    assert hs.drift(own, saved, None).facts["first_site"] == facts["first_site"]
    turned = hs.drift(saved, model, TEXTS).facts
    assert turned["first_site"] == facts["first_site"] and turned["passes"] == {
        "reference": 0,
        "candidate": 3,
    }


# t5 takes as long as all others.
@pytest.mark.parametrize(
    "family", FAMILIES if THOROUGH else ["llama", "bert", "mixtral"]
)
def test_saved_states_of_a_harmless_run_are_no_drift(family: str) -> None:
    targets = TEXTS if family == "t5" else None
    for change, tokens in (
        ("same", 8),
        ("eager", 12),
        ("bfloat16", None),
        ("float16", 20),
    ):
        candidate = port(family)
        HARMLESS[change](candidate)
        saved = hs.load((candidate, None)).capture(
            TEXTS, targets=targets, batch_tokens=tokens
        )
        facts = hs.drift(reference(family), saved, TEXTS).facts
        assert not facts["drifted"], (change, facts["drifting_sites"])


def test_a_baseline_is_written_then_applied(tmp_path: Path) -> None:
    file, candidate = tmp_path / "accepted.json", port("llama")
    scaled(f"{B}.mlp.up_proj", 1.01)(candidate)
    first = hs.drift(reference("llama"), candidate, TEXTS, baseline=file).facts
    assert first["drifted"] and first["baseline"]["written"]
    again = hs.drift(reference("llama"), candidate, TEXTS, baseline=file).facts
    assert not again["drifted"] and not again["baseline"]["written"]
    scaled(f"{B}.mlp.up_proj", 1.03)(candidate)
    assert (
        hs.drift(reference("llama"), candidate, TEXTS, baseline=file).facts[
            "first_site"
        ]
        == "layer.2"
    )
    file.write_text("[]")
    with pytest.raises(FileError, match="damaged or of another kind"):
        hs.drift(reference("llama"), candidate, TEXTS, baseline=file)


def test_a_new_fault_is_looked_for_beside_an_accepted_one(tmp_path: Path) -> None:
    model = reference("llama")
    accepted: Any = copy.deepcopy(model.module)
    accepted.model.layers[0].mlp.up_proj.weight.data.mul_(1.01)
    hs.drift(model, accepted, TEXTS, baseline=tmp_path / "accepted.json")
    candidate = copy.deepcopy(accepted)
    candidate.model.layers[1].self_attn.q_proj.weight.data.mul_(1.5)
    facts = hs.drift(model, candidate, TEXTS, baseline=tmp_path / "accepted.json").facts
    assert (facts["first_site"], facts["module"]) == (
        "layer.2",
        "model.layers.1.self_attn.q_proj",
    )


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    model = reference("llama")
    with pytest.raises(TextError, match="the list is empty"):
        hs.drift(model, port("llama"), [])
    with pytest.raises(StatesError, match="are of other texts"):
        hs.drift(model, model.capture([[5, 6, 8]]), [[5, 6, 7]])
    with pytest.raises(StatesError, match="different texts"):
        hs.drift(model.capture([[5, 6, 8]]), model.capture([[5, 6, 7]]), None)
    with pytest.raises(StatesError, match="Nothing to compare"):
        hs.drift(model, model.capture([[5, 6]], "layer.1.mid"), [[5, 6]])
    with pytest.raises(StatesError, match="No texts"):
        hs.drift(model, port("llama"), None)
    with pytest.raises(ModuleError, match="got int"):
        hs.drift(model, 3, [[5, 6]])  # type: ignore[arg-type]
    other: Any = tiny_tokenizer(bos=False)
    with pytest.raises(TextError, match="Their tokenizers give different ids"):
        hs.drift(
            hs.load((port("llama"), tiny_tokenizer())),
            (port("llama"), other),
            "The rest.",
        )
    with pytest.raises(FileError):
        hs.drift(model, _written(tmp_path / "other.safetensors"), [[5, 6]])


def _written(path: Path) -> Path:
    path.write_bytes(b"nothing of ours")
    return path


def test_a_nan_on_one_side_is_named_by_site_and_token() -> None:
    candidate = port("llama")
    candidate.model.layers[1].register_forward_hook(
        lambda _, __, state: state.masked_fill(
            torch.arange(state.shape[1])[:, None] == 2, torch.nan
        )
    )
    candidate.set_attn_implementation("eager")
    with pytest.raises(
        NotFinite,
        match=r"the candidate has a NaN at layer\.2, token '8' \(text 2, position 2\)",
    ):
        hs.drift(reference("llama"), candidate, TEXTS)


def test_a_nan_of_a_live_model_is_named_beside_saved_states() -> None:
    saved = reference("llama").capture(TEXTS)
    model = hs.load((port("llama"), None))
    with torch.no_grad():
        model.module.get_submodule("model.embed_tokens").weight[30] = torch.nan
    where = r"has a NaN at layer\.0, token '30' \(text 0, position 4\)"
    with pytest.raises(NotFinite, match=f"the reference {where}"):
        hs.drift(model, saved, TEXTS)
    with pytest.raises(NotFinite, match=f"the candidate {where}"):
        hs.drift(saved, model, TEXTS)


def test_an_infinite_error_is_drift_in_any_noise() -> None:
    noise = Noise(torch.tensor([torch.inf, 1.0], dtype=torch.float64), torch.inf)
    error = Gap(torch.tensor([torch.inf, 0.0], dtype=torch.float64), torch.inf)
    assert noise.times_over(error) == torch.inf


def test_tokens_that_both_sides_exclude_agree() -> None:
    logits = torch.tensor([[3.0, -torch.inf, 4.0]])
    difference = torch.tensor([[0.0, 0.0, 0.5]])
    assert gap(logits, logits + difference).rows.tolist() == [0.1]
    assert gap(logits, torch.tensor([[3.0, 0.0, 4.0]])).worst == torch.inf


def test_memory_that_runs_out_blames_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = port("llama")
    scaled(f"{B}.mlp.up_proj")(candidate)
    parts = set(candidate.modules())
    repeat = ModuleCall.repeat

    def fail(call: ModuleCall, module: nn.Module, device: torch.device) -> object:
        if module in parts:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return repeat(call, module, device)

    monkeypatch.setattr(ModuleCall, "repeat", fail)
    with pytest.raises(torch.OutOfMemoryError):
        hs.drift(reference("llama"), candidate, TEXTS)


@pytest.mark.parametrize("run", ["run_exactly", "run_in_float64"])
def test_memory_that_runs_out_in_float64_is_an_error(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: you tried to allocate 9 bytes.")

    monkeypatch.setattr(f"hiddenscope.analyses.drift.observe.{run}", fail)
    with pytest.raises(RuntimeError, match="tried to allocate"):
        hs.drift(reference("llama"), port("llama"), TEXTS)


@cache
def llama_search() -> Search:
    model = as_live(reference("llama"))
    return Search(model, model, encode(reference("llama"), TEXTS[:1]))


def test_complex_tensors_are_compared_by_their_noise() -> None:
    search = llama_search()
    angles = torch.arange(7 * 8, dtype=torch.float64).reshape(1, 7, 8)
    exact = torch.polar(torch.ones_like(angles), angles)
    table = exact.to(torch.complex64)
    rounded = table * (1 + 1e-7)
    for truth in (exact, None):
        assert not search.judge(table, rounded, truth).wrong
        assert not search.judge(table.conj(), rounded.conj(), None).wrong
        assert search.judge(table, table.conj(), truth).wrong
        assert search.judge(table, table.real, truth).wrong


def test_integers_are_compared_by_value_and_masks_are_not() -> None:
    judge = llama_search().judge
    experts = torch.tensor([[2, 0, 5]])
    assert not judge(experts, experts.double(), None).wrong
    assert not judge(experts, experts.int(), None).wrong
    assert judge(experts, experts + 1.0, None).wrong
    assert judge(experts, experts + 1, None).wrong
    mask = torch.tensor([[True, True, False]])
    added = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert not judge(mask, added, None).wrong
    assert not judge(mask.long(), added, None).wrong
    assert judge(mask, ~mask, None).wrong


def test_a_gap_by_hand() -> None:
    one = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    found = gap(one, one + torch.tensor([[0.0, 0.5], [0.0, 0.0]]))
    assert found.rows.tolist() == [0.1, 0.0] and found.channel == 0.125
    assert gap(one, one.clone().fill_(torch.nan)).worst == torch.inf


def test_the_page_says_the_verdict_first() -> None:
    candidate = port("llama")
    scaled(f"{B}.mlp.up_proj")(candidate)
    result = hs.drift(reference("llama"), candidate, TEXTS)
    assert (
        result.summary()
        .splitlines()[1]
        .strip()
        .startswith("Drift: the two first differ at `layer.2`")
    )
    assert [type(view) for view in views_of(result)] == [Grid, Lines]
    assert sections_of(result)[0].title == "Drift"
    same = hs.drift(reference("llama"), port("llama"), TEXTS)
    assert "No drift" in same.summary().splitlines()[1]
    assert sections_of(same)[0].title == "No drift"


def test_the_command_exits_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = port("llama")
    scaled(f"{B}.mlp.up_proj")(candidate)
    models = {"good": port("llama"), "bad": candidate}
    monkeypatch.setattr(
        hs, "load", lambda name, **_: hs.Model(_loaded(models[name or "good"]))
    )
    run = CliRunner().invoke
    assert run(app, ["drift", "good", "The rest.", "--model", "good"]).exit_code == 0
    found = run(app, ["drift", "bad", "The rest.", "--model", "good", "--json"])
    assert found.exit_code == 1
    assert json.loads(found.stdout)["facts"]["module"] == f"{B}.mlp.up_proj"
    hs.Model(_loaded(candidate)).capture("The rest.").save(tmp_path / "run.safetensors")
    saved = run(app, ["drift", str(tmp_path / "run.safetensors"), "--model", "good"])
    assert saved.exit_code == 1 and "layer.2" in saved.stdout
    failed = run(
        app,
        [
            "drift",
            str(tmp_path / "run.safetensors"),
            "Another text.",
            "--model",
            "good",
        ],
    )
    assert failed.exit_code == 2 and "other texts" in failed.output
    cast = run(
        app,
        [
            "drift",
            str(tmp_path / "run.safetensors"),
            "--model",
            "good",
            "--candidate-dtype",
            "bfloat16",
        ],
    )
    assert (
        cast.exit_code == 2
        and "Cannot use --candidate-dtype bfloat16 with saved states" in cast.output
    )
    assert "--dtype sets the model's alone" in " ".join(cast.output.split())
    saved_twice = [
        "drift",
        str(tmp_path / "run.safetensors"),
        "--model",
        str(tmp_path / "run.safetensors"),
    ]
    assert run(app, saved_twice).exit_code == 0
    cast = run(app, [*saved_twice, "--dtype", "bfloat16"])
    assert cast.exit_code == 2 and "both sides were computed already" in " ".join(
        cast.output.split()
    )


def _loaded(module: nn.Module) -> Any:
    from hiddenscope.loading import open_source

    return open_source((module, tiny_tokenizer()))


def plain_llama() -> Any:
    path = ROOT / "examples" / "plain_llama.py"
    spec = importlib.util.spec_from_file_location("plain_llama", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MISTAKES = {
    "": (None, None),
    "interleaved": ("layer.2", "blocks.1.attention"),
    "repeat": ("layer.2", "blocks.1.attention"),
    "eps": ("layer.2", "blocks.1.norm1"),
}


@cache
def grouped_llama() -> hs.Model:
    """A tiny Llama with two key and value heads for four query heads."""
    config = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "head_dim": 16,
    }
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    return hs.load(
        (
            build(
                {
                    "model_class": "LlamaForCausalLM",
                    "config_class": "LlamaConfig",
                    "config": config,
                }
            ),
            None,
        )
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistakes_of_a_plain_port_are_found(mistake: str) -> None:
    model = grouped_llama()
    facts = hs.drift(
        model, plain_llama().PlainLlama(model.module, mistake, block=1).eval(), TEXTS
    ).facts
    assert (facts["first_site"], facts["module"]) == MISTAKES[mistake]
    assert facts["pairing"]["by"] == "blocks" and facts["compared"] == "parts"
    assert facts["pairing"]["pairs"][2] == {
        "site": "layer.2",
        "reference": "output of model.layers.1",
        "candidate": "output of blocks.1",
    }


@pytest.mark.real
@long
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_the_mistakes_of_a_plain_port_of_a_real_model_are_found(
    mistake: str, smollm2: hs.Model
) -> None:
    port = plain_llama().PlainLlama(smollm2.module, mistake, block=1).eval()
    facts = hs.drift(
        smollm2,
        port,
        ["The capital of France is Paris.", "In 1969, people landed on the moon."],
    ).facts
    assert (facts["first_site"], facts["module"]) == MISTAKES[mistake]


def test_a_foreign_program_is_paired_by_table_by_order_and_by_correlation() -> None:
    model = grouped_llama()
    port, other = (
        plain_llama().PlainLlama(model.module).eval(),
        copy.deepcopy(model.module),
    )
    table = {"layer.1": "blocks.0", "layer.2": "blocks.1", "final": "norm"}
    facts = hs.drift(model, port, TEXTS, pairing=table).facts
    assert not facts["drifted"] and facts["pairing"]["by"] == "table"
    with pytest.raises(StatesError, match="No tensor 'blocks.9'"):
        hs.drift(model, port, TEXTS, pairing={"layer.1": "blocks.9"})
    with pytest.raises(StatesError, match="No site 'layer.9'"):
        hs.drift(model, port, TEXTS, pairing={"layer.9": "blocks.0"})

    def states(ids: torch.Tensor) -> Any:
        return other(ids, output_hidden_states=True, use_cache=False).hidden_states  # type: ignore[operator]

    turned = hs.drift(
        model, lambda ids: dict(zip("abcd", states(ids)[::-1], strict=True)), TEXTS
    ).facts
    assert not turned["drifted"] and turned["pairing"]["by"] == "correlation"
    assert {pair["site"]: pair["candidate"] for pair in turned["pairing"]["pairs"]}[
        "layer.1"
    ] == "c"
    scaled("model.layers.1.mlp.up_proj", 1.1)(other)
    named = hs.drift(
        model,
        lambda ids: {f"layer.{k}": one for k, one in enumerate(states(ids)[:3])},
        TEXTS,
    ).facts
    assert (named["first_site"], named["pairing"]["by"], named["compared"]) == (
        "layer.2",
        "name",
        "passes",
    )
    with pytest.raises(StatesError, match="Nothing to compare"):
        hs.drift(model, lambda ids: ids.float(), TEXTS)


def test_saved_states_of_a_checkpoint_in_bfloat16_are_held_against_the_noise_of_their_own_dtype() -> (
    None
):
    """The embeddings of such a checkpoint are bfloat16 numbers; the run is in float32
    all the same.
    """
    module = port("llama").bfloat16().float()
    candidate = copy.deepcopy(module)
    scaled(f"{B}.self_attn.q_proj", 1.002)(candidate)
    model, saved = hs.load((module, None)), hs.load((candidate, None)).capture(TEXTS)
    facts = hs.drift(model, saved, TEXTS).facts
    assert facts["first_site"] == "layer.2" and "dtype" not in facts["noise"]["made_of"]
    narrow = hs.load((copy.deepcopy(module).bfloat16(), None)).capture(TEXTS)
    widened = dataclasses.replace(narrow, values=narrow.values.float())
    for states in (narrow, widened):
        facts = hs.drift(model, states, TEXTS).facts
        assert not facts["drifted"] and "dtype" in facts["noise"]["made_of"]
        assert not hs.drift(model.capture(TEXTS), states, None).facts["drifted"]


def test_a_baseline_is_a_plain_file_of_a_sensible_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "negative").write_text(
        json.dumps({"format": FORMAT, "accepted": {"layer.1": -1}})
    )
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "huge", "deep", "negative", "folder"):
        with pytest.raises(FileError, match="as a baseline"):
            read_baseline(tmp_path / name)
    assert read_baseline(tmp_path / "none") is None
    assert (
        write_baseline(tmp_path / "new", {"layer.1": 0.5, "layer.2": float("inf")}) == 1
    )
    assert read_baseline(tmp_path / "new") == {"layer.1": 0.5}


def saved_in(dtype: torch.dtype, module: Any) -> Any:
    """The module as it comes back from a file in another dtype, computed in its own."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype).to(weight.dtype)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_a_checkpoint_saved_in_fewer_digits_is_no_drift(
    family: str, dtype: torch.dtype
) -> None:
    candidate = saved_in(dtype, port(family))
    before = [weight.clone() for weight in reference(family).module.parameters()]
    facts = hs.drift(reference(family), candidate, TEXTS).facts
    name = str(dtype).removeprefix("torch.")
    assert (
        not facts["drifted"]
        and f"The reference's weights were rounded to {name}" in facts["notes"][0]
    )
    assert all(map(torch.equal, before, reference(family).module.parameters()))


def test_a_checkpoint_saved_in_fewer_digits_keeps_its_faults() -> None:
    candidate = saved_in(torch.bfloat16, port("llama"))
    weight = candidate.model.layers[1].mlp.up_proj.weight
    weight.data = (weight.data * 1.01).bfloat16().float()
    facts = hs.drift(reference("llama"), candidate, TEXTS).facts
    assert (facts["first_site"], facts["module"]) == (
        "layer.2",
        "model.layers.1.mlp.up_proj",
    )


def test_more_digits_than_the_reference_are_no_drift_if_it_was_rounded_from_them() -> (
    None
):
    saved = saved_in(torch.bfloat16, port("llama"))
    candidate = port("llama")
    facts = hs.drift((saved, None), candidate, TEXTS).facts
    assert (
        not facts["drifted"]
        and "Its weights were rounded to bfloat16" in facts["notes"][0]
    )
    candidate.model.layers[1].mlp.up_proj.weight.data.mul_(1.05)
    facts = hs.drift((saved, None), candidate, TEXTS).facts
    assert (facts["first_site"], facts["module"]) == (
        "layer.2",
        "model.layers.1.mlp.up_proj",
    )


def test_other_digits_than_those_that_were_rounded_away_are_drift() -> None:
    saved = saved_in(torch.bfloat16, port("llama"))
    candidate = copy.deepcopy(saved)
    for weight in candidate.parameters():
        weight.data.mul_(1 + 2**-8)
    facts = hs.drift((saved, None), candidate, TEXTS).facts
    assert facts["drifted"] and facts["notes"] == []


def test_the_dtype_that_weights_are_stored_in() -> None:
    module = tiny_model("gpt2")
    assert stored_dtype(module) == torch.float32
    assert stored_dtype(copy.deepcopy(module).bfloat16()) == torch.bfloat16
    assert stored_dtype(saved_in(torch.float16, copy.deepcopy(module))) == torch.float16
    narrow: Any = saved_in(torch.bfloat16, module)
    assert (
        stored_dtype(narrow)
        == stored_dtype(copy.deepcopy(narrow).double())
        == torch.bfloat16
    )
    narrow.lm_head.weight.data[77, 3] = 0.1
    assert stored_dtype(narrow) == torch.float32
    assert stored_dtype(nn.Linear(2, 2, device="meta")) == torch.float32
    assert stored_dtype(nn.GELU()) == torch.float32
