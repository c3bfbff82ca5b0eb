"""Choice: for how many texts the label is the very word that the model would go on with."""

from collections.abc import Sequence
from typing import Any

from hiddenscope import progress
from hiddenscope.model import Model
from hiddenscope.passes import record
from hiddenscope.states import States

AT_ONCE = 8


def first_choices(model: Model, texts: Sequence[str], labels: Sequence[Any] | None) -> int | None:
    """How many texts the model would go on with their label; None if that cannot be asked.

    It can be asked of a causal model with a head whose tokenizer has every label as one token.
    """
    stacks = model.anatomy.stacks
    if (
        labels is None
        or model.tokenizer is None
        or model.anatomy.head is None
        or len(stacks) > 1
        or not stacks[0].causal
    ):
        return None
    tokens = {said: _token(model, said) for said in dict.fromkeys(labels)}
    if None in tokens.values():
        return None
    together = AT_ONCE if model.batches and model.turn is None else 1
    right = 0
    with progress.track("Asking for the next word", total=len(texts)) as advance:
        for start in range(0, len(texts), together):
            some = range(start, min(start + together, len(texts)))
            made = record(model, [texts[row] for row in some], "layer.-1", logits=True)
            assert made.logits is not None
            assert isinstance(made.states, States)
            ends = made.states.tokens.lengths.cumsum() - 1
            chosen = made.logits[ends].argmax(-1).tolist()
            right += sum(chosen[k] == tokens[labels[row]] for k, row in enumerate(some))
            advance(len(some))
    return right


def _token(model: Model, label: Any) -> int | None:
    """The one token that a label is after a space, as in the middle of a sentence."""
    if not isinstance(label, str) or not label.strip() or model.tokenizer is None:
        return None
    said = label if label.startswith(" ") else f" {label}"
    ids = model.tokenizer.encode(said, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
