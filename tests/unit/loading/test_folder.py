"""A folder: loaded as it was saved, without network; refused when it is damaged or
would run code.
"""

import json
import os
import struct
import subprocess
import sys
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
from tests.unit.loading.conftest import tiny_llama


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_a_folder_loads_as_it_was_saved_and_asks_nobody(
    saved_llama: Path, no_network: list[object]
) -> None:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loaded = open_source(saved_llama, device="cpu")
    assert no_network == []
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (
        verbosity,
        bars,
    )
    assert type(loaded.module) is LlamaForCausalLM and not loaded.module.training
    assert loaded.name == "tiny-llama" and loaded.revision is None
    assert loaded.notes == ("Computing in float32, the dtype of the checkpoint.",)
    assert loaded.tokenizer is not None and loaded.tokenizer("the capital of France")[
        "input_ids"
    ] == [3, 4, 5, 6]
    want = tiny_llama().state_dict()
    assert all(
        torch.equal(value, want[name])
        for name, value in loaded.module.state_dict().items()
    )


@pytest.mark.parametrize(
    ("given", "want"), [("bf16", torch.bfloat16), (torch.float16, torch.float16)]
)
def test_a_dtype_may_be_chosen(
    saved_llama: Path, given: object, want: torch.dtype
) -> None:
    loaded = open_source(str(saved_llama), dtype=given, device="cpu", attention="eager")  # type: ignore[arg-type]
    assert {value.dtype for value in loaded.module.parameters()} == {want}
    assert loaded.module.config._attn_implementation == "eager"
    assert loaded.notes == ()


def test_a_relative_path_of_a_zoo_name_is_a_folder(
    llama: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[object]
) -> None:
    llama.rename(llama.parent / "smollm2")
    monkeypatch.chdir(llama.parent)
    assert open_source("./smollm2").name == "smollm2"
    assert no_network == []


def test_a_task_chooses_the_class(saved_llama: Path) -> None:
    loaded = open_source(saved_llama, task="base")
    assert type(loaded.module) is LlamaModel
    assert any("lm_head.weight" in note for note in loaded.notes)
    with pytest.raises(LoadError):
        open_source(saved_llama, task="masked-lm")


@pytest.mark.parametrize(
    ("task", "want"),
    [
        (None, "T5ForConditionalGeneration"),
        ("seq2seq-lm", "T5ForConditionalGeneration"),
        ("text-encoder", "T5EncoderModel"),
        ("base", "T5Model"),
    ],
)
def test_a_task_of_an_encoder_decoder(
    tmp_path: Path, task: str | None, want: str
) -> None:
    config = T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=32
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert type(open_source(tmp_path / "t5", task=task).module).__name__ == want


def test_without_an_architecture_it_is_the_base_model(llama: Path) -> None:
    change(llama / "config.json", architectures=None)
    assert type(open_source(llama).module) is LlamaModel
    change(
        llama / "config.json", architectures=["pipeline", "__path__", "LlamaForNobody"]
    )
    loaded = open_source(llama)
    assert type(loaded.module) is LlamaModel and any(
        "'pipeline'" in note for note in loaded.notes
    )


def test_a_class_that_does_not_fit_the_config_is_refused(llama: Path) -> None:
    change(llama / "config.json", architectures=["BertForMaskedLM"])
    with pytest.raises(LoadError):
        open_source(llama)


