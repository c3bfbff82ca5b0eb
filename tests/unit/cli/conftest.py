"""A tiny model on disk for the commands."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hiddenscope.testing import tiny_model

TEXT = "The capital of France is Paris."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny real model with a tokenizer of whole words, saved as Hugging Face saves
    it.
    """
    path = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(
        WordLevel(
            {word: place for place, word in enumerate(["[UNK]", *TEXT.split()])},
            unk_token="[UNK]",
        )
    )
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]"
    ).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    config.eos_token_id = (
        # Or some random weights would end a text before it was begun.
        None
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("headless")
    tiny_model("gpt2", task="base").save_pretrained(path)  # type: ignore[operator]
    return str(path)
