"""Tiny real models by family, a tiny tokenizer for them, and planted faults: for our
tests and for yours.

models   tiny models and a tokenizer, made in memory
stores   a small store of states
faults   kinds of porting mistake, planted in a copy of a model, and changes that do no harm

>>> module = tiny_model("gpt2")
>>> type(module).__name__, sum(weight.numel() for weight in module.parameters()) < 200_000
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
