"""Save known models as folders that load like any other, with their circuits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from truth.known import KnownModel
from truth.program import START, Program


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
        "tolerance": known.program.tolerance,
        "variables": known.circuit.declared(),
    }
    (folder / "circuit.json").write_text(json.dumps(circuit, indent=1) + "\n")


def tokenizer_of(program: Program) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words between spaces: the program's tokens."""
    ids = {token: row for row, token in enumerate(program.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=START))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START)
