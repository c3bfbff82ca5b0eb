"""States of other engines against their reference, and the mix-ups of their layers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli.main import app
from hiddenscope.errors import StatesError
from hiddenscope.results import findings_of
from hiddenscope.testing import tiny_model

TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]


@cache
def model() -> hs.Model:
    return hs.load((tiny_model("llama", layers=4), None))


@cache
def values_of(sites: str) -> Tensor:
    values: Tensor = model().capture(TEXTS, sites).values
    return values


def result_of(values: Tensor, names: list[Any]) -> hs.Result:
    """Compare states that an engine saved under some names."""
    states = hs.States.read(values, tokens=TEXTS, sites=names, source="engine")
    return hs.drift(model(), states, TEXTS)


def faults(result: hs.Result) -> list[str]:
    return [hint["fault"] for hint in result.facts["hints"]]


def garbage(rows: Tensor) -> Tensor:
    """Other rows of about the same size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows.shape, generator=generator) * rows.std()


MIXED_UP = {
    "residual_apart": ("*.mlp", [1, 2, 3, 4]),
    "residual_alone": ("*.mid", [1, 2, 3, 4]),
    "layer_offset": ("layer.2-4", [1, 2, 3]),
    "layer_offset below": ("layer.0-3", [1, 2, 3, 4]),
    "final_norm": ("layer.1-3,final", [1, 2, 3, 4]),
    "final_norm before": ("layer.3,layer.4", [3, "final"]),
}


@pytest.mark.parametrize("case", MIXED_UP)
def test_a_mix_up_is_named_if_every_token_fits_it(case: str) -> None:
    sites, names = MIXED_UP[case]
    values = values_of(sites)
    result = result_of(values, names)
    assert result.facts["drifted"]
    assert faults(result) == [case.split()[0]]
    evidence = result.facts["hints"][0]["evidence"]
    assert "This is no drift" in evidence
    assert evidence in " ".join(findings_of(result))
    broken, tokens = values.clone(), [0, 7, 8, 9]
    broken[:, tokens] = garbage(broken[:, tokens])
    result = result_of(broken, names)
    assert result.facts["drifted"] and faults(result) == []


def test_a_mix_up_says_which_layers_it_leaves() -> None:
    for fault, layer, left in (
        ("final_norm", 0, "layer.1"),
        ("layer_offset", -1, "layer.3"),
        ("residual_apart", 1, "layer.2"),
    ):
        sites, names = MIXED_UP[fault]
        values = values_of(sites).clone()
        values[layer] = garbage(values[layer])
        result = result_of(values, names)
        assert faults(result) == [fault]
        evidence = result.facts["hints"][0]["evidence"]
        assert "no drift" not in evidence
        assert f"does not explain {left}, " in evidence
        assert left not in evidence.partition(" the saved states")[0]


def test_centred_states_are_named() -> None:
    values = values_of("layer.1-4") + 0.5
    centred = values - values.mean(-1, keepdim=True)
    result = result_of(centred, [1, 2, 3, 4])
    assert faults(result) == ["centred"]
    assert any("mean zero" in note for note in result.facts["notes"])


def test_what_is_no_mix_up_is_called_none() -> None:
    layers, names = values_of("layer.1-4"), [1, 2, 3, 4]
    assert not result_of(layers, names).facts["drifted"]
    # No block makes layer 0, so that it has no parts to be taken for.
    embeddings = values_of("layer.0-2").clone()
    embeddings[0] += 1
    shifted = values_of("layer.2-4")
    for values, sites, first in (
        (embeddings, [0, 1, 2], "layer.0"),
        (layers + 0.1 * garbage(layers), names, "layer.1"),
        # A small error beside a mix-up is not explained away.
        (shifted + 1e-3 * garbage(shifted), [1, 2, 3], "layer.1"),
    ):
        result = result_of(values, sites)
        assert result.facts["first_site"] == first
        assert faults(result) == []


def vllm_file(path: Path, sites: str) -> dict[str, Tensor]:
    captured = model().capture(TEXTS[:1], sites)
    tensors = {
        "hidden_states": captured.values.movedim(0, 1).contiguous(),
        "token_ids": torch.tensor(TEXTS[0]),
    }
    save_file(tensors, path)
    return tensors


def test_the_layers_of_a_file_are_proved(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    vllm_file(path, "layer.1,layer.3,layer.4")
    result = hs.drift(model(), path, None)
    assert not result.facts["drifted"]
    assert result.data["site"].to_numpy().tolist() == ["layer.1", "layer.3", "layer.4"]
    assert any("does not say which layers" in note for note in result.facts["notes"])


def test_layers_that_cannot_be_proved_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    tensors = vllm_file(path, "layer.1-2")
    with pytest.raises(StatesError, match="no model can prove it"):
        hs.drift(path, path, None)
    hidden = tensors["hidden_states"]
    for name, values, words in (
        ("noisy", garbage(hidden), r"hs\.States\.read"),
        ("narrow", hidden[..., :8].contiguous(), "8 wide"),
    ):
        save_file(
            {**tensors, "hidden_states": values}, tmp_path / f"{name}.safetensors"
        )
        with pytest.raises(StatesError, match=words):
            hs.drift(model(), tmp_path / f"{name}.safetensors", None)


def test_other_texts_widths_and_layers_are_refused() -> None:
    values = values_of("layer.1-2")
    states = hs.States.read(values, tokens=TEXTS, sites=[1, 2])
    with pytest.raises(StatesError, match="of other texts"):
        hs.drift(model(), states, [[1, 2, 3]])
    with pytest.raises(StatesError, match="8 in the other"):
        result_of(values[..., :8], [1, 2])
    with pytest.raises(StatesError, match="Nothing to compare"):
        result_of(values, [40, 41])


def test_the_command_takes_a_file_of_another_program(tmp_path: Path) -> None:
    folder, path = str(tmp_path / "model"), str(tmp_path / "request.safetensors")
    model().module.save_pretrained(folder)  # type: ignore[operator]
    vllm_file(Path(path), "layer.1,layer.3")
    finished = CliRunner().invoke(app, ["drift", path, "--model", folder])
    assert finished.exit_code == 0, finished.output
    assert "layer.1" in finished.stdout


def test_the_command_refuses_a_bad_file_before_it_loads_a_model(tmp_path: Path) -> None:
    hidden, path = torch.ones(3, 2, 4), tmp_path / "bad.safetensors"
    apart = {
        "hidden_states": hidden,
        "residual": hidden.clone(),
        "token_ids": torch.arange(3),
    }
    for tensors, message in (
        ({"weight": torch.ones(3, 4)}, "nothing says which tokens"),
        (apart, "keeps the residual apart"),
    ):
        save_file(tensors, path)
        command = ["drift", str(path), "--model", "nowhere"]
        finished = CliRunner().invoke(app, command)
        assert finished.exit_code == 2
        assert message in " ".join(finished.output.split())
