"""Several devices: the numbers are those of one device, and mistakes are named."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import LoadError, ModuleError
from hiddenscope.loading.devices import place, spread_map
from hiddenscope.testing import tiny_model, tiny_tokenizer

pytest.importorskip("accelerate")

TEXT = [5, 6, 7, 8, 9, 10, 11]
TEXTS = [TEXT, [12, 13, 14]]
MAPS: dict[str, Any] = {
    "disk": {"": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"},
    "head on disk": {"": "cpu", "lm_head": "disk"},
    "cpu": {"": "cpu"},
    "auto": "auto",
    "sequential": "sequential",
    "balanced": "balanced",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    made = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(made)  # type: ignore[operator]
    return made


def assert_same(result: hs.Result, expected: hs.Result) -> None:
    for name in expected.data.data_vars:
        values, others = result.data[name].values, expected.data[name].values
        if others.dtype.kind in "fiub":
            assert np.array_equal(values, others, equal_nan=others.dtype.kind == "f")


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_gives_the_numbers_of_one_device(folder: Path, kind: str) -> None:
    if torch.cuda.is_available() and isinstance(MAPS[kind], str):
        pytest.skip("accelerate would choose the GPU: tests/test_gpu_devices.py")
    single, spread = hs.load(folder, device="cpu"), hs.load(folder, device=MAPS[kind])
    assert torch.equal(spread.capture(TEXTS).values, single.capture(TEXTS).values)  # type: ignore[union-attr, arg-type]
    assert spread.source().weights == single.source().weights
    expected = "cpu, disk" if "disk" in kind else "cpu"
    assert spread.source().device == expected
    assert spread.device == torch.device("cpu")
    run, other = (
        hs.record(model, TEXTS, (), logits=True) for model in (spread, single)
    )
    assert torch.equal(run.logits, other.logits)  # type: ignore[arg-type]


def test_the_questions_have_the_answers_of_one_device(folder: Path) -> None:
    single, spread = hs.load(folder, device="cpu"), hs.load(folder, device=MAPS["disk"])
    contrast = hs.Contrast(TEXT, [5, 6, 30, 8, 9, 10, 11], answer=7, other=8)
    for ask in (
        lambda model: hs.lens(model, TEXT),
        lambda model: hs.profile(model, TEXTS),
        lambda model: hs.patch(model, contrast),
        lambda model: hs.attention(model, TEXT),
        lambda model: hs.visibility(model, TEXT),
    ):
        assert_same(ask(spread), ask(single))
    contributions = [hs.contributions(model, TEXT, 7) for model in (spread, single)]
    for name in contributions[0].data.data_vars:
        values, others = (result.data[name].values for result in contributions)
        if others.dtype.kind == "f":
            np.testing.assert_allclose(values, others, rtol=1e-4, atol=1e-5)


def test_a_spread_model_does_not_drift(folder: Path) -> None:
    single, spread = hs.load(folder, device="cpu"), hs.load(folder, device=MAPS["disk"])
    for pair in ((single, spread), (spread, single)):
        facts = hs.drift(*pair, TEXTS).facts
        assert not facts["drifted"] and facts["as_given"]["error"] == 0
        assert "float64" in facts["noise"]["made_of"]


def test_a_fault_in_a_spread_model_is_found(folder: Path) -> None:
    single, spread = hs.load(folder, device="cpu"), hs.load(folder, device=MAPS["disk"])
    spread.module.model.layers[1].input_layernorm.variance_epsilon = 0.5  # type: ignore[union-attr, index]
    facts = hs.drift(single, spread, TEXTS).facts
    assert facts["drifted"] and facts["first_site"] == "layer.2"
    assert facts["module"] == "model.layers.1.input_layernorm"


def test_extracted_states_are_those_of_one_device(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(folder)
    texts = ["the cat sat", "on the mat"]
    spread = hs.load(folder, device=MAPS["disk"])
    hs.extract(spread, texts, tmp_path / "store", sites="layer.2")
    single = hs.load(folder, device="cpu").capture(texts, "layer.2")
    stored = hs.open(tmp_path / "store").to_states()
    assert torch.equal(stored["layer.2"], single["layer.2"])


def test_the_folder_on_disk_goes_with_the_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = hs.load(folder, device=MAPS["disk"])
    assert len(list(tmp_path.glob("hiddenscope-offload-*"))) == 1
    model.capture(TEXTS)
    del model
    gc.collect()
    assert not list(tmp_path.glob("hiddenscope-offload-*"))


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        ("cuda:7", "Cannot load on device 'cuda:7'"),
        ("nowhere", "Cannot load on device 'nowhere'"),
        ("meta", "a module on meta has no weights"),
        ({}, "the map is empty"),
        ({"": "meta"}, "a module on meta has no weights"),
        ({"": "disk"}, "no device is named that computes"),
        ({"": "cpu", "model.layers.7": "disk"}, "names 'model.layers.7'.* no such"),
        ({"model": "cpu"}, "leaves out 'lm_head.weight'"),
        ({"": "cpu", "lm_head": "cuda:7"}, "Cannot load on device 'cuda:7'"),
    ],
)
def test_a_device_that_cannot_be_is_named_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: Any, match: str
) -> None:
    if torch.cuda.device_count() > 7:
        pytest.skip("cuda:7 is there")
    monkeypatch.setattr(
        "hiddenscope.loading.checkpoint._from_pretrained",
        lambda *_: pytest.fail("read"),
    )
    with pytest.raises(LoadError, match=match):
        hs.load(folder, device=devices)


def test_a_map_of_something_else_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="Cannot load on device '1.5'"):
        hs.load(folder, device={"": 1.5})  # type: ignore[dict-item]


def test_without_accelerate_nothing_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for devices in ("auto", {"": "cpu"}):
        with pytest.raises(LoadError, match="Run: pip install accelerate"):
            place(devices)  # type: ignore[arg-type]


def test_a_map_may_name_single_weights() -> None:
    device_map = {"model": "disk", "lm_head.weight": "cpu"}
    assert spread_map(device_map, tiny_model("llama")) == device_map


def test_a_live_module_that_accelerate_dispatched(tmp_path: Path) -> None:
    import accelerate

    expected = hs.load((tiny_model("llama"), None))
    module = tiny_model("llama")
    places = {"model": "disk", "lm_head": "cpu"}
    accelerate.dispatch_model(
        module, places, main_device="cpu", offload_dir=str(tmp_path)
    )
    model = hs.load((module, None))
    assert model.source().device == "cpu, disk"
    assert model.source().weights == expected.source().weights
    assert_same(hs.lens(model, TEXT), hs.lens(expected, TEXT))
    assert not hs.drift(expected, model, TEXTS).facts["drifted"]


def test_a_nan_in_an_offloaded_weight_is_found() -> None:
    import accelerate

    module = tiny_model("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan  # type: ignore[union-attr, index]
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    with pytest.raises(hs.errors.NotFinite, match="up_proj.weight has 1 NaN"):
        hs.load((module, None))


def test_tensor_parallel_weights_are_refused(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        module = tiny_model("llama")
        part: Any = module.model.layers[0].mlp.up_proj  # type: ignore[union-attr, index]
        split = distribute_tensor(part.weight.data, mesh, [Shard(0)])
        part.weight = torch.nn.Parameter(split, requires_grad=False)
        with pytest.raises(ModuleError, match=r"up_proj.weight` is split by tensor"):
            hs.load((module, None))
    finally:
        distributed.destroy_process_group()
