"""Damaged and hostile files of dictionaries are refused in one sentence."""

import errno
import io
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hiddenscope as hs
from hiddenscope.directions import layouts
from hiddenscope.directions.encoding import Encoding
from hiddenscope.errors import Error, FileError, NotFinite
from hiddenscope.testing import tiny_model

FILES = Path(__file__).parent / "files"
SAELENS = "sae_weights.safetensors"


class Hostile:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return pytest.fail, ("code of the file was run",)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(FILES / name, tmp_path / Path(name).name))

    return copy


def refused(folder: Path, words: str, kind: type[Exception] = Error) -> None:
    """Require one sentence of refusal that holds the words."""
    with pytest.raises(kind, match=words) as caught:
        hs.Dictionary.read(folder)
    assert "\n" not in str(caught.value)


def changed(folder: Path, name: str, **fields: object) -> None:
    """Change some entries of a JSON file."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_folder_must_be_there_and_known(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no such folder")
    refused(tmp_path, "its files are of no known library")


def test_a_dictionary_is_saved_in_a_folder(tmp_path: Path) -> None:
    dictionary = hs.Dictionary.read(FILES / "saelens_standard")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="Give a folder, or a path where one can"):
        dictionary.save(tmp_path / "file")


def test_weights_that_are_cut_short_or_absurd(copied: Callable[[str], Path]) -> None:
    folder = copied("saelens_standard")
    weights = folder / SAELENS
    whole = weights.read_bytes()
    for content in (b"", whole[:20], whole[:-8], b"\xff" * 200, whole[:8] + b"{}" * 99):
        weights.write_bytes(content)
        refused(folder, "Cannot read sae_weights.safetensors")
    weights.write_bytes(whole)
    (folder / "cfg.json").write_text("[" * 100_000)
    refused(folder, "it is not JSON")
    (folder / "cfg.json").write_text(json.dumps({"k": "x" * 2**21}))
    refused(folder, "bytes")


def test_numbers_that_are_not_finite_and_shapes_that_disagree(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("saelens_standard")
    tensors = load_file(folder / SAELENS)
    for name in ("W_dec", "W_enc", "b_enc", "b_dec"):
        spoilt = tensors[name].clone()
        spoilt.view(-1)[0] = float("nan")
        save_file(tensors | {name: spoilt}, folder / SAELENS)
        refused(folder, "has a NaN or an infinity", NotFinite)
        save_file(tensors | {name: tensors[name][:-1].clone()}, folder / SAELENS)
        refused(folder, "has the shape|of another width")
    save_file(tensors | {"W_dec": torch.zeros(3)}, folder / SAELENS)
    refused(folder, "directions has the shape")
    empty = {name: tensor[..., :0] for name, tensor in tensors.items()}
    nothing = {"W_dec": tensors["W_dec"][:0], "b_dec": tensors["b_dec"]}
    save_file(empty | nothing, folder / SAELENS)
    refused(folder, "holds no number")
    del tensors["b_dec"]
    save_file(tensors, folder / SAELENS)
    refused(folder, "do not go together .KeyError: 'b_dec'")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architecture": "temporal"}, "of an unknown kind, 'temporal'"),
        ({"architecture": ["topk"]}, "do not go together"),
        ({"architecture": "topk", "k": 99}, "k is 99, and there are 16 features"),
        ({"architecture": "topk", "k": "many"}, "do not go together"),
        ({"architecture": "topk", "k": 2.7}, "do not go together"),
        ({"architecture": "topk", "k": True}, "do not go together"),
        ({"normalize_activations": "covariance_whitening"}, "it norms states by"),
        ({"metadata": "none"}, "do not go together"),
        ({"metadata": {"hook_name": 7}}, "do not go together"),
    ],
)
def test_configurations_that_say_something_else(
    copied: Callable[[str], Path], fields: dict[str, object], words: str
) -> None:
    folder = copied("saelens_standard")
    changed(folder, "cfg.json", **fields)
    refused(folder, words)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        (
            "jumprelu",
            {"architecture": "standard"},
            "ReLU, and holds threshold, as JumpReLU",
        ),
        (
            "gated",
            {"architecture": "standard"},
            "itself ReLU, and holds b_gate, as gated",
        ),
        (
            "topk",
            {"architecture": "standard"},
            "itself ReLU, and holds k, as TopK does",
        ),
        ("jumprelu", {"architecture": "gated"}, "gated, and holds threshold, as Jump"),
        ("gated", {"architecture": "jumprelu"}, "JumpReLU, and holds no threshold"),
        ("standard", {"architecture": "jumprelu"}, "JumpReLU, and holds no threshold"),
        ("standard", {"architecture": "gated"}, "itself gated, and holds no b_gate"),
        ("standard", {"architecture": "topk"}, "itself TopK, and holds no k"),
    ],
)
def test_an_activation_other_than_what_the_files_hold(
    copied: Callable[[str], Path], name: str, fields: dict[str, object], words: str
) -> None:
    folder = copied(f"saelens_{name}")
    changed(folder, "cfg.json", **fields)
    refused(folder, words, FileError)


def test_a_class_other_than_what_the_pickle_holds(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("dictionary_learning_BatchTopKSAE")
    changed(folder, "config.json", trainer={"dict_class": "AutoEncoder", "layer": 1})
    refused(folder, "itself ReLU, and holds threshold, as JumpReLU does", FileError)


def test_a_pickle_runs_no_code(copied: Callable[[str], Path]) -> None:
    folder = copied("dictionary_learning_AutoEncoderTopK")
    config = (folder / "config.json").read_text()
    changed(folder, "config.json", trainer={"dict_class": "Other"})
    refused(folder, "of an unknown kind, 'Other'")
    (folder / "config.json").write_text(config)
    (folder / "ae.pt").write_bytes(pickle.dumps(Hostile()))
    refused(folder, "it is damaged, cut short")
    torch.save({"encoder.weight": Hostile()}, folder / "ae.pt")
    refused(folder, "it is damaged, cut short")
    # Four numbers that say they are a terabyte.
    torch.save({"b_dec": torch.zeros(1).expand(2**38)}, folder / "ae.pt")
    refused(folder, "its tensors are larger than the file")
    # Python fills with zeros what a pickle of a few bytes asks for.
    zeros = b"\x80\x02cbuiltins\nbytearray\n(J\x00\x00\x00\x20tR."
    with zipfile.ZipFile(folder / "ae.pt", "w") as archive:
        archive.writestr("archive/data.pkl", zeros)
        archive.writestr("archive/version", "3\n")
    refused(folder, "it holds more than tensors")
    # An older form, with an archive behind it.
    old = io.BytesIO()
    torch.save({"b_dec": torch.zeros(4)}, old, _use_new_zipfile_serialization=False)
    archived = (folder / "ae.pt").read_bytes()
    (folder / "ae.pt").write_bytes(old.getvalue() + archived)
    refused(folder, "it holds more than tensors")


def test_archives_that_unpack_without_end(copied: Callable[[str], Path]) -> None:
    folder = copied("gemma-scope-2b-pt-transcoders")
    folder = folder / "layer_1" / "width_16k" / "average_l0_9"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)}
    )
    path = folder / "params.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w_enc.npy", header.getvalue() + bytes(2**26))
    refused(folder, "it unpacks to more than")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w_enc.npy", header.getvalue())
    refused(folder, "it is damaged, cut short")
    np.savez(path, w_enc=np.array([Hostile()], dtype=object))
    refused(folder, "it is damaged, cut short.*Object arrays cannot be loaded")


def test_a_set_needs_a_layer_that_it_has(copied: Callable[[str], Path]) -> None:
    folder = copied("cross_layer_relu")
    refused(folder, "it holds one for each layer")
    from_file = hs.Dictionary.read(folder / "W_enc_1.safetensors")
    assert (from_file.reads, from_file.writes) == ("layer.2.mid", "layer.2.mlp")
    with pytest.raises(Error, match=r"it has no file for layer\.9"):
        hs.Dictionary.read(folder, site="layer.9")
    with pytest.raises(Error, match=r"they write to layer\.2\.mlp, layer\.3\.mlp"):
        from_file.at("layer.1.mlp")
    config = folder / "config.yaml"
    for content in ("a: &a [x]\nb: [*a, *a]", "feature_input_hook: [", "\x00" * 2**21):
        config.write_text(content)
        with pytest.raises(Error, match=r"do not go together|far too long"):
            hs.Dictionary.read(folder, site="layer.1")


def test_a_dictionary_for_another_width_or_site() -> None:
    model = hs.load((tiny_model("llama"), None))
    folder = FILES / "saelens_standard"
    with pytest.raises(Error, match=r"width 6, and those at layer\.2 have 64"):
        hs.Dictionary.read(folder, model, texts=[[1, 2, 3]])
    with pytest.raises(Error, match=r"layer\.77"):
        hs.Dictionary.read(folder, model, "layer.77", texts=[[1, 2, 3]])
    dictionary = hs.Dictionary.read(folder)
    with pytest.raises(NotFinite, match="they hold a NaN or an infinity"):
        dictionary.encode(torch.full((2, 6), torch.nan))
    with pytest.raises(Error, match="states of width 5"):
        dictionary.encode(torch.zeros(2, 5))


def test_files_that_name_no_known_site(copied: Callable[[str], Path]) -> None:
    folder = copied("dictionary_learning_AutoEncoder")
    trainer = {"dict_class": "AutoEncoder", "layer": 1}
    for name in ("attn_pattern_layer_1", None):
        changed(folder, "config.json", trainer={**trainer, "submodule_name": name})
        refused(folder, "no site that is known here")
        assert hs.Dictionary.read(folder, site="layer.3.attn").reads == "layer.3.attn"
    folder = copied("saelens_standard")
    changed(folder, "cfg.json", metadata={"hook_name": "somewhere"})
    refused(folder, "no site that is known here")
    folder = copied("saelens_transcoder")
    changed(folder, "cfg.json", metadata={"hook_name": "blocks.1.hook_mlp_in"})
    refused(folder, "is a transcoder, and does not name both of its sites")
    folder = copied("sparsify_transcode")
    (folder / "layers.1.mlp").rename(folder / "renamed")
    refused(folder / "renamed", "is a transcoder, and does not name both of its sites")


def test_a_folder_of_gemma_scope_says_where_it_lies(tmp_path: Path) -> None:
    source = FILES / "gemma-scope-2b-pt-transcoders/layer_1/width_16k/average_l0_9"
    for place, sites in {
        "my-research/gemma-scope-2b-pt-mlp-canonical": ("layer.2.mlp", "layer.2.mlp"),
        "models--google--gemma-scope-2b-pt-att/snapshots": ("layer.2.attn.z",) * 2,
        "res/transcoder_all": ("layer.2.mlp.input", "layer.2.mlp"),
    }.items():
        folder = shutil.copytree(source, tmp_path / place / "layer_1" / "width_16k")
        dictionary = hs.Dictionary.read(folder)
        assert (dictionary.reads, dictionary.writes) == sites
    folder = shutil.copytree(source, tmp_path / "my-research" / "layer_1")
    refused(Path(folder), "no site that is known here")


def test_a_configuration_without_a_hook_leaves_what_the_path_says(
    copied: Callable[[str], Path],
) -> None:
    top = copied("gemma-scope-2-tiny")
    (folder,) = (top / "transcoder").iterdir()
    before = hs.Dictionary.read(folder)
    config = json.loads((folder / "config.json").read_text())
    fewer = {name: config[name] for name in config if "hook" not in name}
    (folder / "config.json").write_text(json.dumps(fewer))
    after = hs.Dictionary.read(folder)
    assert (after.reads, after.writes) == (before.reads, before.writes)


def test_one_downloaded_layer_of_a_set(copied: Callable[[str], Path]) -> None:
    for name in ("cross_layer_relu", "circuit_tracer_relu", "gemma-scope-2-tiny"):
        folder = copied(name)
        if name.startswith("gemma"):
            folder = folder / "clt" / "width_16k_l0_small"
        for file in folder.glob("*_[01].safetensors"):
            file.unlink()
        dictionary = hs.Dictionary.read(folder)
        assert dictionary.writes == "layer.3.mlp"
        with pytest.raises(Error, match=r"it has no file for layer\.1"):
            hs.Dictionary.read(folder, site="layer.1")


def test_a_topk_transcoder_of_circuit_tracer(copied: Callable[[str], Path]) -> None:
    folder = copied("circuit_tracer_relu")
    config = folder / "config.yaml"
    text = config.read_text()
    config.write_text(f"{text}activation_function: topk\nk: 4\n")
    encoding = hs.Dictionary.read(folder, site="layer.1").encoding
    assert (encoding.gate, encoding.k) == ("topk", 4)
    config.write_text(f"{text}activation_function: topk\n")
    with pytest.raises(FileError, match="itself TopK, and holds no k"):
        hs.Dictionary.read(folder, site="layer.1")


@pytest.mark.parametrize(
    "shapes",
    [
        {"W_dec": (10**9, 0), "W_enc": (0, 10**9), "threshold": (1,)},
        {"W_dec": (2, 2 * 10**6, 0), "W_enc": (0, 2), "threshold": (2,)},
        {"W_dec": (2, 10**5, 1), "W_enc": (1, 2), "threshold": (2,)},
    ],
)
def test_a_shape_without_numbers_or_with_a_million_layers(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    folder = tmp_path / "gemma-scope-2b-pt-res" / "layer_1"
    folder.mkdir(parents=True)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {"b_enc": torch.zeros(2), "b_dec": torch.zeros(1)}
    save_file(tensors, folder / "params.safetensors")
    began = time.process_time()
    refused(folder, r"holds no number|it writes to 99,999 layers|and the file has")
    assert time.process_time() - began < 1


def test_numbers_where_there_should_be_tensors(copied: Callable[[str], Path]) -> None:
    folder = copied("saelens_standard")
    tensors = load_file(folder / SAELENS)
    for name in tensors:
        save_file(tensors | {name: torch.tensor(1.0)}, folder / SAELENS)
        refused(folder, "has the shape|do not go together")


def test_a_configuration_of_spaces_is_read_at_once(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("circuit_tracer_relu")
    with (folder / "config.yaml").open("a") as file:
        file.write("\na:" + " " * 200_000 + "\"x\n'\n")
    began = time.process_time()
    assert hs.Dictionary.read(folder, site="layer.1").writes == "layer.1.mlp"
    assert time.process_time() - began < 1


def test_weights_that_are_no_file(copied: Callable[[str], Path]) -> None:
    folder = copied("saelens_standard")
    (folder / SAELENS).unlink()
    (folder / SAELENS).symlink_to("/dev/zero")
    refused(folder, "is a device|no regular file")
    (folder / SAELENS).unlink()
    os.mkfifo(folder / SAELENS)
    refused(folder, "is a named pipe|no regular file")


def test_a_remedy_can_be_followed(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("sparsify_topk")
    for number in (0, 10):
        shutil.copytree(folder / "layers.1", folder / f"layers.{number}")
    refused(
        folder, r"Give one of the 3 folders below: layers\.0, layers\.1, layers\.10"
    )
    monkeypatch.chdir(folder)
    with pytest.raises(FileError, match="hf download google/gemma-scope-2b-pt-res "):
        hs.Dictionary.read("google/gemma-scope-2b-pt-res")
    folder = copied("saelens_standard")
    for kind in ("batchtopk", "matryoshka_batchtopk", "temporal"):
        changed(folder, "cfg.json", architecture=kind)
        refused(folder, r"save_inference_model\(folder\)")
    (folder / "cfg.json").unlink()
    refused(folder, "it has no cfg.json. Read it with the library that made it")
    refused(folder / ("x" * 300), "File name too long")
    refused(Path(), r"a dictionary from \.: its files")


def test_a_save_is_whole_or_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (hs.Dictionary.of(torch.eye(4) + k, f"layer.{k + 1}") for k in (0, 1))
    old, new = (replace(one, encoding=Encoding("relu")) for one in (old, new))
    folder = tmp_path / "sae"
    old.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    inodes = os.fsync, os.replace
    for fails in range(4):
        calls: list[Any] = []

        def failing(*given: Any, fails: int = fails, calls: Any = calls) -> None:
            calls.append(given)
            if len(calls) > fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            inodes[len(given) - 1](*given)

        with monkeypatch.context() as patched:
            # The file, the file, the weights, the words.
            patched.setattr(os, "fsync", failing)
            patched.setattr(os, "replace", failing)
            with pytest.raises(FileError, match="No space left .* disk is full"):
                new.save(folder)
        if fails < 2:
            assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        else:
            # The weights hold the configuration too, so that nothing is lost.
            left, one = hs.Dictionary.read(folder), (old, new)[fails - 2]
            assert left.reads == one.reads
            assert torch.equal(left.directions, one.directions)
    new.save(folder)
    again = hs.Dictionary.read(folder)
    assert again.reads == "layer.2"
    assert torch.equal(again.directions, new.directions)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    new.save(folder)
    assert first == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_save_while_it_is_read(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("saelens_standard")
    read = layouts._tensors

    def reading(path: Path, *more: str) -> Any:
        changed(folder, "cfg.json", apply_b_dec_to_input=False)
        return read(path, *more)

    monkeypatch.setattr(layouts, "_tensors", reading)
    refused(folder, "it was saved anew while it was read")
