"""States of other engines against their reference, and the mix-ups of their layers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.errors import StatesError
from hiddenscope.testing import tiny_model
from hiddenscope.views.kinds.drift import findings

TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def module(request: Any) -> nn.Module:
    return tiny_model(request.param, layers=4)


@pytest.fixture(scope="module")
def model(module: nn.Module) -> hs.Model:
    return hs.load((module, None))


def saved(model: hs.Model, sites: str, names: list[Any]) -> hs.States:
    captured = model.capture(TEXTS, sites)
    return hs.States.read(captured.values, tokens=TEXTS, sites=names, source="engine")


def faults(result: hs.Result) -> list[str]:
    return [hint["fault"] for hint in result.facts["hints"]]


def test_right_states_do_not_drift(model: hs.Model) -> None:
    states = saved(model, "layer.1-4", [1, 2, 3, 4])
    result = hs.drift(model, states, TEXTS)
    assert not result.facts["drifted"]
    assert faults(result) == []


def test_embeddings_that_differ_are_compared_with_no_part(model: hs.Model) -> None:
    """No block makes layer 0, so that it has no parts to be taken for."""
    captured = model.capture(TEXTS, "layer.0-2").values.clone()
    captured[0] += 1
    states = hs.States.read(captured, tokens=TEXTS, sites=[0, 1, 2], source="engine")
    result = hs.drift(model, states, TEXTS)
    assert result.facts["first_site"] == "layer.0"
    assert faults(result) == []


MIXED_UP = {
    "residual_apart": ("*.mlp", [1, 2, 3, 4]),
    "residual_alone": ("*.mid", [1, 2, 3, 4]),
    "layer_offset": ("layer.2-4", [1, 2, 3]),
    "layer_offset below": ("layer.0-3", [1, 2, 3, 4]),
    "final_norm": ("layer.1-3,final", [1, 2, 3, 4]),
    "final_norm before": ("layer.3,layer.4", [3, "final"]),
}


@pytest.mark.parametrize("case", MIXED_UP)
def test_a_mix_up_is_named(case: str, model: hs.Model) -> None:
    sites, names = MIXED_UP[case]
    result = hs.drift(model, saved(model, sites, names), TEXTS)
    assert result.facts["drifted"]
    assert faults(result) == [case.split()[0]]
    evidence = result.facts["hints"][0]["evidence"]
    assert "This is no drift" in evidence
    assert evidence in " ".join(findings(result))


def test_centred_states_are_named(model: hs.Model) -> None:
    captured = model.capture(TEXTS, "layer.1-4")
    values = captured.values + 0.5
    centred = values - values.mean(-1, keepdim=True)
    states = hs.States.read(centred, tokens=TEXTS, sites=[1, 2, 3, 4])
    result = hs.drift(model, states, TEXTS)
    assert faults(result) == ["centred"]
    assert any("mean zero" in note for note in result.facts["notes"])


def garbage(rows: Tensor) -> Tensor:
    """Other rows of about the same size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows.shape, generator=generator) * rows.std()


PARTIAL = {
    "final_norm": ("layer.1-3,final", [1, 2, 3, 4], 0, "layer.1"),
    "layer_offset": ("layer.2-4", [1, 2, 3], -1, "layer.3"),
    "residual_apart": ("*.mlp", [1, 2, 3, 4], 1, "layer.2"),
}


@pytest.mark.parametrize("fault", PARTIAL)
def test_a_mix_up_says_which_layers_it_leaves(fault: str, model: hs.Model) -> None:
    sites, names, layer, left = PARTIAL[fault]
    values = model.capture(TEXTS, sites).values.clone()
    values[layer] = garbage(values[layer])
    states = hs.States.read(values, tokens=TEXTS, sites=names)
    result = hs.drift(model, states, TEXTS)
    assert faults(result) == [fault]
    evidence = result.facts["hints"][0]["evidence"]
    assert "no drift" not in evidence
    assert f"does not explain {left}, " in evidence
    assert left not in evidence.partition(" the saved states")[0]


@pytest.mark.parametrize("case", MIXED_UP)
@pytest.mark.parametrize("tokens", [[3], [0, 7, 8, 9]])
def test_every_token_must_fit_a_mix_up(
    case: str, tokens: list[int], model: hs.Model
) -> None:
    sites, names = MIXED_UP[case]
    values = model.capture(TEXTS, sites).values.clone()
    values[:, tokens] = garbage(values[:, tokens])
    states = hs.States.read(values, tokens=TEXTS, sites=names)
    result = hs.drift(model, states, TEXTS)
    assert result.facts["drifted"]
    assert faults(result) == []


def test_a_small_error_beside_a_mix_up_is_not_explained_away(model: hs.Model) -> None:
    values = model.capture(TEXTS, "layer.2-4").values.clone()
    values += 1e-3 * garbage(values)
    states = hs.States.read(values, tokens=TEXTS, sites=[1, 2, 3])
    assert faults(hs.drift(model, states, TEXTS)) == []


def test_true_drift_is_no_mix_up(model: hs.Model) -> None:
    captured = model.capture(TEXTS, "layer.1-4")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(captured.values.shape, generator=generator)
    values = captured.values + 0.1 * noise * captured.values.std()
    states = hs.States.read(values, tokens=TEXTS, sites=[1, 2, 3, 4])
    result = hs.drift(model, states, TEXTS)
    assert result.facts["drifted"]
    assert faults(result) == []


def vllm_file(path: Path, model: hs.Model, sites: str) -> dict[str, Tensor]:
    captured = model.capture(TEXTS[:1], sites)
    tensors = {
        "hidden_states": captured.values.movedim(0, 1).contiguous(),
        "token_ids": torch.tensor(TEXTS[0]),
    }
    save_file(tensors, path)
    return tensors


def test_the_layers_of_a_file_are_proved(model: hs.Model, tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    vllm_file(path, model, "layer.1,layer.3,layer.4")
    result = hs.drift(model, path, None)
    assert not result.facts["drifted"]
    assert result.data["site"].to_numpy().tolist() == ["layer.1", "layer.3", "layer.4"]
    assert any("does not say which layers" in note for note in result.facts["notes"])


def test_layers_that_cannot_be_proved_are_asked_for(
    model: hs.Model, tmp_path: Path
) -> None:
    path = tmp_path / "request.safetensors"
    tensors = vllm_file(path, model, "layer.1-2")
    with pytest.raises(StatesError, match="no model can prove it"):
        hs.drift(path, path, None)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tensors["hidden_states"].shape, generator=generator)
    noisy = tmp_path / "noisy.safetensors"
    save_file({**tensors, "hidden_states": noise}, noisy)
    with pytest.raises(StatesError, match=r"hs\.States\.read"):
        hs.drift(model, noisy, None)
    narrow = tmp_path / "narrow.safetensors"
    hidden = tensors["hidden_states"][..., :8].contiguous()
    save_file({**tensors, "hidden_states": hidden}, narrow)
    with pytest.raises(StatesError, match="8 wide"):
        hs.drift(model, narrow, None)


def test_other_texts_widths_and_ids_are_refused(model: hs.Model) -> None:
    states = saved(model, "layer.1-2", [1, 2])
    with pytest.raises(StatesError, match="of other texts"):
        hs.drift(model, states, [[1, 2, 3]])
    narrow = hs.States.read(states.values[..., :8], tokens=TEXTS, sites=[1, 2])
    with pytest.raises(StatesError, match="8 in the other"):
        hs.drift(model, narrow, TEXTS)
    deep = hs.States.read(states.values, tokens=TEXTS, sites=[40, 41])
    with pytest.raises(StatesError, match="Nothing to compare"):
        hs.drift(model, deep, TEXTS)


def test_the_command_takes_a_file_of_another_program(tmp_path: Path) -> None:
    module = tiny_model("llama", layers=4)
    module.save_pretrained(tmp_path / "model")
    model = hs.load((module, None))
    vllm_file(tmp_path / "request.safetensors", model, "layer.1,layer.3")
    command = ["drift", "request.safetensors", "--model", "model"]
    finished = subprocess.run(
        [sys.executable, "-m", "hiddenscope", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode in (0, 1), finished.stderr
    assert "layer.1" in finished.stdout


def test_the_command_refuses_a_bad_file_before_it_loads_a_model(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 4)}, tmp_path / "other.safetensors")
    apart = {
        "hidden_states": torch.ones(3, 2, 4),
        "residual": torch.ones(3, 2, 4),
        "token_ids": torch.arange(3),
    }
    save_file(apart, tmp_path / "apart.safetensors")
    for name, message in [
        ("other.safetensors", "nothing says which tokens"),
        ("apart.safetensors", "keeps the residual apart"),
    ]:
        finished = subprocess.run(
            [sys.executable, "-m", "hiddenscope", "drift", name, "--model", "nowhere"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode not in (0, 1)
        assert message in finished.stderr
        assert finished.stderr.count("\n") == 1
