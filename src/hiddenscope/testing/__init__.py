"""Tiny real models, a tokenizer and a store: for our tests and for yours.

models   tiny models by family and a tokenizer, built in memory
stores   a small store of states

>>> module = tiny_model("gpt2")
>>> type(module).__name__, module.num_parameters() < 200_000
('GPT2LMHeadModel', True)
"""

from hiddenscope.testing.models import (
    build,
    families,
    identity_block,
    misreport,
    nan_weight,
    tiny_model,
    tiny_tokenizer,
)
from hiddenscope.testing.stores import tiny_store

__all__ = [
    "build",
    "families",
    "identity_block",
    "misreport",
    "nan_weight",
    "tiny_model",
    "tiny_store",
    "tiny_tokenizer",
]
