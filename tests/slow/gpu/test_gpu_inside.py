"""Inside attention and the MLP on a GPU: what the CPU shows, in both dtypes."""

import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import SiteError
from hiddenscope.testing import tiny_model, tiny_tokenizer

TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
INSIDE = "*.attn,*.attn.q,*.attn.k,*.attn.v,*.attn.z,*.attn.head.*,*.mlp.input"
FAMILIES = ["llama", "gpt2", "bloom", "gemma3_text", "falcon", "mixtral"]
DTYPES = [torch.float32, torch.bfloat16]
CONTRAST = hs.Contrast([5, 6, 7, 8], [9, 10, 7, 11], answer=11, other=12)


def load(family, device, dtype=torch.float32):
    return hs.load((tiny_model(family).to(device, dtype), None))


def tolerance(dtype):
    return 1e-4 if dtype == torch.float32 else 0.15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_inside_are_those_of_the_cpu(family, dtype):
    if family == "mixtral" and dtype == torch.bfloat16:
        pytest.skip("rounding to bfloat16 sends tokens to other experts")
    states = load(family, "cuda", dtype).capture(TEXTS, INSIDE)
    expected = load(family, "cpu").capture(TEXTS, INSIDE)
    for site in expected.sites:
        torch.testing.assert_close(
            states[site].float(),
            expected[site],
            rtol=tolerance(dtype),
            atol=tolerance(dtype),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_inside_can_stay_on_the_gpu(dtype):
    model = load("llama", "cuda", dtype)
    on_gpu = model.capture(TEXTS, INSIDE, keep="device")
    in_memory = model.capture(TEXTS, INSIDE)
    for site in in_memory.sites:
        assert on_gpu[site].is_cuda
        assert torch.equal(on_gpu[site].cpu(), in_memory[site])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "part", ["attn.q", "attn.k", "attn.v", "attn.z", "mlp.input", "mlp.neurons"]
)
def test_a_change_inside_moves_its_token_alone(part, dtype):
    model = load("llama", "cuda", dtype)
    site = f"layer.2.{part}"
    before = hs.record(model, TEXTS, site).states[site].float()
    after = hs.edit(model, TEXTS, {site: hs.Scale(0.0, tokens=1)}, site).states[site]
    moved = (after.float() - before).abs().amax(1) > 0
    assert moved.nonzero().flatten().tolist() == [1, 7]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_removing_a_head_equals_zeroing_its_columns(dtype):
    model = load("llama", "cuda", dtype)

    def zero(states):
        states[..., 16:32] = 0
        return states

    changes = {"layer.2.attn.head.1": hs.Scale(0.0)}, {"layer.2.attn.z": zero}
    removed, zeroed = (
        hs.edit(model, TEXTS, change, (), logits=True).logits.float()
        for change in changes
    )
    torch.testing.assert_close(
        removed, zeroed, rtol=tolerance(dtype), atol=tolerance(dtype)
    )


@pytest.mark.parametrize("method", ["exact", "zero", "mean", "resample"])
def test_patches_of_heads_are_those_of_the_cpu(method):
    results = [
        hs.patch(load("llama", device), CONTRAST, sites="*.attn.head.*", method=method)
        for device in ("cuda", "cpu")
    ]
    effects = [result.data["effect"].to_numpy() for result in results]
    torch.testing.assert_close(*map(torch.from_numpy, effects), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bloom"])
def test_heads_are_patched_in_bfloat16(family):
    model = load(family, "cuda", torch.bfloat16)
    far = hs.Contrast([5, 6, 7, 8], [90, 80, 70, 60], answer=11, other=12)
    result = hs.patch(model, far, sites="*.attn.head.*")
    assert result.data["effect"].notnull().all()
    check = result.facts["check"]
    assert abs(check["sweep"] - check["alone"]) < 0.1


def test_heads_are_extracted_on_a_gpu(tmp_path):
    pytest.importorskip("crc32c")
    model = hs.load((tiny_model("falcon").to("cuda"), tiny_tokenizer()))
    sites = "layer.2,layer.2.attn.k,layer.2.attn.head.*"
    texts = ["the cat is in the hat", "on and on"]
    store = hs.extract(model, texts, to=tmp_path / "store", sites=sites)
    states = model.capture(texts, sites)
    for site in states.sites:
        stored = torch.cat(list(store.blocks(site)))
        torch.testing.assert_close(stored, states[site], rtol=1e-5, atol=1e-5)


def test_a_family_without_heads_is_refused_on_a_gpu():
    with pytest.raises(SiteError, match="not shown inside"):
        load("mamba", "cuda").capture(TEXTS, "*.attn.head.*")
