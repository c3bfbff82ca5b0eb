"""Which kind of source is it, and what is refused."""

from pathlib import Path

import pytest
import torch

from hiddenscope.errors import LoadError, UnknownModel, Unsafe
from hiddenscope.loading import open_source
from tests.folders import tiny_llama, tiny_tokenizer


def test_a_live_pair_is_returned_untouched() -> None:
    for training in (True, False):
        module, tokenizer = tiny_llama().train(training), tiny_tokenizer()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        loaded = open_source((module, tokenizer))
        assert loaded.module is module
        assert loaded.tokenizer is tokenizer
        assert module.training is training
        for name, value in module.state_dict().items():
            assert torch.equal(before[name], value)
        assert loaded.name == "LlamaForCausalLM"
        assert (loaded.revision, loaded.notes) == (None, ())
        assert open_source((module, None)).tokenizer is None


def test_what_would_change_a_live_module_and_what_is_no_pair_is_refused() -> None:
    module = tiny_llama()
    for option, value in (
        ("dtype", "float16"),
        ("device", "cpu"),
        ("attention", "eager"),
        ("task", "base"),
        ("revision", "main"),
    ):
        with pytest.raises(LoadError, match=f"{option} would change your module"):
            open_source((module, None), **{option: value})  # type: ignore[arg-type]
    for source in ((1, None), module, (module,), (module, "gpt2"), 3, ["gpt2"]):
        with pytest.raises(LoadError, match=r"\(module, tokenizer\)"):
            open_source(source)  # type: ignore[arg-type]


TRICKS = ["org/../secret", "org\\model", "org//model", "a\x00b", "x/..", "", "  "]


def test_an_id_or_a_revision_with_path_tricks_is_refused(
    no_network: list[object],
) -> None:
    for name in (*TRICKS, "gpt2\u202e"):
        with pytest.raises(Unsafe):
            open_source(name)
    for revision in ("../main", "a//b", "a\\b", "/etc"):
        with pytest.raises(Unsafe, match="revision"):
            open_source("org/model", revision=revision)
    assert no_network == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("/no/such/folder", "no such folder"),
        ("../no-such-folder", "no such folder"),
        ("./smollm2", "no such folder"),
        ("missing.gguf", "no such folder or file"),
        ("texts.jsonl", "a file of texts"),
        ("a/b/c", "owner/name"),
        ("gpt 2", "owner/name"),
        ("SmolLM2", "Did you mean 'smollm2'"),
        ("x" * 300, "owner/name"),
        ("/" + "x" * 300, "no such folder"),
        ("x" * 300 + ".gguf", "no such folder or file"),
        ("a/" * 3000, "owner/name"),
    ],
)
def test_what_is_nowhere_is_unknown(
    name: str, hint: str, no_network: list[object]
) -> None:
    with pytest.raises(UnknownModel, match=hint):
        open_source(name)
    assert no_network == []


def test_a_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(Unsafe, match="unpickling can run code"):
        open_source(tmp_path / "model.bin")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "model.safetensors", Path("model.safetensors")):
        with pytest.raises(UnknownModel, match=f"Load its folder: {tmp_path}"):
            open_source(path)


def test_a_wrong_option_says_so(saved_llama: Path) -> None:
    for options, hint in (
        ({"task": "translation"}, "causal-lm"),
        ({"attention": "somebody/kernel"}, "downloaded and run"),
        ({"dtype": "int8"}, "not a floating-point dtype"),
        ({"dtype": "float33"}, "not a floating-point dtype"),
        ({"device": "toaster"}, "toaster"),
        ({"device": "meta"}, "no weights"),
        ({"revision": "main"}, "only a model on the hub"),
    ):
        with pytest.raises(LoadError, match=hint):
            open_source(saved_llama, **options)  # type: ignore[arg-type]
