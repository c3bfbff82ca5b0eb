"""What explains a difference: quantisation, an adapter, other weights, or code."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli.main import app
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views.kinds.drift import tables

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")

TEXTS = [[*range(5, 20)], [*range(30, 43)]]
SCHEMES = ["int8", "fp8", "bnb-int8", "nf4", "fp4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    made = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(made)  # type: ignore[operator]
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantisation_explains_what_it_does(folder: Path, scheme: str) -> None:
    reference, candidate = hs.load(folder), hs.load(hs.Quantised(folder, scheme))
    result = hs.drift(reference, candidate, TEXTS)
    facts = result.facts
    assert facts["drifted"] and facts["explained_by"] == "quantisation"
    assert facts["unexplained"] is None and facts["module"] is None
    assert len(facts["changed_weights"]) == 21
    consequences = facts["consequences"]
    assert 0 < consequences["kl_mean"] <= consequences["kl_max"]
    assert 0 <= consequences["top1_changed"] <= consequences["of"] == 28
    assert "quantisation and not a fault of code" in result.summary()
    (table,) = tables(result)
    assert table.title == "What quantisation costs, layer by layer"
    assert result.source["candidate"]["quantisation"] == candidate.source().quantisation


def test_the_layers_and_tokens_that_moved_are_those_of_the_data(folder: Path) -> None:
    result = hs.drift(hs.load(folder), hs.load(hs.Quantised(folder, "nf4")), TEXTS)
    layers, tokens = result.facts["moved_layers"], result.facts["moved_tokens"]
    for layer in layers:
        local = result.data["local"].sel(site=layer["site"]).values
        assert layer["local"] == pytest.approx(float(np.median(local)), rel=1e-5)
        assert layer["largest"] == pytest.approx(float(local.max()), rel=1e-5)
    sizes = [layer["local"] for layer in layers]
    assert sizes == sorted(sizes, reverse=True) and len(layers) == 4
    divergences = [token["kl"] for token in tokens]
    assert divergences == sorted(divergences, reverse=True)
    largest = result.facts["consequences"]["kl_max"]
    assert divergences[0] == pytest.approx(largest)


def eps(module: Any) -> None:
    module.model.layers[1].input_layernorm.variance_epsilon = 0.01


def scale(module: Any) -> None:
    module.model.layers[1].self_attn.scaling *= 1.05


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fault", [eps, scale])
def test_a_fault_of_code_is_not_taken_for_quantisation(
    folder: Path, scheme: str, fault: Any
) -> None:
    candidate = hs.load(hs.Quantised(folder, scheme))
    fault(candidate.module)
    result = hs.drift(hs.load(folder), candidate, TEXTS)
    facts = result.facts
    assert facts["explained_by"] is None
    assert facts["unexplained"]["site"] == "layer.2"
    assert "The fault is in code" in result.summary()
    if fault is eps:
        assert facts["module"] == "model.layers.1.input_layernorm"
        assert "norm_eps" in {hint["fault"] for hint in facts["hints"]}
    elif scheme != "bnb-int8":
        assert facts["module"] == "model.layers.1.self_attn"
    else:
        assert facts["module"] is None, "rounded inputs hide the part"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_in_the_wrong_order_are_not_taken_for_quantisation(
    folder: Path, scheme: str
) -> None:
    candidate = hs.load(hs.Quantised(folder, scheme))
    layers: Any = candidate.module.model.layers  # type: ignore[union-attr]
    layers[1], layers[2] = layers[2], layers[1]
    facts = hs.drift(hs.load(folder), candidate, TEXTS).facts
    assert facts["explained_by"] == "weights"
    assert facts["unexplained"]["site"] == "layer.2"
    assert facts["module"] == "model.layers.1"


def test_a_scaled_weight_is_not_taken_for_quantisation(
    folder: Path, tmp_path: Path
) -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight.mul_(1.03)
    module.save_pretrained(tmp_path)
    candidate = hs.load(hs.Quantised(tmp_path, "int8"))
    facts = hs.drift(hs.load(folder), candidate, TEXTS).facts
    assert facts["explained_by"] == "weights"
    assert facts["module"] == "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("scheme", ["bnb-int8", "nf4"])
def test_weights_that_are_kept_the_other_way_round(tmp_path: Path, scheme: str) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)  # type: ignore[operator]
    candidate = hs.load(hs.Quantised(tmp_path, scheme))
    facts = hs.drift(hs.load(tmp_path), candidate, TEXTS).facts
    assert facts["explained_by"] == "quantisation"
    assert max(weight["relative"] for weight in facts["changed_weights"]) < 0.15


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_families(tmp_path: Path, family: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)  # type: ignore[operator]
    candidate = hs.load(hs.Quantised(tmp_path, "int8"))
    facts = hs.drift(hs.load(tmp_path), candidate, TEXTS).facts
    assert facts["explained_by"] == "quantisation"


def test_a_quantised_model_does_not_drift_from_itself(folder: Path) -> None:
    for scheme in SCHEMES:
        candidate = hs.load(hs.Quantised(folder, scheme))
        facts = hs.drift(candidate, hs.load(hs.Quantised(folder, scheme)), TEXTS).facts
        assert not facts["drifted"] and facts["explained_by"] is None


def test_the_reference_may_be_the_quantised_side(folder: Path) -> None:
    reference = hs.load(hs.Quantised(folder, "nf4"))
    facts = hs.drift(reference, hs.load(folder), TEXTS).facts
    assert facts["explained_by"] == "quantisation"


def test_other_weights_and_fewer_digits_are_told_apart() -> None:
    module: Any = tiny_model("llama")
    scaled, rounded = copy.deepcopy(module), copy.deepcopy(module)
    part = rounded.model.layers[1].mlp
    with torch.no_grad():
        scaled.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        for weight in part.parameters():
            weight.copy_(weight.bfloat16().float())
    expected = {"weights": scaled, "dtype": rounded}
    for name, candidate in expected.items():
        facts = hs.drift((module, None), candidate, TEXTS).facts
        assert facts["drifted"] and facts["explained_by"] == name
    in_bfloat16 = copy.deepcopy(module).bfloat16()
    facts = hs.drift((module, None), in_bfloat16, TEXTS).facts
    assert not facts["drifted"] and facts["explained_by"] == "dtype"


def test_a_fault_of_code_alone_is_explained_by_nothing() -> None:
    module: Any = tiny_model("llama")
    faulty = copy.deepcopy(module)
    scale(faulty)
    facts = hs.drift((module, None), faulty, TEXTS).facts
    assert facts["drifted"] and facts["explained_by"] is None
    assert facts["module"] == "model.layers.1.self_attn"


def test_an_adapter_explains_what_it_does(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
    plain, adapted = hs.load(folder), hs.load(hs.Adapted(folder, tmp_path))
    merged = hs.load(hs.Adapted(folder, tmp_path, merged=True))
    for pair, expected in (
        ((plain, adapted), "adapter"),
        ((adapted, plain), "adapter"),
        ((plain, merged), "weights"),
    ):
        facts = hs.drift(*pair, TEXTS).facts
        assert facts["drifted"] and facts["explained_by"] == expected
    faulty = hs.load(hs.Adapted(folder, tmp_path))
    scale(faulty.module.base_model.model)
    facts = hs.drift(plain, faulty, TEXTS).facts
    assert facts["explained_by"] is None
    assert facts["unexplained"]["site"] == "layer.2"


def test_the_command_shows_the_layers_and_tells_of_drift(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path)
    name = str(tmp_path)
    asked = CliRunner().invoke(
        app, ["drift", name, "the cat", "--model", name, "--candidate-quantise", "int8"]
    )
    assert asked.exit_code == 1, asked.output
    assert "What quantisation costs, layer by layer" in asked.stdout
    told = CliRunner().invoke(app, ["drift", "--help"]).stdout
    assert "also where quantisation" in " ".join(told.split())
    unknown = CliRunner().invoke(
        app, ["drift", name, "the cat", "--model", name, "--candidate-quantise", "int3"]
    )
    assert unknown.exit_code == 2 and "No scheme" in str(unknown.output)
