"""Every analysis that has an oracle agrees with it, on families of several shapes."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import hiddenscope as hs
from hiddenscope.testing import tiny_tokenizer
from tests.configurations import configured
from tests.oracles import ORACLES, disagreements
from tests.registry import CONTRAST, CONTRASTS, IDS, OTHER, TEXT, tiny

CLASSES = {
    "phi": "PhiForCausalLM",
    "cohere": "CohereForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mpt": "MptForCausalLM",
    "xglm": "XGLMForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
}
FAMILIES = ("llama", "gpt2", "phi", "granite", "gemma3_text")


@cache
def subject(family: str) -> hs.Model:
    """Return a tiny model of a family."""
    if family in CLASSES:
        return hs.load((configured(CLASSES[family]), tiny_tokenizer()))
    return tiny(family)


def check(word: str, family: str, *args: Any, **options: Any) -> None:
    """Ask a question of a family, and compare the result with its oracle."""
    function: Callable[..., hs.Result] = getattr(hs, word)
    model = subject(family)
    asked = inspect.signature(function).bind(model, *args, **options)
    asked.apply_defaults()
    result = function(model, *args, **options)
    arguments = dict(asked.arguments)
    arguments.pop("model", None)
    assert disagreements(word, model, arguments, result) == []
