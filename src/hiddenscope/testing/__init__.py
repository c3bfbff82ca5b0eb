"""Tiny real models, a tokenizer and a store: for our tests and for yours.

>>> module = tiny_model("gpt2")
>>> type(module).__name__, module.num_parameters() < 200_000
('GPT2LMHeadModel', True)
"""

from hiddenscope.testing.tiny import (
    build,
    families,
    identity_block,
    misreport,
    nan_weight,
    tiny_model,
    tiny_store,
    tiny_tokenizer,
)

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
