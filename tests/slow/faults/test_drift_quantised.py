"""Quantisation by real libraries explains what it does, and hides no fault of code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli.main import app
from hiddenscope.results import tables_of
from hiddenscope.testing import tiny_model, tiny_tokenizer

pytest.importorskip("torchao")
bitsandbytes = pytest.importorskip("bitsandbytes")

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
    assert "quantisation and not a fault of code" in result.summary()
    (table,) = tables_of(result)
    assert table.title == "What quantisation costs, layer by layer"
    assert result.source["candidate"]["quantisation"] == candidate.source().quantisation
    same = hs.load(hs.Quantised(folder, scheme))
    facts = hs.drift(candidate, same, TEXTS).facts
    assert not facts["drifted"] and facts["explained_by"] is None


def eps(module: Any) -> None:
    module.model.layers[1].input_layernorm.variance_epsilon = 0.01


def scale(module: Any) -> None:
    module.model.layers[1].self_attn.scaling *= 1.05


def swap(module: Any) -> None:
    layers = module.model.layers
    layers[1], layers[2] = layers[2], layers[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fault_is_not_taken_for_quantisation(folder: Path, scheme: str) -> None:
    def result_of(fault: Any) -> hs.Result:
        candidate = hs.load(hs.Quantised(folder, scheme))
        fault(candidate.module)
        result = hs.drift(hs.load(folder), candidate, TEXTS)
        assert result.facts["unexplained"]["site"] == "layer.2"
        return result

    for fault in (eps, scale):
        result = result_of(fault)
        assert result.facts["explained_by"] is None
        assert "The fault is in code" in result.summary()
        if fault is eps:
            assert result.facts["module"] == "model.layers.1.input_layernorm"
            assert "norm_eps" in {hint["fault"] for hint in result.facts["hints"]}
        elif scheme != "bnb-int8":
            assert result.facts["module"] == "model.layers.1.self_attn"
        else:
            assert result.facts["module"] is None, "rounded inputs hide the part"
    facts = result_of(swap).facts
    assert facts["explained_by"] == "weights" and facts["module"] == "model.layers.1"


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("gpt2", "bnb-int8"), ("gpt2", "nf4"), ("bert", "int8"), ("t5", "int8")],
)
def test_other_families_and_weights_that_are_kept_the_other_way_round(
    tmp_path: Path, family: str, scheme: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)  # type: ignore[operator]
    candidate = hs.load(hs.Quantised(tmp_path, scheme))
    for sides in ((hs.load(tmp_path), candidate), (candidate, hs.load(tmp_path))):
        facts = hs.drift(*sides, TEXTS).facts
        assert facts["explained_by"] == "quantisation"
        assert max(weight["relative"] for weight in facts["changed_weights"]) < 0.15


@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_a_width_across_blocks_of_scales_is_no_fault_of_code(
    tmp_path: Path, scheme: str
) -> None:
    """On some processors bitsandbytes multiplies by the scale of a block beside."""
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    candidate = hs.load(hs.Quantised(tmp_path, scheme))
    facts = hs.drift(hs.load(tmp_path), candidate, TEXTS).facts
    part: Any = candidate.module.get_submodule("model.layers.0.mlp.down_proj")
    state = part.weight.quant_state
    codes = torch.stack([part.weight >> 4, part.weight & 15], -1).view(-1, 64)
    numbers = (state.code[codes.long()] * state.absmax[:, None]).view(64, 96)
    is_right = torch.allclose(
        bitsandbytes.functional.dequantize_4bit(part.weight, state), numbers
    )
    assert facts["explained_by"] == ("quantisation" if is_right else "weights")
    assert any("neighbouring block" in note for note in facts["notes"]) != is_right
    if not is_right:
        assert facts["module"] == "model.layers.0.mlp.down_proj"


def test_the_command_shows_the_layers_and_tells_of_drift(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path)
    name = str(tmp_path)
    command = ["drift", name, "the cat", "--model", name, "--candidate-quantise"]
    asked = CliRunner().invoke(app, [*command, "int8"])
    assert asked.exit_code == 1, asked.output
    assert "What quantisation costs, layer by layer" in asked.stdout
    unknown = CliRunner().invoke(app, [*command, "int3"])
    assert unknown.exit_code == 2 and "No scheme" in str(unknown.output)
