"""Directions as control vectors: the gguf package is the oracle of the file, and
llama.cpp's two rules of place that of the layers.
"""

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import Error, FileError, NotFinite
from hiddenscope.testing import tiny_model
from tests.unit.analyses.refused import check_refused

IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return tiny_model("llama", layers=4)


@pytest.fixture(scope="module")
def model(module: nn.Module) -> hs.Model:
    return hs.load((module, None))


def write_gguf(path: Path, tensors: dict[str, np.ndarray], arch: str) -> None:
    """As repeng's export_gguf does."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_buffer(path: Path, width: int, layers: int) -> dict[int, np.ndarray]:
    """What each block adds: the loader fills a buffer, from which blocks take.

    The loader puts direction.N at width * (N - 1), and refuses N < 1; block il takes
    from width * (il - 1), from il = 1 on.
    """
    buffer = np.zeros(width * layers, np.float32)
    for tensor in gguf.GGUFReader(path).tensors:
        number = int(tensor.name.split(".")[1])
        assert number >= 1
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        buffer[width * (number - 1) : width * number] += tensor.data
    return {il: buffer[width * (il - 1) : width * il] for il in range(1, layers)}


def test_llama_cpp_changes_the_states_that_steer_changes(
    module: Any, model: hs.Model, tmp_path: Path
) -> None:
    direction = hs.Direction.between(model, [[5, 6]], [[7, 8]], sites="layer.2-4")
    direction.save(tmp_path / "d.gguf")
    added = llama_cpp_buffer(tmp_path / "d.gguf", 64, 4)
    handles = []
    for il, vector in added.items():

        def add(block: nn.Module, args: Any, output: Any, vector: Any = vector) -> Any:
            return output + torch.from_numpy(vector)

        handles.append(module.model.layers[il].register_forward_hook(add))
    try:
        with torch.no_grad():
            expected = module(torch.tensor([IDS])).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    changes = {site: hs.Add(vector) for site, vector in direction.vectors.items()}
    actual = hs.edit(model, [IDS], changes, logits=True).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        hs.record(model, [IDS], (), logits=True).logits, expected, atol=1e-3
    )


def test_the_file_is_as_repeng_writes_and_reads_it(
    model: hs.Model, tmp_path: Path
) -> None:
    direction = hs.Direction.between(model, [[5, 6]], [[7, 8]], sites="layer.1-3")
    path = tmp_path / "d.gguf"
    direction.save(path, sites="layer.2-3")
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.model_hint").contents() == "llama"
    assert reader.get_field("controlvector.layer_count").contents() == 2
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(tensors) == {"direction.1", "direction.2"}
    expected = direction.vectors["layer.3"].float().numpy()
    np.testing.assert_array_equal(tensors["direction.2"], expected)
    loaded = hs.Direction.load(path)
    assert set(loaded.vectors) == {"layer.2", "layer.3"}
    assert loaded.facts == direction.facts
    assert loaded.hint == "llama"
    assert torch.equal(loaded.vectors["layer.3"].float(), torch.from_numpy(expected))
    again = tmp_path / "again.gguf"
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()
    hs.steer(model, [IDS], loaded, strengths=[1], quality=[IDS])


def test_bad_directions(tmp_path: Path) -> None:
    of, vector = hs.Direction.of, [1.0, 2.0]
    path = tmp_path / "d.gguf"
    below, parts = "nothing below layer.2", "outputs of a decoder's blocks"
    for direction, words in (
        (of({"layer.1": vector}), below),
        (of({"layer.0": vector}), below),
        (of({"final": vector}), parts),
        (of({"layer.2.mlp": vector}), parts),
        (of(vector), "one vector for whatever site"),
        (of(vector, sites="layer.3", spare_first=True), "spare_first"),
    ):
        check_refused(Error, words, direction.save, path)
    save = of(vector, sites="layer.3").save
    check_refused(FileError, "saved as .gguf", save, tmp_path / "d.bin")
    assert os.listdir(tmp_path) == []
    check_refused(FileError, "no such file", hs.Direction.load, path)
    of(vector).save(path, sites="layer.2-3")
    assert [*hs.Direction.load(path).vectors] == ["layer.2", "layer.3"]


def test_a_vector_of_repeng_is_read_and_bad_files_are_not(tmp_path: Path) -> None:
    path, ones = tmp_path / "d.gguf", np.ones(4, np.float32)
    write_gguf(path, {"direction.1": ones, "direction.3": 3 * ones}, "controlvector")
    loaded = hs.Direction.load(path).vectors
    assert sorted(loaded) == ["layer.2", "layer.4"]
    assert loaded["layer.4"].tolist() == [3.0] * 4
    square, short = np.ones((2, 2), np.float32), ones.astype(np.float16)
    for name, tensor, arch, kind, words in (
        ("direction.0", ones, "controlvector", FileError, "called 'direction.0'"),
        ("other", ones, "controlvector", FileError, "called 'other'"),
        ("direction.1", ones, "llama", FileError, "a GGUF file of 'llama'"),
        ("direction.1", square, "controlvector", FileError, "float32"),
        ("direction.1", short, "controlvector", FileError, "float16"),
        ("direction.1", ones * np.nan, "controlvector", NotFinite, "NaN"),
    ):
        path.unlink(missing_ok=True)
        write_gguf(path, {name: tensor}, arch)
        check_refused(kind, words, hs.Direction.load, path)
    path.write_bytes(path.read_bytes()[:60])
    check_refused(FileError, "it claims", hs.Direction.load, path)
