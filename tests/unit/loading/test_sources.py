"""Which kind of source is it, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch

from hiddenscope.errors import LoadError, UnknownModel, Unsafe
from hiddenscope.loading import open_source
from tests.unit.loading.conftest import tiny_llama, tiny_tokenizer


@pytest.mark.parametrize("training", [True, False])
def test_a_live_pair_is_returned_untouched(training: bool) -> None:
    module, tokenizer = tiny_llama().train(training), tiny_tokenizer()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    loaded = open_source((module, tokenizer))
    assert (
        loaded.module is module
        and loaded.tokenizer is tokenizer
        and module.training is training
    )
    assert all(
        torch.equal(before[name], value) for name, value in module.state_dict().items()
    )
    assert (loaded.name, loaded.revision, loaded.notes) == (
        "LlamaForCausalLM",
        None,
        (),
    )
    assert open_source((module, None)).tokenizer is None


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"device": "cpu"},
        {"attention": "eager"},
        {"task": "base"},
        {"revision": "main"},
    ],
)
def test_an_option_that_would_change_a_live_module_is_refused(
    options: dict[str, str],
) -> None:
    with pytest.raises(
        LoadError, match=f"{next(iter(options))} would change your module"
    ):
        open_source((tiny_llama(), None), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [(1, None), tiny_llama(), (tiny_llama(),), (tiny_llama(), "gpt2"), 3, ["gpt2"]],
)
def test_what_is_no_pair_is_refused(source: object) -> None:
    with pytest.raises(LoadError, match=r"\(module, tokenizer\)"):
        open_source(source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "org/../secret",
        "a/b/../c",
        "org\\model",
        "org//model",
        "a\x00b",
        "a\nb",
        "x/..",
        "",
        "  ",
        "gpt2\u202e",
    ],
)
def test_an_id_with_path_tricks_is_refused(name: str, no_network: list[object]) -> None:
    with pytest.raises(Unsafe):
        open_source(name)
    assert no_network == []


@pytest.mark.parametrize("revision", ["../main", "a//b", "a\\b", "/etc"])
def test_a_revision_with_path_tricks_is_refused(
    revision: str, no_network: list[object]
) -> None:
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
        ("a/b/c", "owner/name"),
        ("gpt 2", "owner/name"),
        ("SmolLM2", "Did you mean 'smollm2'"),
        ("x" * 300, "owner/name"),
        ("owner/" + "x" * 300, "owner/name"),
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


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(Unsafe, match="pickle"):
        open_source(tmp_path / "model.bin")
    with pytest.raises(UnknownModel, match="Load its folder"):
        open_source(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"task": "translation"}, "causal-lm"),
        ({"attention": "somebody/kernel"}, "downloaded and run"),
        ({"dtype": "int8"}, "not a floating-point dtype"),
        ({"dtype": "float33"}, "not a floating-point dtype"),
        ({"device": "toaster"}, "toaster"),
        ({"device": "meta"}, "no weights"),
        ({"revision": "main"}, "only a model on the hub"),
    ],
)
def test_a_wrong_option_says_so(
    saved_llama: Path, options: dict[str, str], hint: str
) -> None:
    with pytest.raises(LoadError, match=hint):
        open_source(saved_llama, **options)  # type: ignore[arg-type]


def test_the_room_imports_without_the_heavy_libraries() -> None:
    import subprocess

    heavy = ["torch", "transformers", "gguf", "platformdirs", "huggingface_hub"]
    script = (
        f"import sys, hiddenscope.loading.zoo; print([name for name in {heavy} if name"
        " in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )
