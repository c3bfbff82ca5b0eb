"""What only a GPU shows: states that leave it on a stream of their own are the ones the pass made."""

import numpy as np
import pytest
import torch

import hiddenscope as hs
from calibrate import draws
from calibrate.probe import trials
from hiddenscope.errors import NotFinite
from hiddenscope.testing import nan_weight, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")

LENGTHS = (5, 31, 2, 17, 17, 9)


def texts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(20, 100, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    return hs.load((tiny_model("llama").to("cuda", request.param), None))


def usual(model, ids):
    with torch.no_grad():
        output = model.module(torch.tensor([ids], device="cuda"), output_hidden_states=True, use_cache=False)
    return [states[0].cpu() for states in output.hidden_states]


def test_every_state_is_the_one_copied_after_the_pass(model):
    (ids,) = texts((31,))
    states = model.capture([ids])
    expected = usual(model, ids)
    for k, one in enumerate(expected[:-1]):
        assert torch.equal(states[f"layer.{k}"], one)
    assert torch.equal(states["final"], expected[-1])


def test_many_passes_do_not_overtake_one_another(model):
    given = texts([7] * 64)
    one, many = model.capture(given, batch_tokens=7 * 64), model.capture(given, batch_tokens=7)
    for text, ids in enumerate(given):
        expected = torch.stack(usual(model, ids)[:-1])
        assert torch.equal(many.of(text).select(sites="layer.0-2").values, expected)
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    assert torch.allclose(one.values.float(), many.values.float(), rtol=tolerance, atol=tolerance)


def test_states_that_stay_on_the_gpu_are_the_same(model):
    for given in (texts(), texts([9, 9, 9])):
        here, there = model.capture(given), model.capture(given, keep="device")
        assert there.values.is_cuda and torch.equal(here.values, there.values.cpu())
        kept = hs.record(model, given, "layer.2", keep="device").states
        assert kept.values.is_cuda


def test_a_text_in_a_batch_is_the_text_alone_and_the_order_is_kept(model):
    given = texts()
    together = model.capture(given)
    assert together.tokens.lengths.tolist() == list(LENGTHS)
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    for text, ids in enumerate(given):
        alone = model.capture([ids])
        assert torch.allclose(together.of(text).values.float(), alone.values.float(), rtol=tolerance, atol=tolerance)


def test_another_dtype_is_made_before_the_states_leave(model):
    (ids,) = texts((9,))
    plain, half = model.capture([ids]), model.capture([ids], dtype=torch.float16)
    assert half.values.dtype == torch.float16
    assert torch.equal(half.values, plain.values.to(torch.float16))


def test_a_nan_in_a_weight_is_named_by_the_weight_and_one_that_comes_up_by_its_site(model):
    handle = model.module.model.layers[1].register_forward_hook(lambda *given: given[-1] * torch.nan)
    with pytest.raises(NotFinite, match=r"a NaN at layer\.2"):
        model.capture(texts())
    handle.remove()
    path = nan_weight(model.module)
    with pytest.raises(NotFinite, match=f"{path} has 1 NaN"):
        model.capture(texts())


def test_states_of_a_recording_and_of_generate_come_to_the_host(model):
    (ids,) = texts((9,))
    with hs.recording(model, "layer.*") as recorded:
        model.module(torch.tensor([ids], device="cuda"))
    assert torch.equal(recorded.states.values, model.capture([ids], "layer.*").values)
    written = model.capture_generation([ids], max_new_tokens=4, sites="layer.*")
    assert written.values.device.type == "cpu" and len(written.tokens) == 13


def test_a_resumed_pass_is_the_full_pass(model):
    given = texts((9, 9))
    full = hs.record(model, given, logits=True)
    resumed = hs.resume(model, given, "layer.2", full.states["layer.2"])
    assert not resumed.notes
    assert torch.equal(resumed.logits, full.logits)
    assert torch.equal(resumed.states["layer.3"], full.states["layer.3"])


def test_an_edit_with_the_recorded_values_changes_nothing(model):
    given = texts((9, 5))
    full = hs.record(model, given, logits=True)
    edited = hs.edit(model, given, {"layer.1": hs.Replace(full.states["layer.1"])}, logits=True)
    assert torch.equal(edited.logits, full.logits)
    changed = hs.edit(model, given, {"layer.1": hs.Scale(0.5)}, logits=True)
    assert not torch.equal(changed.logits, full.logits)


ANALYSES = {
    "lens": (lambda model, a, b: hs.lens(model, [a], target=30), "entropy"),
    "visibility": (lambda model, a, b: hs.visibility(model, [a], influence="frobenius"), "frobenius"),
    "patch": (lambda model, a, b: hs.patch(model, hs.Contrast(a, b, 30, 31)), "effect"),
    "steer": (
        lambda model, a, b: hs.steer(
            model,
            [a],
            hs.Direction.between(model, [a], [b], sites="layer.1,layer.2"),
            answers=[30, 31],
            quality=[a, b],
            new_tokens=3,
        ),
        "log_odds",
    ),
    "profile": (lambda model, a, b: hs.profile(model, [a, b]), "norm"),
    "compare": (lambda model, a, b: hs.compare(model, [a], [b]), "l2"),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_gives_what_it_gives_on_a_cpu(name):
    analyse, variable = ANALYSES[name]
    a, b = texts((9, 9))
    b = [*a[:4], *b[4:]]
    here, there = (hs.load((tiny_model("llama").to(device), None)) for device in ("cuda", "cpu"))
    found, expected = (analyse(model, a, b).data[variable].to_numpy() for model in (here, there))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_runs_in_bfloat16(name):
    analyse, variable = ANALYSES[name]
    a, b = texts((9, 9))
    found = analyse(hs.load((tiny_model("llama").to("cuda", torch.bfloat16), None)), a, [*a[:4], *b[4:]])
    assert found.data[variable].size


def test_vectors_of_texts_give_what_they_give_on_a_cpu(model):
    given = texts()
    pooled = hs.embed(model, given, site="layer.3", pool="mean", normalize=False)
    expected = model.capture(given).pool("mean", "layer.3").numpy()
    np.testing.assert_allclose(pooled, expected, rtol=2e-2, atol=2e-2)


def test_calibration_on_a_gpu_says_what_it_says_without():
    for draw, share in ((draws.planted, 0.5), (draws.numbers, 0.5)):
        here, there = (trials(range(2), device, 1, draw=draw, rows=24, share=share) for device in ("cpu", "cuda"))
        for one, other in zip(here, there, strict=True):
            assert one.score == pytest.approx(other.score, abs=0.05)
            assert one.low[:6] == pytest.approx(other.low[:6], abs=0.05)
