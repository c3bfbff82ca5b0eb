"""Save known models as folders that load like any other, with their circuits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from labs.truth.known import KnownModel
from labs.truth.program import START, Program


def save(known: KnownModel, folder: Path) -> None:
    """Write a model of transformers, its tokenizer, and its circuit in circuit.json."""
    module: Any = known.module
    if not isinstance(module, PreTrainedModel):
        raise TypeError(f"{type(module).__name__} is no class that a folder can name")
    module.save_pretrained(folder)
    tokenizer_of(known.program).save_pretrained(folder)
    circuit = {
        "program": known.program.name,
        "task": known.program.task,
        "lengths": [min(known.program.lengths), max(known.program.lengths)],
        "letters": list(known.program.letters),
        "asks": known.program.asks,
        "tolerance": known.program.tolerance,
        "variables": known.circuit.declared(),
    }
    (folder / "circuit.json").write_text(json.dumps(circuit, indent=1) + "\n")


def tokenizer_of(
    program: Program, *, unknown: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the program's tokens, between spaces.

    It begins every text with the start token, and stops at a token that it has not,
    unless an `unknown` one stands for it.
    """
    ids = {token: row for row, token in enumerate(program.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown or "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, ids[START])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START)
