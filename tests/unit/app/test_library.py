"""What the page may choose from: models, datasets and states below the root, under
opaque names, whatever lies around there.
"""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import hiddenscope as hs
from hiddenscope.app.library import STATES_FORMATS, Library, store_identity
from hiddenscope.app.routes import Desk
from hiddenscope.app.schemas import ModelChoice
from hiddenscope.directions.encoding import Encoding
from hiddenscope.errors import LoadError, TextError, UnknownModel
from tests.workbench.serving import Bench, settings_in


def model(folder: Path) -> Path:
    """Make a folder that looks like a model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def header(path: Path, content: Any) -> None:
    """Write a .safetensors file that holds this header, and nothing else."""
    packed = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed)


def claims(states: Any, shape: Any = (1, 2, 3)) -> dict[str, Any]:
    notes = {"format": STATES_FORMATS[0], "states": json.dumps(states)}
    return {"__metadata__": notes, "values": {"shape": shape}}


def folders(found: Library) -> list[str]:
    return [one.label for one in found.models() if one.source == "folder"]


def test_files_that_are_not_what_their_names_say_hide_no_others(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    tiny = model(root / "models" / "tiny")
    (root / "a.gguf").write_bytes(b"")
    (root / "models" / "bare").mkdir()
    (root / "models" / "bare" / "config.json").write_text("{}")
    model(root / ".hidden" / "one")
    model(root / "a" / "b" / "c" / "d" / "e")
    model(root / "a" / "b" / "c" / "d" / "too" / "deep")
    (root / "loop").symlink_to("loop")
    (root / "all").symlink_to(".")
    (root / "latest").symlink_to(tiny)
    (root / "outside").symlink_to(model(tmp_path / "outside"))
    model(Path(os.fsdecode(os.fsencode(root) + b"/bad-\xff")))
    header(root / "deep.safetensors", b"[" * 100_000)
    header(root / "empty.safetensors", claims({}))
    header(root / "bare.safetensors", claims({"": {}}))
    wrong = {"sites": ["x"], "count": "x", "source": []}
    header(root / "words.safetensors", claims({"": wrong}, [1, "x", 3]))
    found = Library(settings_in(tmp_path, root=root))
    assert folders(found) == ["a.gguf", "latest", "models/tiny", "a/b/c/d/e"]
    assert found.stores() == []


def test_names_are_opaque_and_only_those_of_what_is_there_are_taken(
    tmp_path: Path,
) -> None:
    path = model(tmp_path / "root" / "one")
    found = Library(settings_in(tmp_path, root=tmp_path / "root"))
    name = next(one.name for one in found.models() if one.source == "folder")
    assert name.startswith("folder:") and "one" not in name
    assert found.model_path(name) == str(path)
    assert found.model_path("smollm2") == "smollm2"
    with pytest.raises(UnknownModel, match="there is none below the root"):
        found.model_path("folder:0123456789abcdef")
    with pytest.raises(UnknownModel, match="there is none below the root"):
        found.store_path(name)
    bare = Library(settings_in(tmp_path))
    assert folders(bare) == [] and bare.stores() == []
    with pytest.raises(UnknownModel, match="no folder was given"):
        bare.model_path(name)


def test_dictionaries_are_offered_and_lead_nowhere_outside_the_root(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    basis = hs.Dictionary.of(torch.eye(4), "layer.1")
    basis = replace(basis, encoding=Encoding("relu"))
    for folder in (root / "sae", tmp_path / "outside"):
        basis.save(folder)
    (root / "link").symlink_to(tmp_path / "outside")
    found = Library(settings_in(tmp_path, root=root))
    ((name, label),) = ((one.name, one.label) for one in found.dictionaries())
    assert (label, "sae" in name) == ("sae", False)
    assert found.dictionary_path(name) == root / "sae"
    with pytest.raises(UnknownModel, match="there is none below the root"):
        found.dictionary_path("dictionary:0123456789abcdef")
    arguments = {"texts": "a", "dictionary": name, "site": "layer.1"}
    asked = {
        "analysis": "features",
        "model": {"name": "smollm2"},
        "arguments": arguments,
    }
    desk = Desk(settings_in(tmp_path), None, None, found)  # type: ignore[arg-type]
    key, request = desk.resolve(asked)
    assert request["arguments"]["dictionary"] == str(root / "sae")
    assert desk.names_in_code(asked)[name].path == str(root / "sae")
    # Another file in its folder makes another question.
    (root / "sae" / "more").write_text("x")
    assert desk.resolve(asked)[0] != key
    asked["arguments"] = {**arguments, "dictionary": "pca"}
    assert desk.resolve(asked)[1]["arguments"]["dictionary"] == "pca"


def test_nothing_in_a_folder_leads_outside_the_root(tmp_path: Path) -> None:
    """But the snapshots of a hub's cache, which link to the blobs beside them."""
    outside, root = model(tmp_path / "outside"), tmp_path / "root"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "1_Pooling"):
        path = model(root / name.partition(".")[0]) / name
        path.unlink(missing_ok=True)
        path.symlink_to(outside / "model.safetensors")
    # By way of another folder, which lies below the root itself.
    (root / "way").mkdir()
    (root / "way" / "config.json").symlink_to(outside / "config.json")
    (model(root / "indirect") / "1_Pooling").symlink_to(root / "way")
    adapter(root / "adapter", str(root / "config"))
    whole = model(root / "whole")
    (whole / "same.json").symlink_to("config.json")
    (whole / "shared").symlink_to(root / "shared")
    (root / "shared").mkdir()
    snapshot = model(tmp_path / "hub" / "models--some--body" / "snapshots" / "abc")
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "def")
    (snapshot / "model.safetensors").symlink_to("../../blobs/def")
    found = Library(settings_in(tmp_path, root=root))
    assert folders(found) == ["adapter", "whole"]
    names = {one.label: one.name for one in found.models()}
    with pytest.raises(LoadError, match="not below the root"):
        found.model_identity(ModelChoice(name=names["adapter"]))
    for place in (tmp_path / "hub", snapshot.parent):
        found = Library(settings_in(tmp_path, root=place))
        assert [Path(label).name for label in folders(found)] == ["abc"]
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(outside / "config.json")
    assert folders(found) == []
    (root / "sae").mkdir()
    (root / "sae" / "cfg.json").symlink_to(outside / "config.json")
    (root / "sae" / "sae_weights.safetensors").touch()
    assert Library(settings_in(tmp_path, root=root)).dictionaries() == []


