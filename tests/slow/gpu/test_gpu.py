"""What only a GPU shows: states that leave it on a stream of their own are the ones the
pass made.
"""

from functools import cache

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import NotFinite
from hiddenscope.testing import nan_weight, tiny_model, tiny_tokenizer
from labs.calibrate import draws
from labs.calibrate.probe import trials
from tests.registry import CASES, RUNS, placed

# What chance or a sign decides, and what therefore need not agree in every digit.
UNLIKE = {
    "project": {"x", "y"},
    "probe": {"mix_weight", "mix_weight_fold"},
    # A principal component has no sign, and random directions are scaled on states that
    # are drawn along components.
    "features": {"activation", "unexplained", "written", "share"},
    "variable": {"basis"},
    # Nearly equal draws of a bootstrap change their order.
    "circuit": {"low", "high"},
    # A share of permutations jumps where two statistics change their order.
    "attention": {"p", "p_half"},
    # The noise that a difference is measured against is that of the device.
    "drift": {"beyond", "noise", "envelope"},
    "series": {"beyond", "noise", "envelope"},
}
LENGTHS = (5, 31, 2, 17, 17, 9)


def texts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(20, 100, (length,), generator=generator).tolist()
        for length in lengths
    ]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    return hs.load((tiny_model("llama").to("cuda", request.param), None))


def usual(model, ids):
    with torch.no_grad():
        output = model.module(
            torch.tensor([ids], device="cuda"),
            output_hidden_states=True,
            use_cache=False,
        )
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
    one, many = (
        model.capture(given, batch_tokens=7 * 64),
        model.capture(given, batch_tokens=7),
    )
    for text, ids in enumerate(given):
        expected = torch.stack(usual(model, ids)[:-1])
        assert torch.equal(many.of(text).select(sites="layer.0-2").values, expected)
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    assert torch.allclose(
        one.values.float(), many.values.float(), rtol=tolerance, atol=tolerance
    )


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
        assert torch.allclose(
            together.of(text).values.float(),
            alone.values.float(),
            rtol=tolerance,
            atol=tolerance,
        )


def test_another_dtype_is_made_before_the_states_leave(model):
    (ids,) = texts((9,))
    plain, half = model.capture([ids]), model.capture([ids], dtype=torch.float16)
    assert half.values.dtype == torch.float16
    assert torch.equal(half.values, plain.values.to(torch.float16))


def test_a_nan_in_a_weight_is_named_by_the_weight_and_one_that_comes_up_by_its_site(
    model,
):
    handle = model.module.model.layers[1].register_forward_hook(
        lambda *given: given[-1] * torch.nan
    )
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
    edited = hs.edit(
        model, given, {"layer.1": hs.Replace(full.states["layer.1"])}, logits=True
    )
    assert torch.equal(edited.logits, full.logits)
    changed = hs.edit(model, given, {"layer.1": hs.Scale(0.5)}, logits=True)
    assert not torch.equal(changed.logits, full.logits)


@cache
def on_cpu(word, place):
    with placed("cpu", torch.float32):
        return RUNS[word][place]()


@pytest.mark.parametrize(("word", "place"), CASES)
def test_an_analysis_gives_what_it_gives_on_a_cpu(word, place):
    with placed("cuda", torch.float32):
        here = RUNS[word][place]()
    there = on_cpu(word, place)
    assert set(here.data.variables) == set(there.data.variables)
    for name, expected in there.data.data_vars.items():
        assert here.data[name].shape == expected.shape, name
        if expected.dtype.kind == "f" and name not in UNLIKE.get(word, ()):
            difference = np.abs(here.data[name].to_numpy() - expected.to_numpy())
            allowed = 2e-3 * (1 + np.nanmax(np.abs(expected.to_numpy()), initial=0))
            assert not (difference > allowed).any(), name
            assert np.array_equal(np.isnan(here.data[name]), np.isnan(expected)), name


@pytest.mark.parametrize(("word", "place"), CASES)
def test_an_analysis_runs_in_bfloat16(word, place):
    with placed("cuda", torch.bfloat16):
        try:
            result = RUNS[word][place]()
        except hs.errors.Error as error:
            # What two runs differ by may be less than rounding.
            assert word in ("edges", "circuit") and "rounding" in str(error)
            return
    assert result.data.sizes == on_cpu(word, place).data.sizes
    assert result.summary()


@pytest.mark.parametrize(
    "word", ["profile", "project", "probe", "search", "cluster", "drift"]
)
def test_states_on_the_gpu_serve_as_those_in_host_memory(model, word):
    labels = [k % 2 for k in range(24)]
    ids = [[20 + k, 50 + k % 2, 30 + k] for k in range(24)]
    ask = {
        "profile": hs.profile,
        "project": lambda states: hs.project(states, labels, method="pca"),
        "probe": lambda states: hs.probe(states, labels),
        "search": lambda states: hs.search(
            states, states["layer.2"][5].float(), site="layer.2", k=3
        ),
        "cluster": hs.cluster,
        "drift": lambda states: hs.drift(model, states, ids),
    }[word]
    here, there = ask(model.capture(ids, keep="device")), ask(model.capture(ids))
    for name, expected in there.data.data_vars.items():
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(
                here.data[name], expected, rtol=1e-4, atol=1e-5, err_msg=str(name)
            )


