"""A tiny model whose tokens are words, so that a test can name the state that somebody
clicks.
"""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hiddenscope.testing import tiny_model

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
WORDS = "Paul said that Mary Peter was quite late because she he"


def save_word_model(folder: Path) -> None:
    """Save a tiny Llama and a tokenizer that knows these words, with and without the
    space before them.
    """
    words = WORDS.split()
    vocabulary = [*SPECIAL, *words, *(f" {word}" for word in words)]
    ids = {word: place for place, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ ]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=128, **names
    )  # type: ignore[no-untyped-call]
    tiny_model("llama").save_pretrained(folder)  # type: ignore[operator]
    fast.save_pretrained(folder)


def save_adapter(base: Path, folder: Path) -> None:
    """Save a LoRA of a tiny Llama, whose configuration names the folder of its base."""
    peft = pytest.importorskip("peft")
    module = tiny_model("llama")
    module.name_or_path = str(base)  # type: ignore[assignment]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(module, config).save_pretrained(folder)