def test_a_sharded_checkpoint_loads(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    loaded = open_source(tmp_path / "shards")
    want = tiny_llama().state_dict()
    assert all(
        torch.equal(value, want[name])
        for name, value in loaded.module.state_dict().items()
    )
    assert (
        any("No tokenizer" in note for note in loaded.notes)
        and loaded.tokenizer is None
    )


def test_a_missing_shard_is_half_a_download(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    sorted((tmp_path / "shards").glob("*.safetensors"))[0].unlink()
    with pytest.raises(Damaged, match="is missing"):
        open_source(tmp_path / "shards")


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    index = tmp_path / "shards" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for name in ("../other.safetensors", "pytorch_model.bin", "/etc/passwd"):
        content["weight_map"]["lm_head.weight"] = name
        index.write_text(json.dumps(content))
        with pytest.raises(Unsafe, match="sends the loader to"):
            open_source(tmp_path / "shards")
    content["weight_map"]["lm_head.weight"] = content["weight_map"][
        "model.embed_tokens.weight"
    ]
    content["weight_map"]["phantom"] = content["weight_map"][
        "model.embed_tokens.weight"
    ]
    index.write_text(json.dumps(content))
    with pytest.raises(Damaged, match="which the index promises"):
        open_source(tmp_path / "shards")


def test_missing_weights_are_never_random(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(Damaged, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_source(llama)


def test_a_base_checkpoint_has_no_head_to_load(llama: Path) -> None:
    LlamaModel.from_pretrained(llama, local_files_only=True).save_pretrained(llama)
    with pytest.raises(Damaged, match=r"lm_head.*task='base'"):
        open_source(llama, task="causal-lm")
    assert type(open_source(llama).module) is LlamaModel


def test_a_missing_pooler_is_said(saved_bert: Path) -> None:
    loaded = open_source(saved_bert)
    assert type(loaded.module).__name__ == "BertModel"
    assert any("no pooler" in note for note in loaded.notes)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="empty"):
        open_source(tmp_path)
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(Damaged, match=r"no config\.json"):
        open_source(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"")
    with pytest.raises(Damaged, match=r"tiny\.gguf"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Damaged, match=r"neither model\.safetensors"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.pt", "model.ckpt", "weights.pkl"]
)
def test_a_pickle_is_refused(llama: Path, name: str) -> None:
    (llama / "model.safetensors").rename(llama / name)
    with pytest.raises(Unsafe, match=rf"{name}.*save_pretrained"):
        open_source(llama)


def test_a_pickle_beside_safetensors_is_not_read(llama: Path) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert type(open_source(llama).module) is LlamaForCausalLM


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_and_never_run(
    llama: Path, where: str, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    (llama / "evil.py").write_text(f"open({str(trap)!r}, 'w')\nclass Model: ...\n")
    change(
        llama / where,
        auto_map={
            "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": ["evil.Model", None],
        },
    )
    with pytest.raises(Unsafe, match=r"evil\.Model.*Name a task"):
        open_source(llama)
    loaded = open_source(llama, task="causal-lm")
    assert type(loaded.module) is LlamaForCausalLM and any(
        "was not run" in note for note in loaded.notes
    )
    assert not trap.exists()


def test_a_type_only_remote_code_knows_is_refused(llama: Path) -> None:
    change(
        llama / "config.json",
        model_type="evilformer",
        auto_map={"AutoConfig": "evil.Config"},
    )
    with pytest.raises(Unsafe, match="live"):
        open_source(llama, task="causal-lm")


def test_an_unknown_type_is_said(llama: Path) -> None:
    change(llama / "config.json", model_type="llama99")
    with pytest.raises(UnknownModel, match=r"llama99.*--upgrade transformers"):
        open_source(llama)


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ({"attn_implementation": "somebody/kernel"}, Unsafe),
        ({"sub": {"_attn_implementation": "somebody/kernel"}}, Unsafe),
        ({"transformers_weights": "../x.safetensors"}, Unsafe),
        ({"transformers_weights": "pytorch_model.bin"}, Unsafe),
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
KERNELS = {
    "a string": KERNEL,
    "a dict": {"": KERNEL},
    "a dict of parts": {"": "sdpa", "text_config": KERNEL},
    "nested": {"": {"": KERNEL}},
    "a list": [KERNEL],
    "with a function": f"{KERNEL}:attention",
    "with a revision": f"{KERNEL}@main",
    "paged": f"paged|{KERNEL}",
    "another prefix": f"sdpa|{KERNEL}",
    "no slash": "kernel",
    "a number": 5,
    "flash": "flash_attention_2",
}
STAND_IN = """
import sys
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda *a, **k: None, "__call__": lambda self, given=None, *a, **k: given})
def get_kernel(*given, **options):
    open(sys.argv[1], "a").write(repr(given))
    raise FileNotFoundError("a stand-in has none")
"""
LOADING = """
import json, pathlib, sys
import transformers.utils.import_utils as libraries
assert libraries.is_kernels_available(), "the stand-in must be taken for real"
from hiddenscope.errors import LoadError, Unsafe
from hiddenscope.loading import open_source
folder = pathlib.Path(sys.argv[2])
config = json.loads((folder / "config.json").read_text())
open_source(folder, device="cpu")  # which works with the stand-in
for entries in json.loads(sys.argv[3]):
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    try:
        open_source(folder, device="cpu")
        print("loaded", entries)
    except Unsafe:
        pass
for attention in json.loads(sys.argv[4]):
    (folder / "config.json").write_text(json.dumps(config))
    try:
        open_source(folder, device="cpu", attention=attention)
        print("loaded", attention)
    except Unsafe:
        pass
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A package `kernels` that transformers takes for the real one, and that writes
    down what it is asked for.
    """
    from transformers.utils import import_utils

    package = tmp_path / "packages"
    info = package / f"kernels-{import_utils.KERNELS_MIN_VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion:"
        f" {import_utils.KERNELS_MIN_VERSION}\n"
    )
    (info / "top_level.txt").write_text("kernels\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    for name in ("kernels", "kernels/layer", "kernels/layer/mode"):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text(STAND_IN)
    return package


def test_a_kernel_is_never_fetched_in_whatever_form_it_is_named(
    llama: Path, stand_in: Path, tmp_path: Path
) -> None:
    keys = [
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
    ]
    keys += ["experts_implementation", "_experts_implementation"]
    entries: list[dict[str, object]] = [
        {key: value} for key in keys for value in KERNELS.values()
    ]
    entries += [{"sub_config": entry} for entry in entries[:5]]
    options = [value for value in KERNELS.values() if isinstance(value, str)]
    trap = tmp_path / "asked"
    command = [
        sys.executable,
        "-c",
        LOADING,
        str(trap),
        str(llama),
        json.dumps(entries),
        json.dumps(options),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(stand_in), *sys.path]),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and not trap.exists()


@pytest.mark.parametrize("value", ["eager", "sdpa", {"": "eager"}, None])
def test_what_transformers_implements_may_be_named(llama: Path, value: object) -> None:
    change(
        llama / "config.json", attn_implementation=value, experts_implementation=None
    )
    wanted = value if isinstance(value, str) else "eager" if value else "sdpa"
    assert open_source(llama).module.config._attn_implementation == wanted


def test_tricks_are_found_however_deep(llama: Path) -> None:
    deep: object = {"auto_map": {"AutoModel": "evil.Model"}}
    for _ in range(200):
        deep = {"sub": [deep]}
    change(llama / "config.json", sub=deep)
    with pytest.raises(Unsafe, match=r"evil\.Model"):
        open_source(llama)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\udcff", '"x"'])
def test_a_config_that_is_no_json_is_damaged(llama: Path, text: str) -> None:
    (llama / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Damaged, match=r"config\.json"):
        open_source(llama)


def test_a_model_with_an_adapter_and_a_distributed_checkpoint_are_refused(
    llama: Path,
) -> None:
    (llama / ".metadata").write_bytes(b"\x80")
    with pytest.raises(Unsafe, match="distributed"):
        open_source(llama)
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="a whole model and an adapter"):
        open_source(llama)


def test_a_damaged_tokenizer_is_said(llama: Path) -> None:
    (llama / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "Nonsense"}}'
    )
    with pytest.raises(LoadError, match="tokenizer"):
        _ = open_source(llama).tokenizer