def test_a_store_holds_what_capture_gives(model, tmp_path):
    given = [f"the cat number {number} sat on the mat" for number in range(40)]
    model = hs.load((model.module, tiny_tokenizer()))
    store = hs.extract(model, given, to=tmp_path / "states", sites="layer.*,final")
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    expected = model.capture(given)
    for site in expected.sites:
        rows = torch.cat(list(store.blocks(site)))
        assert rows.dtype == model.dtype
        assert torch.allclose(
            rows.float(), expected[site].float(), rtol=tolerance, atol=tolerance
        )
    assert hs.Store.verify(tmp_path / "states").intact
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    hs.extract(model, given, to=tmp_path / "states", sites="layer.*,final")
    assert before == {
        path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")
    }
    assert hs.profile(hs.open(tmp_path / "states")).data["norm"].size


WRONG = {
    "values on another device": lambda m: hs.edit(
        m, [[5, 6]], {"layer.1": hs.Replace(torch.zeros(2, 64))}
    ),
    "a direction on another device": lambda m: hs.edit(
        m, [[5, 6]], {"layer.1": hs.Add(torch.ones(64, device="cpu"))}
    ),
    "values of the cpu in resume": lambda m: hs.resume(
        m, [[5, 6]], "layer.1", torch.zeros(2, 64)
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_of_the_host_are_taken_to_the_gpu(model, what):
    assert WRONG[what](model).states.values.isfinite().all()


REFUSED = {
    "an id out of range": lambda m: m.capture([[5, 10**6]]),
    "values of another shape": lambda m: hs.edit(
        m, [[5, 6]], {"layer.1": hs.Replace(torch.zeros(3, 64).cuda())}
    ),
    "values of another width": lambda m: hs.resume(
        m, [[5, 6]], "layer.1", torch.zeros(2, 63).cuda()
    ),
    "texts too short to be aligned": lambda m: hs.visibility(m, [[5, 6], [7, 8]]),
    "a layer that is not there": lambda m: hs.record(m, [[5, 6]], "layer.9"),
    "a NaN": lambda m: hs.resume(
        m, [[5, 6]], "layer.1", torch.full((2, 64), torch.nan).cuda()
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_input_is_refused_and_the_gpu_goes_on(model, what):
    with pytest.raises(hs.errors.Error):
        REFUSED[what](model)
    # An assert inside a CUDA kernel would have ended the whole process's use of the
    # GPU.
    assert model.capture([[5, 6]]).values.isfinite().all()


def test_vectors_of_texts_give_what_they_give_on_a_cpu(model):
    given = texts()
    pooled = hs.embed(model, given, site="layer.3", pool="mean", normalize=False)
    expected = model.capture(given).pool("mean", "layer.3").numpy()
    np.testing.assert_allclose(pooled, expected, rtol=2e-2, atol=2e-2)


def test_calibration_on_a_gpu_says_what_it_says_without():
    for draw, share in ((draws.planted, 0.5), (draws.numbers, 0.5)):
        here, there = (
            trials(range(2), device, 1, draw=draw, rows=24, share=share)
            for device in ("cpu", "cuda")
        )
        for one, other in zip(here, there, strict=True):
            assert one.score == pytest.approx(other.score, abs=0.05)
            assert one.low[:6] == pytest.approx(other.low[:6], abs=0.05)


def test_a_copy_with_random_weights_stays_on_its_device(model):
    before = model.capture(texts()).values
    control = model.randomised(seed=1)
    assert (control.device, control.dtype) == (model.device, model.dtype)
    drawn = control.capture(texts()).values
    assert torch.equal(model.randomised(seed=1).capture(texts()).values, drawn)
    assert not torch.equal(drawn, before)
    assert torch.equal(model.capture(texts()).values, before)


def test_dictionaries_of_states_on_the_gpu_stay_there(model):
    given = [[20 + k, 50 + k % 2, 30 + k, 40 + k] for k in range(24)]
    states = model.capture(given, "layer.1", keep="device")
    host = model.capture(given, "layer.1")
    for name in ("pca", "random"):
        make = getattr(hs.Dictionary, name)
        options = {"pca": (8,), "random": (128, 8)}[name]
        here, there = make(states, *options), make(host, *options)
        assert here.directions.device.type == "cuda"
        scores = []
        for dictionary, source in ((here, states), (there, host)):
            facts = hs.features(source, dictionary=dictionary).facts
            scores.append(facts["comparisons"][0]["scores"][0]["value"])
        assert scores[0] == pytest.approx(scores[1], rel=1e-2)
