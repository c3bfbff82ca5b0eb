"""A folder: loaded as it was saved, without network; refused when it is damaged or
would run code.
"""

import importlib.util
import json
import struct
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

from hiddenscope.errors import Damaged, LoadError, UnknownModel, Unsafe
from hiddenscope.loading import open_source
from hiddenscope.loading.checkpoint import Loaded
from tests.folders import change, tiny_llama


def assert_weights_of_the_llama(loaded: Loaded) -> None:
    want = tiny_llama().state_dict()
    found = loaded.module.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in found.items())


def test_a_folder_loads_as_it_was_saved_and_asks_nobody(
    saved_llama: Path, no_network: list[object]
) -> None:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loaded = open_source(saved_llama, device="cpu")
    assert no_network == []
    assert logging.get_verbosity() == verbosity
    assert logging.is_progress_bar_enabled() == bars
    assert type(loaded.module) is LlamaForCausalLM
    assert not loaded.module.training
    assert loaded.name == "tiny-llama"
    assert loaded.revision is None
    assert loaded.notes == ("Computing in float32, the dtype of the checkpoint.",)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("the capital of France")["input_ids"] == [3, 4, 5, 6]
    assert_weights_of_the_llama(loaded)


def test_a_dtype_and_a_kernel_may_be_chosen_and_a_relative_path_is_a_folder(
    llama: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[object]
) -> None:
    llama.rename(llama.parent / "smollm2")
    monkeypatch.chdir(llama.parent)
    loaded = open_source("./smollm2", dtype="bf16", device="cpu", attention="eager")
    assert loaded.name == "smollm2"
    assert {value.dtype for value in loaded.module.parameters()} == {torch.bfloat16}
    assert loaded.module.config._attn_implementation == "eager"
    assert loaded.notes == ()
    assert no_network == []


def test_a_task_chooses_the_class(saved_llama: Path, tmp_path: Path) -> None:
    loaded = open_source(saved_llama, task="base")
    assert type(loaded.module) is LlamaModel
    assert any("lm_head.weight" in note for note in loaded.notes)
    with pytest.raises(LoadError):
        open_source(saved_llama, task="masked-lm")
    config = T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=32
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tasks = {
        None: "T5ForConditionalGeneration",
        "seq2seq-lm": "T5ForConditionalGeneration",
        "text-encoder": "T5EncoderModel",
        "base": "T5Model",
    }
    for task, want in tasks.items():
        assert type(open_source(tmp_path / "t5", task=task).module).__name__ == want


def test_an_architecture_is_followed_if_it_is_one_of_the_config(llama: Path) -> None:
    change(llama / "config.json", architectures=None)
    assert type(open_source(llama).module) is LlamaModel
    unknown = ["pipeline", "__path__", "LlamaForNobody"]
    change(llama / "config.json", architectures=unknown)
    loaded = open_source(llama)
    assert type(loaded.module) is LlamaModel
    assert any("'pipeline'" in note for note in loaded.notes)
    change(llama / "config.json", architectures=["BertForMaskedLM"])
    with pytest.raises(LoadError):
        open_source(llama)


def test_a_sharded_checkpoint_loads_unless_a_shard_is_missing_or_the_index_lies(
    tmp_path: Path,
) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="5KB")
    loaded = open_source(tmp_path)
    assert_weights_of_the_llama(loaded)
    assert any("No tokenizer" in note for note in loaded.notes)
    assert loaded.tokenizer is None
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for name in ("../other.safetensors", "pytorch_model.bin", "/etc/passwd"):
        change(index, weight_map={**weight_map, "lm_head.weight": name})
        with pytest.raises(Unsafe, match="sends the loader to"):
            open_source(tmp_path)
    shard = weight_map["model.embed_tokens.weight"]
    for lie, reason in (
        ({**weight_map, "phantom": shard}, "which the index promises"),
        ({**weight_map, "phantom": "other.safetensors"}, "is missing"),
        ({}, "no weight_map"),
    ):
        change(index, weight_map=lie)
        with pytest.raises(Damaged, match=reason):
            open_source(tmp_path)