def test_a_tokenizer_of_bytes_needs_no_vocabulary(llama: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama / name).unlink()
    transformers.ByT5Tokenizer().save_pretrained(llama)
    loaded = open_source(llama)
    assert (
        loaded.tokenizer is not None
        and loaded.tokenizer("a")["input_ids"][0] == ord("a") + 3
    )


def header_of(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
    ],
)
def test_a_safetensors_file_with_a_lying_header_is_damaged(
    llama: Path, content: bytes
) -> None:
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        open_source(llama)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [16], "data_offsets": [0, 2**62]},
        {"dtype": "F32", "shape": [16], "data_offsets": [-64, 0]},
        {"dtype": "F32", "shape": [16], "data_offsets": [64, 0]},
        {"dtype": "F32", "shape": [16], "data_offsets": [64, 128]},
        {"dtype": "F33", "shape": [16], "data_offsets": [0, 64]},
        {"dtype": ["F32"], "shape": [16], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": ["16"], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [16]},
        {"dtype": "F32", "shape": 16, "data_offsets": [0, 64]},
        [],
        None,
    ],
)
def test_a_tensor_entry_that_lies_is_damaged(llama: Path, entry: object) -> None:
    path = llama / "model.safetensors"
    header, data = header_of(path)
    write(path, {**header, "model.norm.weight": entry}, data)
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        open_source(llama)


@pytest.mark.parametrize("change_by", [-1, -1000, 1, 1000])
def test_a_file_cut_short_or_too_long_is_damaged(llama: Path, change_by: int) -> None:
    path = llama / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        content[:change_by] if change_by < 0 else content + b"\0" * change_by
    )
    with pytest.raises(Damaged, match=r"model\.safetensors.*file not fully covered"):
        open_source(llama)


def test_auto_spreads_over_devices_or_says_what_to_install(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "accelerate" else find(name, *a),
    )
    with pytest.raises(LoadError, match="pip install accelerate"):
        open_source(llama, device="auto")
    monkeypatch.undo()
    pytest.importorskip("accelerate")
    loaded = open_source(llama, device="auto")
    assert not loaded.module.training and {
        value.device.type for value in loaded.module.parameters()
    } <= {"cpu", "cuda"}
