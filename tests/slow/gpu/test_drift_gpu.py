"""Drift where only a GPU shows it: planted faults on CUDA, on two devices, and ports in
other layouts.
"""

import copy
from functools import cache

import pytest
import torch

import hiddenscope as hs
from faults.planted import HARMLESS, KINDS
from faults.ports import PORTS, faults_of, plant
from hiddenscope.testing import tiny_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA here"
)

FAMILIES = ("gpt2", "llama", "gemma3_text", "bert", "mixtral")
KINDS_HERE = (
    *(
        "weight_permuted",
        "norm_skipped",
        "attention_scale",
        "activation",
        "causal_mask_missing",
        "residual_scaled",
    ),
    *(
        "rope_interleaved",
        "kv_heads_tiled",
        "layer_skipped",
        "layers_swapped",
        "token_ids_shifted",
        "logit_scale",
    ),
)
PORT_FAULTS = {
    "meta-llama": "weight_scaled",
    "split-gpt2": "mask_missing",
    "folded-llama": "scale_missing",
    "loop-mixtral": "activation",
    "packed-bert": "queries_keys_exchanged",
}
DEVICES = [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")]


@cache
def reference(family, device, dtype):
    return hs.load((tiny_model(family, layers=3).to(device, dtype), None))


@cache
def texts():
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(20, 100, (length,), generator=generator).tolist()
        for length in (21, 30, 9)
    ]


@pytest.mark.parametrize("devices", DEVICES, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS_HERE)
def test_a_fault_is_found_on_every_device(family, kind, devices):
    module = tiny_model(family, layers=3)
    if not KINDS[kind].applies(module):
        pytest.skip(f"{family} has no place for {kind}")
    planted = KINDS[kind].plant(module, rng=1)
    model = reference(family, devices[0], torch.float32)
    facts = hs.drift(model, (planted.module.to(devices[1]), None), texts()).facts
    assert facts["first_site"] == planted.first_site, planted.detail
    assert facts["module"] in planted.paths, planted.detail
    assert not [note for note in facts["notes"] if "could not be tried" in note]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "kind", ["weight_permuted", "norm_skipped", "causal_mask_missing", "layer_skipped"]
)
def test_a_fault_in_bfloat16_is_found(family, kind):
    module = tiny_model(family, layers=3)
    if not KINDS[kind].applies(module):
        pytest.skip(f"{family} has no place for {kind}")
    planted = KINDS[kind].plant(module.bfloat16(), rng=1)
    facts = hs.drift(
        reference(family, "cuda", torch.bfloat16),
        (planted.module.cuda(), None),
        texts(),
    ).facts
    assert facts["first_site"] == planted.first_site, planted.detail
    assert facts["module"] in planted.paths, planted.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("devices", DEVICES, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_device_or_kernel_is_no_drift(family, devices, dtype):
    model = reference(family, devices[0], dtype)
    for name in ("copy", "attention_kernel", "linear_split", "norm_by_hand"):
        if HARMLESS[name].applies(model.module):
            candidate = HARMLESS[name].make(model.module).to(devices[1])
            facts = hs.drift(model, (candidate, None), texts()).facts
            assert not facts["drifted"], (
                name,
                facts["first_site"],
                facts["beyond"],
                facts["systematic"],
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PORT_FAULTS)
def test_a_port_in_another_layout_is_blamed_rightly(name, dtype):
    layout = PORTS[name]
    module = layout.reference().to("cuda", dtype)
    model = hs.load((module, None))
    assert not hs.drift(model, layout.port(module), texts()).facts["drifted"]
    faults = [fault for fault in faults_of(layout) if fault.kind == PORT_FAULTS[name]]
    planted = plant(layout, module, faults[0])
    facts = hs.drift(model, planted.module, texts()).facts
    assert facts["first_site"] in (planted.first_site, *planted.sites)
    assert planted.names(facts["module"]) in ("right", "larger"), (
        facts["module"],
        planted.paths,
    )


def test_a_small_fault_in_bfloat16_is_found_over_all_tokens():
    generator = torch.Generator().manual_seed(6)
    many = [
        torch.randint(20, 100, (length,), generator=generator).tolist()
        for length in (60, 70, 80, 90)
    ]
    model = reference("llama", "cuda", torch.bfloat16)
    candidate = copy.deepcopy(model.module)
    candidate.model.layers[1].mlp.up_proj.weight.data.mul_(1.02)
    facts = hs.drift(model, (candidate, None), many).facts
    assert (facts["first_site"], facts["module"]) == (
        "layer.2",
        "model.layers.1.mlp.up_proj",
    )
    assert facts["systematic"]["beyond"] > 1 > facts["smallest_fault"]["largest"]


def test_a_low_memory_comparison_on_a_gpu_says_the_same():
    model = reference("llama", "cuda", torch.float32)
    candidate = copy.deepcopy(model.module)
    candidate.model.layers[1].mlp.up_proj.weight.data.mul_(1.02)
    facts = hs.drift(model, (candidate, None), texts(), low_memory=True).facts
    assert (facts["first_site"], facts["module"]) == (
        "layer.2",
        "model.layers.1.mlp.up_proj",
    )
