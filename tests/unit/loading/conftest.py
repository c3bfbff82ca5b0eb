"""Real tiny models, saved where a test can damage them."""

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


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes = {
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **sizes, **changes})).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel(
            {word: rank for rank, word in enumerate(WORDS)}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    config = BertConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=32,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(saved_llama: Path, tmp_path: Path) -> Path:
    """A tiny llama of the test's own, to damage as it likes."""
    return Path(shutil.copytree(saved_llama, tmp_path / "tiny-llama"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every attempt to reach the network fails at once, and is listed."""
    attempts: list[object] = []

    def refuse(*args: object, **_: object) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HIDDENSCOPE_WHEELS", raising=False)
    return tmp_path / "cache"
