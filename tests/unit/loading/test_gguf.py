"""A GGUF file: its header is not believed, and its weights come out exactly."""

import contextlib
import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.errors import Damaged, FileError, LoadError
from hiddenscope.loading import open_source
from hiddenscope.loading.gguf import read_header
from labs.fuzz.gguf_file import PIECES, write_gguf
from tests.folders import tiny_llama


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
    ids = torch.tensor([[1, 5, 40, 262, 7]])
    with torch.no_grad():
        want = tiny(ids).logits
    # It is converted at the first load alone.
    for _ in range(2):
        loaded = open_source(path, device="cpu")
        assert no_network == []
        assert capfd.readouterr().err == ""
        assert type(loaded.module) is LlamaForCausalLM
        assert loaded.name == "tiny.gguf"
        assert loaded.revision is not None
        assert loaded.revision.startswith("sha256:")
        with torch.no_grad():
            assert torch.equal(loaded.module(ids).logits, want)
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.model_max_length == 64
        # Without the key, llama.cpp opens a text of a sentencepiece vocabulary with
        # <s>.
        assert (loaded.tokenizer("ab")["input_ids"][0] == 1) is (bos is not False)
    (place,) = (own_cache / "gguf").iterdir()
    names = {file.name for file in place.iterdir()}
    assert names >= {"model.safetensors", "config.json", "hiddenscope.json"}


def test_the_neighbours_of_a_gguf_are_not_read(
    saved_gguf: Path,
    llama: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Another model's config, tokenizer and weights lie beside it."""
    neighbour = {"tokenizer_class": "ByT5Tokenizer", "chat_template": "neighbour"}
    (llama / "tokenizer_config.json").write_text(json.dumps(neighbour))
    shutil.copy(saved_gguf, llama / "tiny.gguf")
    progress.show(True)
    try:
        first = open_source(llama / "tiny.gguf")
    finally:
        progress.show(None)
    shown = capfd.readouterr().err
    assert "Converting" in shown and "de-quantizing" not in shown
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "another"))
    alone = open_source(saved_gguf)
    assert first.module.config.vocab_size == len(PIECES)
    assert first.tokenizer is not None and alone.tokenizer is not None
    assert first.tokenizer.vocab_size == alone.tokenizer.vocab_size == len(PIECES)
    for text in ("ab a b", "<s>ab", "xyz"):
        assert first.tokenizer(text)["input_ids"] == alone.tokenizer(text)["input_ids"]
    assert first.tokenizer.chat_template == alone.tokenizer.chat_template
    (place,) = (own_cache / "gguf").iterdir()
    (other,) = (tmp_path / "another" / "gguf").iterdir()
    assert place.name == other.name


def test_a_cache_that_cannot_be_written_is_said(
    saved_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file in the place of a folder")
    for place in ("file", "file/cache", "x" * 300):
        monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / place))
        for source in (saved_gguf, "smollm2"):
            with pytest.raises(FileError, match="set HIDDENSCOPE_CACHE to a folder"):
                open_source(source)


def test_the_header_is_read_as_the_library_reads_it(saved_gguf: Path) -> None:
    ours, theirs = read_header(saved_gguf), gguf.GGUFReader(saved_gguf)
    assert ours.held.tensors == len(theirs.tensors)
    assert ours.elements == sum(int(tensor.n_elements) for tensor in theirs.tensors)
    for key, value in ours.metadata.items():
        want = theirs.fields[key].contents()
        assert value == (len(want) if isinstance(want, list) else want)


def test_every_cut_is_found_and_random_damage_ends_no_otherwise(
    saved_gguf: Path, tmp_path: Path
) -> None:
    content, path = saved_gguf.read_bytes(), tmp_path / "spoilt.gguf"
    lengths = [*range(0, 200, 5), *range(200, len(content), 9973)]
    for length in (*lengths, len(content) - 64, len(content) - 4):
        path.write_bytes(content[:length])
        with pytest.raises(Damaged, match=r"spoilt\.gguf"):
            read_header(path)
    draw = np.random.default_rng(0)
    for _ in range(60):
        spoilt = bytearray(content)
        spoilt[int(draw.integers(4, 2000))] = int(draw.integers(256))
        path.write_bytes(spoilt)
        with contextlib.suppress(Damaged):
            read_header(path)


START = b"GGUF" + struct.pack("<I", 3)
KEY = START + struct.pack("<QQ", 0, 1)
TENSOR = START + struct.pack("<QQ", 1, 0)
TEXT = struct.pack("<Q", 3) + b"key"
# What begins a file, which zeros follow.
ABSURD = {
    "magic": b"GGML",
    "version": b"GGUF" + struct.pack("<I", 99),
    "big-endian": b"GGUF" + struct.pack(">I", 3),
    "tensors": START + struct.pack("<QQ", 2**60, 0),
    "keys": START + struct.pack("<QQ", 0, 2**60),
    "key length": KEY + struct.pack("<Q", 2**62),
    "string length": KEY + TEXT + struct.pack("<IQ", 8, 2**62),
    "array length": KEY + TEXT + struct.pack("<IIQ", 9, 4, 2**62),
    "array of strings": KEY + TEXT + struct.pack("<IIQQ", 9, 8, 2, 2**62),
    "nested arrays": KEY + TEXT + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40,
    "value type": KEY + TEXT + struct.pack("<I", 77),
    "axes": TENSOR + TEXT + struct.pack("<I", 2**31),
    "shape": TENSOR + TEXT + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0),
    "type": TENSOR + TEXT + struct.pack("<IQIQ", 1, 4, 9999, 0),
    "offset": TENSOR + TEXT + struct.pack("<IQIQ", 1, 4, 0, 2**62),
    "overlap": START
    + struct.pack("<QQ", 2, 0)
    + TEXT
    + struct.pack("<IQIQ", 1, 4, 0, 0)
    + struct.pack("<Q", 1)
    + b"k"
    + struct.pack("<IQIQ", 1, 4, 0, 0),
    "twice": START + struct.pack("<QQ", 0, 2) + (TEXT + struct.pack("<IB", 0, 1)) * 2,
    "alignment": KEY
    + struct.pack("<Q", 17)
    + b"general.alignment"
    + struct.pack("<II", 4, 0),
}


def test_an_absurd_header_is_damaged_before_anybody_allocates(
    tmp_path: Path, own_cache: Path
) -> None:
    path = tmp_path / "absurd.gguf"
    for name, start in ABSURD.items():
        path.write_bytes(start + bytes(60))
        for read in (open_source, hs.Direction.load):
            with pytest.raises(Damaged, match=r"absurd\.gguf"):
                read(path)
        assert not own_cache.exists(), name


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
    assert list((own_cache / "gguf").iterdir()) == []
