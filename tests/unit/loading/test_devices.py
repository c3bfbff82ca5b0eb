"""Several devices: the numbers are those of one device, and mistakes are named."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hiddenscope as hs
from hiddenscope.errors import LoadError, ModuleError
from hiddenscope.loading.checkpoint import spread_map, spread_note
from hiddenscope.testing import tiny_model

TEXT = [5, 6, 7, 8, 9, 10, 11]
TEXTS = [TEXT, [12, 13, 14]]
DISK = {"": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
MAPS: dict[str, Any] = {
    "disk": DISK,
    "head on disk": {"": "cpu", "lm_head": "disk"},
    "cpu": {"": "cpu"},
    "auto": "auto",
    "balanced": "balanced",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    made = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(made)  # type: ignore[operator]
    return made


@pytest.fixture(scope="module")
def single(folder: Path) -> hs.Model:
    return hs.load(folder, device="cpu")


@pytest.fixture(scope="module")
def spread(folder: Path) -> hs.Model:
    return hs.load(folder, device=DISK)


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_gives_the_numbers_of_one_device(
    folder: Path, single: hs.Model, kind: str
) -> None:
    if torch.cuda.is_available() and isinstance(MAPS[kind], str):
        pytest.skip("accelerate would choose the GPU: tests/slow/gpu")
    spread = hs.load(folder, device=MAPS[kind])
    assert torch.equal(spread.capture(TEXTS).values, single.capture(TEXTS).values)  # type: ignore[union-attr, arg-type]
    assert spread.source().weights == single.source().weights
    expected = "cpu, disk" if "disk" in kind else "cpu"
    assert spread.source().device == expected
    assert spread.device == torch.device("cpu")
    run, other = (
        hs.record(model, TEXTS, (), logits=True) for model in (spread, single)
    )
    assert torch.equal(run.logits, other.logits)  # type: ignore[arg-type]


CONTRAST = hs.Contrast(TEXT, [5, 6, 30, 8, 9, 10, 11], answer=7, other=8)
# By question, how far the numbers may be apart.
QUESTIONS = {
    "lens": (lambda model: hs.lens(model, TEXT), 0.0),
    "profile": (lambda model: hs.profile(model, TEXTS), 0.0),
    "patch": (lambda model: hs.patch(model, CONTRAST), 0.0),
    "attention": (lambda model: hs.attention(model, TEXT, draws=0), 0.0),
    "visibility": (lambda model: hs.visibility(model, TEXT), 0.0),
    "contributions": (lambda model: hs.contributions(model, TEXT, 7), 1e-4),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_questions_have_the_answers_of_one_device(
    single: hs.Model, spread: hs.Model, name: str
) -> None:
    ask, tolerance = QUESTIONS[name]
    answer, expected = ask(spread).data, ask(single).data
    for variable in expected.data_vars:
        values, others = answer[variable].values, expected[variable].values
        if others.dtype.kind in "fiub":
            np.testing.assert_allclose(
                values, others, rtol=tolerance, atol=tolerance / 10
            )


def test_a_spread_model_drifts_where_it_has_a_fault(
    folder: Path, single: hs.Model, spread: hs.Model
) -> None:
    for pair in ((single, spread), (spread, single)):
        facts = hs.drift(*pair, TEXTS).facts
        assert not facts["drifted"]
        assert facts["as_given"]["error"] == 0
        assert "float64" in facts["noise"]["made_of"]
    faulty = hs.load(folder, device=DISK)
    faulty.module.get_submodule("model.layers.1.input_layernorm").variance_epsilon = 0.5  # type: ignore[assignment]
    facts = hs.drift(single, faulty, TEXTS).facts
    assert facts["drifted"]
    assert facts["first_site"] == "layer.2"
    assert facts["module"] == "model.layers.1.input_layernorm"


def test_the_folder_on_disk_goes_with_the_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = hs.load(folder, device=DISK)
    assert len(list(tmp_path.glob("hiddenscope-offload-*"))) == 1
    model.capture(TEXTS)
    del model
    gc.collect()
    assert not list(tmp_path.glob("hiddenscope-offload-*"))


def test_a_device_that_cannot_be_is_named_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hiddenscope.loading.checkpoint._from_pretrained",
        lambda *_: pytest.fail("read"),
    )
    cases: list[tuple[Any, str]] = [
        ("cuda:77", "Cannot load on device 'cuda:77'"),
        ("nowhere", "Cannot load on device 'nowhere'"),
        ("meta", "a module on meta has no weights"),
        ({}, "the map is empty"),
        ({"": 1.5}, "Cannot load on device '1.5'"),
        ({"": "meta"}, "a module on meta has no weights"),
        ({"": "disk"}, "no device is named that computes"),
        ({"": "cpu", "model.layers.7": "disk"}, "names 'model.layers.7'.* no such"),
        ({"model": "cpu"}, "leaves out 'lm_head.weight'"),
        ({"": "cpu", "lm_head": "cuda:77"}, "Cannot load on device 'cuda:77'"),
    ]
    for devices, match in cases:
        with pytest.raises(LoadError, match=match):
            hs.load(folder, device=devices)


def test_a_map_may_name_single_weights() -> None:
    device_map = {"model": "disk", "lm_head.weight": "cpu"}
    assert spread_map(device_map, tiny_model("llama")) == device_map


def test_a_spread_model_says_how_many_modules_lie_where() -> None:
    spread = SimpleNamespace(hf_device_map={"a": 0, "b": "cpu", "c": "cpu"})
    told = "Its modules are spread over devices: 1 on cuda:0, 2 on cpu."
    assert spread_note(spread) == told
    assert spread_note(SimpleNamespace(hf_device_map={"a": "cpu"})) == ""


def test_a_live_module_that_accelerate_dispatched(
    single: hs.Model, tmp_path: Path
) -> None:
    module: Any = tiny_model("llama")
    places = {"model": "disk", "lm_head": "cpu"}
    accelerate.dispatch_model(
        module, places, main_device="cpu", offload_dir=str(tmp_path)
    )
    model = hs.load((module, None))
    assert model.source().device == "cpu, disk"
    assert model.source().weights == single.source().weights
    answer, expected = (hs.lens(each, TEXT).data for each in (model, single))
    for name in ("probability", "entropy"):
        assert np.array_equal(answer[name].values, expected[name].values)
    assert not hs.drift(single, model, TEXTS).facts["drifted"]
    broken: Any = tiny_model("llama")
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    accelerate.cpu_offload(broken, execution_device=torch.device("cpu"))
    with pytest.raises(hs.errors.NotFinite, match="up_proj.weight has 1 NaN"):
        hs.load((broken, None))


def test_tensor_parallel_weights_are_refused(tmp_path: Path) -> None:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        module: Any = tiny_model("llama")
        part = module.model.layers[0].mlp.up_proj
        split = distribute_tensor(part.weight.data, mesh, [Shard(0)])
        part.weight = torch.nn.Parameter(split, requires_grad=False)
        with pytest.raises(ModuleError, match=r"up_proj.weight` is split by tensor"):
            hs.load((module, None))
    finally:
        distributed.destroy_process_group()
