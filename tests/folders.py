"""Folders of tiny real models, for tests to load and to damage."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = ["<unk>", "<s>", "</s>", "the", "capital", "of", "France", "is", "Paris", "."]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
}


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """Build the same llama every time, but for the changes to its config."""
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**{**SIZES, **sizes, "tie_word_embeddings": False, **changes})
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer that knows a few words."""
    ranks = {word: rank for rank, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(ranks, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def change(path: Path, **entries: object) -> None:
    """Set entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny llama once; no test may change it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny bert without a pooler once; no test may change it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    BertModel(BertConfig(**SIZES), add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(saved_llama: Path, tmp_path: Path) -> Path:
    """Copy the tiny llama, for the test to damage as it likes."""
    return Path(shutil.copytree(saved_llama, tmp_path / "tiny-llama"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let every attempt to reach the network fail at once, and list it."""
    attempts: list[object] = []

    def refuse(*args: object, **_: object) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep what is converted or downloaded in a folder of the test's own."""
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HIDDENSCOPE_WHEELS", raising=False)
    return tmp_path / "cache"
