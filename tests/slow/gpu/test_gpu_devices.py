"""Several devices and quantised weights on a GPU: what one device, or the CPU, shows."""

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.testing import tiny_model

TEXT = [5, 6, 7, 8, 9, 10, 11]
TEXTS = [TEXT, [12, 13, 14]]
LONGER = [[*range(5, 20)], [*range(30, 43)]]
MAPS = {
    "blocks on both": {"": "cuda:0", "model.layers.1": "cpu"},
    "head on the cpu": {"": "cuda:0", "lm_head": "cpu"},
    "disk": {"": "cuda:0", "model.layers.0": "cpu", "model.layers.2": "disk"},
    "auto": "auto",
    "balanced": "balanced",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(made)
    return made


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_over_cpu_and_cuda_gives_the_numbers_of_one_device(folder, kind):
    pytest.importorskip("accelerate")
    single = hs.load(folder, device="cuda")
    spread = hs.load(folder, device=MAPS[kind])
    states, expected = spread.capture(TEXTS), single.capture(TEXTS)
    for site in expected.sites:
        torch.testing.assert_close(states[site], expected[site], rtol=1e-4, atol=1e-5)
    assert not states.values.is_cuda
    assert "cuda:0" in spread.source().device
    if isinstance(MAPS[kind], dict):
        assert len(spread.source().device.split(", ")) == len(set(MAPS[kind].values()))
    assert spread.source().weights == single.source().weights


@pytest.mark.parametrize("kind", ["blocks on both", "disk"])
def test_questions_over_cpu_and_cuda(folder, kind):
    pytest.importorskip("accelerate")
    single, spread = hs.load(folder, device="cuda"), hs.load(folder, device=MAPS[kind])
    contrast = hs.Contrast(TEXT, [5, 6, 30, 8, 9, 10, 11], answer=7, other=8)
    for ask in (
        lambda model: hs.lens(model, TEXT),
        lambda model: hs.patch(model, contrast),
        lambda model: hs.attention(model, TEXT),
        lambda model: hs.visibility(model, TEXT),
    ):
        result, expected = ask(spread), ask(single)
        for name in expected.data.data_vars:
            if expected.data[name].dtype.kind == "f":
                np.testing.assert_allclose(
                    result.data[name].values,
                    expected.data[name].values,
                    rtol=5e-3,
                    atol=1e-3,
                )
    facts = hs.drift(single, spread, TEXTS).facts
    assert not facts["drifted"]


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_torchao_on_the_gpu_in_bfloat16(folder, scheme):
    pytest.importorskip("torchao")
    pytest.importorskip("accelerate")
    reference = hs.load(folder, device="cuda", dtype="bfloat16")
    candidate = hs.load(hs.Quantised(folder, scheme), device="cuda", dtype="bfloat16")
    assert candidate.source().quantisation == f"torchao {scheme} weight-only"
    assert candidate.source().dtype == "bfloat16"
    assert candidate.source().weights.startswith("sha256:")
    alone = candidate.capture([TEXT])
    with torch.no_grad():
        entries = candidate.module(
            torch.tensor([TEXT], device="cuda"), output_hidden_states=True
        ).hidden_states
    for layer in range(3):
        assert torch.equal(alone[f"layer.{layer}"], entries[layer][0].cpu())
    facts = hs.drift(reference, candidate, LONGER).facts
    assert facts["explained_by"] in ("quantisation", None)
    assert facts["unexplained"] is None
    if facts["drifted"]:
        assert facts["explained_by"] == "quantisation"
    assert facts["consequences"]["kl_mean"] > 0


@pytest.mark.parametrize("scheme", ["bnb-int8", "nf4", "fp4"])
def test_bitsandbytes_on_the_gpu(folder, scheme):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    reference = hs.load(folder, device="cuda", dtype="float16")
    candidate = hs.load(hs.Quantised(folder, scheme), device="cuda", dtype="float16")
    assert candidate.source().quantisation.startswith("bitsandbytes")
    facts = hs.drift(reference, candidate, LONGER).facts
    assert facts["unexplained"] is None