def test_a_model_is_told_from_others_by_its_files_its_dtype_and_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is yet to be downloaded nobody knows the version: two servers may
    get two.
    """
    cached = tmp_path / "hub" / "models--some--body"
    model(cached / "snapshots" / "x")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc\n")
    (tmp_path / "hub" / "models--no--weights").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    path = model(tmp_path / "root" / "one")
    first, second = (
        Library(settings_in(tmp_path, root=tmp_path / "root")) for _ in range(2)
    )
    hub = [one.name for one in first.models() if one.source == "hub"]
    assert hub == ["some/body"]

    def identity(name: str, found: Library = first, **options: Any) -> str:
        return found.model_identity(ModelChoice(name=name, **options))

    assert identity("some/body") == "some/body None abc"
    assert identity("nobody/nothing") == identity("nobody/nothing")
    assert identity("nobody/nothing") != identity("nobody/nothing", second)
    assert identity("smollm2") == identity("smollm2", second)
    assert identity("smollm2") != identity("smollm2", dtype="float16")
    name = next(one.name for one in first.models() if one.source == "folder")
    before = identity(name)
    assert before == identity(name, second)
    (path / "model.safetensors").write_bytes(b"more")
    assert identity(name) != before


def adapter(folder: Path, base: str) -> None:
    model(folder)
    (folder / "config.json").unlink()
    config = {"base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_adapters_are_offered_and_lead_nowhere_outside_the_root(tmp_path: Path) -> None:
    """A result is that of the adapter and its base: a change of either is another."""
    root = tmp_path / "root"
    base = model(root / "models" / "one")
    bases = {
        "hub": "some/body",
        "inside": str(base),
        "itself": str(root / "itself"),
        "none": "",
        "outside": str(model(tmp_path / "outside")),
        "stacked": str(root / "outside"),
    }
    for name, path in bases.items():
        adapter(root / name, path)
    found = Library(settings_in(tmp_path, root=root))
    names = {one.label: one.name for one in found.models() if one.source == "folder"}
    assert names.keys() == {*bases, "models/one"}

    def identity(label: str) -> str:
        return found.model_identity(ModelChoice(name=names[label]))

    before = identity("inside")
    for label in ("hub", "itself", "none"):
        assert identity(label)
    for label in ("outside", "stacked"):
        with pytest.raises(LoadError, match="adapter of .*outside, .* not below the"):
            identity(label)
    (base / "model.safetensors").write_bytes(b"more")
    assert identity("inside") != before


def test_a_model_without_a_head_is_known_before_it_is_loaded(bench: Bench) -> None:
    listed = bench.ask("GET", "/api/models").json
    folders = {one["label"]: one["headless"] for one in listed if one["here"]}
    assert folders["models/encoder"] and not folders["models/tiny"]


def test_a_store_that_grew_is_another(tmp_path: Path) -> None:
    """A unit that was committed later changes what is found, so results of before are
    not shown again. What changes is a folder in the store's folder, whose own time
    stays as it was.
    """
    (tmp_path / "commits").mkdir()
    (tmp_path / "plan.json").write_text("{}")
    before = store_identity(tmp_path)
    (tmp_path / "commits" / "000000.json").write_text("{}")
    assert store_identity(tmp_path) != before
    (tmp_path / "commits" / "000000.json").unlink()
    assert store_identity(tmp_path) == before


def test_a_result_of_one_device_is_not_that_of_another(tmp_path: Path) -> None:
    asked = {
        "analysis": "grid",
        "model": {"name": "smollm2"},
        "arguments": {"text": "a"},
    }
    nothing: Any = None
    keys = set()
    for device in (None, "cpu", "cuda"):
        settings = settings_in(tmp_path, device=device)
        keys.add(Desk(settings, nothing, nothing, Library(settings)).resolve(asked)[0])
    assert len(keys) == 3


def test_datasets_are_listed_with_what_they_hold(tmp_path: Path) -> None:
    found = Library(settings_in(tmp_path))
    shipped = next(one for one in found.datasets() if one.name == "cities-incomplete")
    assert sum(shipped.labels.values()) == shipped.texts > 20
    assert len(shipped.sample) == 5 and shipped.groups is None
    assert found.dataset("cities-incomplete") is None
    with pytest.raises(TextError, match="No dataset 'nothing'.*cities-incomplete"):
        found.dataset("nothing")
    with pytest.raises(TextError, match="not uploaded here, or was dropped"):
        found.dataset("upload:0123456789abcdef")