def test_missing_weights_are_never_random(llama: Path, saved_bert: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    missing = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(Damaged, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_source(llama)
    weights["model.layers.1.mlp.up_proj.weight"] = missing
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    # A base checkpoint has no head to load.
    LlamaModel.from_pretrained(llama, local_files_only=True).save_pretrained(llama)
    with pytest.raises(Damaged, match=r"lm_head.*task='base'"):
        open_source(llama, task="causal-lm")
    assert type(open_source(llama).module) is LlamaModel
    loaded = open_source(saved_bert)
    assert type(loaded.module).__name__ == "BertModel"
    assert any("no pooler" in note for note in loaded.notes)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    for name, content, reason in (
        (None, "", "empty"),
        ("readme.md", "hello", r"no config\.json"),
        ("tiny.gguf", "", r"tiny\.gguf"),
        ("config.json", '{"model_type": "llama"}', r"neither model\.safetensors"),
    ):
        if name:
            (tmp_path / name).write_text(content)
        with pytest.raises(Damaged, match=reason):
            open_source(tmp_path)


def test_a_pickle_is_refused_and_beside_safetensors_it_is_not_read(
    llama: Path,
) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert type(open_source(llama).module) is LlamaForCausalLM
    (llama / "pytorch_model.bin").unlink()
    weights = llama / "model.safetensors"
    for name in ("pytorch_model.bin", "consolidated.pt", "model.ckpt", "weights.pkl"):
        weights = weights.rename(llama / name)
        with pytest.raises(Unsafe, match=rf"{name}.*save_pretrained"):
            open_source(llama)
    (llama / ".metadata").write_bytes(b"\x80")
    with pytest.raises(Unsafe, match="distributed"):
        open_source(llama)
    weights.rename(llama / "model.safetensors")
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="a whole model and an adapter"):
        open_source(llama)


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_and_never_run(
    llama: Path, where: str, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    (llama / "evil.py").write_text(f"open({str(trap)!r}, 'w')\nclass Model: ...\n")
    code = {
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.Model", None],
    }
    change(llama / where, auto_map=code)
    with pytest.raises(Unsafe, match=r"evil\.Model.*Name a task"):
        open_source(llama)
    loaded = open_source(llama, task="causal-lm")
    assert type(loaded.module) is LlamaForCausalLM
    assert any("was not run" in note for note in loaded.notes)
    assert not trap.exists()


def test_a_type_that_nobody_or_only_remote_code_knows_is_refused(llama: Path) -> None:
    change(llama / "config.json", model_type="llama99")
    with pytest.raises(UnknownModel, match=r"llama99.*--upgrade transformers"):
        open_source(llama)
    change(llama / "config.json", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(Unsafe, match="live"):
        open_source(llama, task="causal-lm")


def deep(entry: object) -> object:
    for _ in range(200):
        entry = {"sub": [entry]}
    return entry


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ({"transformers_weights": "../x.safetensors"}, Unsafe),
        ({"transformers_weights": "pytorch_model.bin"}, Unsafe),
        ({"sub": deep({"auto_map": {"AutoModel": "evil.Model"}})}, Unsafe),
        ({"num_hidden_layers": 10**12}, Damaged),
        ({"num_hidden_layers": -1}, Damaged),
        ({"hidden_size": "wide"}, LoadError),
        ({"hidden_size": 1024}, LoadError),
        ({"vocab_size": 10**5}, LoadError),
    ],
)
def test_a_config_with_tricks_is_refused(
    llama: Path, entries: dict[str, object], error: type[Exception]
) -> None:
    change(llama / "config.json", **entries)
    with pytest.raises(error):
        open_source(llama)


KERNEL = "someone/kernel"
# In every form in which a config may name one.
KERNELS = [
    *(KERNEL, f"{KERNEL}:attention", f"{KERNEL}@main", f"paged|{KERNEL}"),
    *(f"sdpa|{KERNEL}", "kernel", 5, [KERNEL], {"": KERNEL}, {"": {"": KERNEL}}),
    {"": "sdpa", "text_config": KERNEL},
    "flash_attention_2",
]
KERNEL_KEYS = [
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
]


def test_a_kernel_is_never_fetched_in_whatever_form_it_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library is installed that would fetch it, and no flash attention."""
    find = importlib.util.find_spec
    present = {"kernels": find("transformers"), "flash_attn": None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: present[name] if name in present else find(name, *a),
    )
    monkeypatch.setattr(
        "hiddenscope.loading.checkpoint._from_pretrained",
        lambda *_: pytest.fail("read"),
    )
    sound = (llama / "config.json").read_text()
    entries = [{key: value} for key in KERNEL_KEYS for value in KERNELS]
    entries += [{"sub_config": entry} for entry in entries[:5]]
    for entry in entries:
        change(llama / "config.json", **entry)
        with pytest.raises(Unsafe, match="its config names the kernel"):
            open_source(llama)
        (llama / "config.json").write_text(sound)
    for attention in KERNELS:
        if isinstance(attention, str):
            with pytest.raises(Unsafe, match="downloaded and run"):
                open_source(llama, attention=attention)


def test_a_kernel_of_transformers_may_be_named(llama: Path) -> None:
    for own, wanted in (("eager", "eager"), ({"": "eager"}, "eager"), (None, "sdpa")):
        change(llama / "config.json", attn_implementation=own)
        assert open_source(llama).module.config._attn_implementation == wanted


def test_a_config_that_is_no_json_is_damaged(llama: Path) -> None:
    for text in (b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'"x"'):
        (llama / "config.json").write_bytes(text)
        with pytest.raises(Damaged, match=r"config\.json"):
            open_source(llama)


def test_a_tokenizer_of_bytes_needs_no_vocabulary_and_a_damaged_one_is_said(
    llama: Path,
) -> None:
    (llama / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "Nonsense"}}'
    )
    with pytest.raises(LoadError, match="tokenizer"):
        _ = open_source(llama).tokenizer
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama / name).unlink()
    transformers.ByT5Tokenizer().save_pretrained(llama)
    tokenizer = open_source(llama).tokenizer
    assert tokenizer is not None
    assert tokenizer("a")["input_ids"][0] == ord("a") + 3


def with_header(content: bytes, **entries: object) -> bytes:
    """Change the header of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    header = {**json.loads(content[8 : 8 + length]), **entries}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def test_a_safetensors_file_that_lies_is_damaged(llama: Path) -> None:
    path = llama / "model.safetensors"
    content = path.read_bytes()
    lies = [
        b"",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
    ]
    for entry in (
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [16], "data_offsets": [0, 2**62]},
        {"dtype": "F32", "shape": [16], "data_offsets": [64, 128]},
        {"dtype": "F33", "shape": [16], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [16]},
        None,
    ):
        lies.append(with_header(content, **{"model.norm.weight": entry}))
    for lie in lies:
        path.write_bytes(lie)
        with pytest.raises(Damaged, match=r"model\.safetensors"):
            open_source(llama)
    for other in (content[:-1], content[:-1000], content + b"\0"):
        path.write_bytes(other)
        with pytest.raises(Damaged, match="model.safetensors.*file not fully covered"):
            open_source(llama)
