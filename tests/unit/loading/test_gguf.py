"""A GGUF file: its header is not believed, and its weights come out exactly."""

import importlib.util
import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from fuzz.gguf_file import PIECES, write_gguf
from hiddenscope import progress
from hiddenscope.errors import Damaged, FileError, LoadError
from hiddenscope.loading import open_source
from hiddenscope.loading.gguf import read_header
from tests.unit.loading.conftest import tiny_llama


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    return tiny_llama(vocab_size=len(PIECES))


@pytest.fixture(scope="session")
def saved_gguf(
    tmp_path_factory: pytest.TempPathFactory, tiny: LlamaForCausalLM
) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny, bos=True)
    return path


@pytest.mark.parametrize("bos", [True, False, None])
def test_a_gguf_gives_the_same_numbers_and_the_first_token_it_asks_for(
    bos: bool | None,
    tiny: LlamaForCausalLM,
    tmp_path: Path,
    own_cache: Path,
    no_network: list[object],
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, bos)
    first, again = open_source(path, device="cpu"), open_source(path, device="cpu")
    assert no_network == [] and capfd.readouterr().err == ""
    assert type(first.module) is LlamaForCausalLM and first.name == "tiny.gguf"
    assert first.revision is not None and first.revision.startswith("sha256:")
    ids = torch.tensor([[1, 5, 40, 262, 7]])
    with torch.no_grad():
        want = tiny(ids).logits
        assert torch.equal(first.module(ids).logits, want) and torch.equal(
            again.module(ids).logits, want
        )
    for tokenizer in (first.tokenizer, again.tokenizer):
        assert tokenizer is not None and tokenizer.model_max_length == 64
        # Without the key, llama.cpp opens a text of a sentencepiece vocabulary with
        # <s>.
        assert (tokenizer("ab")["input_ids"][0] == 1) is (bos is not False)
    (place,) = (own_cache / "gguf").iterdir()
    assert {file.name for file in place.iterdir()} >= {
        "model.safetensors",
        "config.json",
        "hiddenscope.json",
    }


def test_the_neighbours_of_a_gguf_are_not_read(
    saved_gguf: Path,
    saved_llama: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = tmp_path / "beside"
    # Another model's config, tokenizer and weights.
    shutil.copytree(saved_llama, beside)
    (beside / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "ByT5Tokenizer",
                "add_bos_token": False,
                "chat_template": "neighbour",
            }
        )
    )
    shutil.copy(saved_gguf, beside / "tiny.gguf")
    first = open_source(beside / "tiny.gguf")
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "another"))
    alone = open_source(saved_gguf)
    for loaded in (first, alone):
        assert loaded.tokenizer is not None and loaded.tokenizer.vocab_size == len(
            PIECES
        )
        assert loaded.module.config.vocab_size == len(PIECES)
    texts = ["ab a b", "<s>ab", "xyz"]
    assert [first.tokenizer(text)["input_ids"] for text in texts] == [
        alone.tokenizer(text)["input_ids"] for text in texts
    ]
    assert first.tokenizer.chat_template == alone.tokenizer.chat_template
    assert [path.name for path in (own_cache / "gguf").iterdir()] == [
        path.name for path in (tmp_path / "another" / "gguf").iterdir()
    ]


@pytest.mark.parametrize("place", ["file", "file/cache", "x" * 300])
def test_a_cache_that_cannot_be_written_is_said(
    saved_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("a file in the place of a folder")
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / place))
    with pytest.raises(
        FileError, match="set HIDDENSCOPE_CACHE to a folder that can be written"
    ):
        open_source(saved_gguf)
    with pytest.raises(
        FileError, match="set HIDDENSCOPE_CACHE to a folder that can be written"
    ):
        open_source("smollm2")


