"""One question of every kind that runs a model, for interrupts and for threads.

`QUESTIONS` has every verb, and every analysis of the tests' registry. Each takes a
model of `asked_model()`.
"""

from collections.abc import Callable
from typing import Any

import torch

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.testing.subjects import Subject
from tests.registry import CONTRAST, ENTRIES, IDS, Entry

# Long enough to have distances.
LONGER = [[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, 6, 5, 4, 3, 2]]
INSIDE = "*.attn.q,*.attn.k,*.attn.v,*.attn.head.*,*.mlp.neurons"


def asked_model() -> hs.Model:
    """Load a tiny model that nobody else has."""
    return hs.load((tiny_model("llama", layers=2), tiny_tokenizer()))


def _recording(model: hs.Model) -> None:
    with hs.recording(model, "layer.1"), torch.no_grad():
        model.module(input_ids=torch.tensor(IDS))


def _editing(model: hs.Model) -> None:
    with hs.editing(model, {"layer.1": hs.Scale(0.5)}), torch.no_grad():
        model.module(input_ids=torch.tensor(IDS))


QUESTIONS: dict[str, Callable[[hs.Model], Any]] = {
    "capture": lambda model: model.capture(IDS),
    "capture_generation": lambda model: model.capture_generation(IDS, max_new_tokens=2),
    "load": lambda model: hs.load((model.module, None)),
    "record": lambda model: hs.record(model, IDS, grad=True, logits=True),
    "recording": _recording,
    "capture inside": lambda model: model.capture(IDS, INSIDE),
    "edit inside": lambda model: hs.edit(
        model, IDS, {"*.attn.q": hs.Scale(2.0), "*.attn.head.1": hs.Scale(0.0)}
    ),
    "patch heads": lambda model: hs.patch(model, CONTRAST, sites="*.attn.head.*"),
    "edit": lambda model: hs.edit(model, IDS, {"layer.1": hs.Scale(2.0)}, "layer.2"),
    "editing": _editing,
    "resume": lambda model: hs.resume(model, IDS, "layer.2", torch.ones(5, 64)),
    "visibility of many texts": lambda model: hs.visibility(
        model, LONGER, sampling=hs.Sampling(per_text=1, baseline="random")
    ),
}


def _asking(entry: Entry) -> Callable[[hs.Model], Any]:
    return lambda model: entry.run(Subject.of(model))


QUESTIONS |= {word: _asking(entry) for word, entry in ENTRIES.items()}
