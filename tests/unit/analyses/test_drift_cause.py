"""What explains a difference: quantisation, an adapter, other weights, or code.

Weights are rounded by hand here; tests/slow/faults has the libraries that pack them.
"""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.analyses.drift import cause
from hiddenscope.results import tables_of
from hiddenscope.testing import tiny_model

TEXTS = [[*range(5, 20)], [*range(30, 43)]]


@cache
def llama() -> hs.Model:
    return hs.load((tiny_model("llama"), None))


class Rounded(NamedTuple):
    """A weight that was rounded to eight bits, in full width."""

    full_name: str
    numbers: Tensor
    scheme: str = "by-hand int8"
    is_misread: bool = False

    def unpack(self) -> Tensor:
        return self.numbers


def rounded_weights(module: nn.Module) -> Iterator[Rounded]:
    for path, part in module.named_modules():
        if hasattr(part, "is_rounded"):
            yield Rounded(f"{path}.weight", part.weight.detach())  # type: ignore[arg-type]


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the model with every projection rounded to eight bits by rows."""
    monkeypatch.setattr(cause, "quantised_weights", rounded_weights)
    module: Any = copy.deepcopy(llama().module)
    for part in module.model.layers.modules():
        if isinstance(part, nn.Linear):
            step = part.weight.data.abs().amax(1, keepdim=True) / 127
            part.weight.data = (part.weight.data / step).round() * step
            part.is_rounded = True  # type: ignore[assignment]
    return module


def test_quantisation_explains_what_it_does(quantised: Any) -> None:
    result = hs.drift(llama(), quantised, TEXTS)
    facts = result.facts
    assert facts["drifted"] and facts["explained_by"] == "quantisation"
    assert facts["unexplained"] is None and facts["module"] is None
    assert len(facts["changed_weights"]) == 21
    consequences = facts["consequences"]
    assert 0 < consequences["kl_mean"] <= consequences["kl_max"]
    assert 0 <= consequences["top1_changed"] <= consequences["of"] == 28
    assert "quantisation and not a fault of code" in result.summary()
    (table,) = tables_of(result)
    assert table.title == "What quantisation costs, layer by layer"
    layers, tokens = facts["moved_layers"], facts["moved_tokens"]
    for layer in layers:
        local = result.data["local"].sel(site=layer["site"]).values
        assert layer["local"] == pytest.approx(float(np.median(local)), rel=1e-5)
        assert layer["largest"] == pytest.approx(float(local.max()), rel=1e-5)
    sizes = [layer["local"] for layer in layers]
    assert sizes == sorted(sizes, reverse=True) and len(layers) == 4
    divergences = [token["kl"] for token in tokens]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[0] == pytest.approx(consequences["kl_max"])


def test_a_fault_of_code_is_not_taken_for_quantisation(quantised: Any) -> None:
    quantised.model.layers[1].input_layernorm.variance_epsilon = 0.01
    result = hs.drift(llama(), quantised, TEXTS)
    facts = result.facts
    assert facts["explained_by"] is None
    assert facts["unexplained"]["site"] == "layer.2"
    assert facts["module"] == "model.layers.1.input_layernorm"
    assert "norm_eps" in {hint["fault"] for hint in facts["hints"]}
    assert "The fault is in code" in result.summary()


def test_other_weights_are_not_taken_for_quantisation(quantised: Any) -> None:
    scaled = copy.deepcopy(quantised)
    scaled.model.layers[1].mlp.up_proj.weight.data.mul_(1.03)
    facts = hs.drift(llama(), scaled, TEXTS[:1]).facts
    assert facts["explained_by"] == "weights"
    assert facts["module"] == "model.layers.1.mlp.up_proj"
    layers = quantised.model.layers
    layers[1], layers[2] = layers[2], layers[1]
    result = hs.drift(llama(), quantised, TEXTS[:1])
    facts = result.facts
    assert facts["explained_by"] == "weights"
    assert "which rounding cannot do" in result.summary()
    assert "with the candidate's own weights" not in result.summary()
    assert facts["unexplained"]["site"] == "layer.2"
    assert facts["module"] == "model.layers.1"


def test_a_fault_of_code_is_found_behind_other_weights(quantised: Any) -> None:
    layers = quantised.model.layers
    layers[1].mlp.up_proj.weight.data.mul_(1.03)
    layers[2].input_layernorm.variance_epsilon = 0.01
    facts = hs.drift(llama(), quantised, TEXTS[:1]).facts
    assert facts["explained_by"] is None
    assert facts["unexplained"]["site"] == "layer.3"
    assert facts["module"] == "model.layers.2.input_layernorm"


def test_other_weights_fewer_digits_and_code_are_told_apart() -> None:
    scaled, rounded, faulty = (copy.deepcopy(llama().module) for _ in range(3))
    with torch.no_grad():
        scaled.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        for weight in rounded.model.layers[1].mlp.parameters():
            weight.copy_(weight.bfloat16().float())
    faulty.model.layers[1].self_attn.scaling *= 1.05
    both = copy.deepcopy(faulty)
    both.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)
    for name, candidate in (
        ("weights", scaled),
        ("dtype", rounded),
        (None, both),
        (None, faulty),
    ):
        facts = hs.drift(llama(), candidate, TEXTS[:1]).facts
        assert facts["drifted"] and facts["explained_by"] == name
    assert facts["module"] == "model.layers.1.self_attn"


def test_a_part_in_fewer_digits_is_named() -> None:
    narrow = copy.deepcopy(llama().module)
    up = narrow.model.layers[1].mlp.up_proj.bfloat16()
    up.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    up.register_forward_hook(lambda _, args, output: output.float())
    facts = hs.drift(llama(), narrow, TEXTS[:1]).facts
    assert facts["drifted"] and facts["explained_by"] is None
    assert facts["module"] == "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[hs.Model, hs.Model]:
    """The model with an adapter, beside it and merged into its weights."""
    peft = pytest.importorskip("peft")
    base, lora = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("lora")
    llama().module.save_pretrained(base)  # type: ignore[operator]
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(tiny_model("llama"), config).save_pretrained(lora)
    merged = hs.load(hs.Adapted(base, lora, merged=True))
    return hs.load(hs.Adapted(base, lora)), merged


def test_an_adapter_explains_what_it_does(adapted: tuple[Any, hs.Model]) -> None:
    beside, merged = adapted
    for pair, expected in (
        ((llama(), beside), "adapter"),
        ((beside, llama()), "adapter"),
        ((llama(), merged), "weights"),
    ):
        result = hs.drift(*pair, TEXTS[:1])
        facts = result.facts
        assert facts["drifted"] and facts["explained_by"] == expected
        told = "This is an adapter and not a fault of code" in result.summary()
        assert told == (expected == "adapter")
    beside.module.base_model.model.model.layers[1].self_attn.scaling *= 1.05
    facts = hs.drift(llama(), beside, TEXTS[:1]).facts
    assert facts["explained_by"] is None
    assert facts["unexplained"]["site"] == "layer.2"