def test_conversion_shows_its_progress(
    saved_gguf: Path, own_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    progress.show(True)
    try:
        open_source(saved_gguf)
    finally:
        progress.show(None)
    shown = capfd.readouterr().err
    assert "Converting" in shown and "de-quantizing" not in shown


def test_the_header_is_read_as_the_library_reads_it(saved_gguf: Path) -> None:
    ours, theirs = read_header(saved_gguf), gguf.GGUFReader(saved_gguf)
    assert ours.held.tensors == len(theirs.tensors)
    assert ours.elements == sum(int(tensor.n_elements) for tensor in theirs.tensors)
    for key, value in ours.metadata.items():
        want = theirs.fields[key].contents()
        assert value == (len(want) if isinstance(want, list) else want)


def test_every_cut_is_found(saved_gguf: Path, tmp_path: Path) -> None:
    content = saved_gguf.read_bytes()
    for length in [*range(200), *range(200, len(content), 997), len(content) - 64]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[:length])
        with pytest.raises(Damaged, match=r"cut\.gguf"):
            read_header(path)


def absurd() -> dict[str, bytes]:
    text = struct.pack("<Q", 3) + b"key"
    start = b"GGUF" + struct.pack("<I", 3)
    one_key, one_tensor = struct.pack("<QQ", 0, 1), struct.pack("<QQ", 1, 0)
    return {
        "magic": b"GGML" + bytes(60),
        "version": b"GGUF" + struct.pack("<I", 99) + bytes(60),
        "big-endian": b"GGUF" + struct.pack(">I", 3) + bytes(60),
        "tensors": start + struct.pack("<QQ", 2**60, 0) + bytes(60),
        "keys": start + struct.pack("<QQ", 0, 2**60) + bytes(60),
        "key length": start + one_key + struct.pack("<Q", 2**62) + bytes(60),
        "string length": start
        + one_key
        + text
        + struct.pack("<IQ", 8, 2**62)
        + bytes(60),
        "array length": start
        + one_key
        + text
        + struct.pack("<IIQ", 9, 4, 2**62)
        + bytes(60),
        "array of strings": start
        + one_key
        + text
        + struct.pack("<IIQQ", 9, 8, 2, 2**62)
        + bytes(60),
        "nested arrays": start
        + one_key
        + text
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 40,
        "value type": start + one_key + text + struct.pack("<I", 77) + bytes(60),
        "axes": start + one_tensor + text + struct.pack("<I", 2**31) + bytes(60),
        "shape": start
        + one_tensor
        + text
        + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)
        + bytes(60),
        "type": start
        + one_tensor
        + text
        + struct.pack("<IQIQ", 1, 4, 9999, 0)
        + bytes(60),
        "offset": start
        + one_tensor
        + text
        + struct.pack("<IQIQ", 1, 4, 0, 2**62)
        + bytes(60),
        "twice": start
        + struct.pack("<QQ", 0, 2)
        + (text + struct.pack("<IB", 0, 1)) * 2
        + bytes(60),
        "alignment": start
        + one_key
        + struct.pack("<Q", 17)
        + b"general.alignment"
        + struct.pack("<II", 4, 0),
    }


ABSURD = absurd()


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_header_is_damaged_before_anybody_allocates(
    name: str, tmp_path: Path, own_cache: Path
) -> None:
    (tmp_path / "absurd.gguf").write_bytes(ABSURD[name])
    with pytest.raises(Damaged, match=r"absurd\.gguf"):
        open_source(tmp_path / "absurd.gguf")
    assert not own_cache.exists()


def test_random_damage_never_ends_otherwise(saved_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(saved_gguf.read_bytes())
    draw = np.random.default_rng(0)
    for _ in range(300):
        spoilt = bytearray(content)
        spoilt[int(draw.integers(4, 2000))] = int(draw.integers(256))
        (tmp_path / "spoilt.gguf").write_bytes(spoilt)
        try:
            read_header(tmp_path / "spoilt.gguf")
        except Damaged:
            continue


@pytest.mark.parametrize("library", ["gguf", "accelerate"])
def test_what_is_missing_is_said(
    saved_gguf: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == library else find(name, *a),
    )
    with pytest.raises(LoadError, match=f"pip install {library}"):
        read_header(saved_gguf)


def test_an_architecture_nobody_knows_leaves_no_cache(
    tmp_path: Path, own_cache: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "oddformer")
    writer.add_tensor("x", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match=r"odd\.gguf"):
        open_source(tmp_path / "odd.gguf")
    assert [file for file in own_cache.rglob("*") if file.is_file()] == []
    assert list((own_cache / "gguf").iterdir()) == []
