"""Choice: for how many texts the label is the very word that the model would go on with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hiddenscope.analyses.project.parts import Part
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.passes.tail import Tail
from hiddenscope.vectors import vectors

AT_ONCE = 64


def first_choices(model: Model, part: Part, labels: Sequence[Any] | None) -> int | None:
    """How many texts the model would go on with their label; None if that cannot be asked.

    It can be asked of a causal model with a head whose tokenizer has every label as one token. Of its last layer only
    the last token of each text is needed, and the model's own tail makes logits of these.
    """
    anatomy = model.anatomy
    if labels is None or part.texts is None or anatomy.head is None or len(anatomy.stacks) > 1:
        return None
    tokens = {said: _token(model, said) for said in dict.fromkeys(labels)}
    if None in tokens.values() or not anatomy.stacks[0].causal:
        return None
    try:
        (last,) = anatomy.select("layer.-1")
        tail = Tail(model, last)
        chosen = [token for rows in torch.split(_last(model, part, last), AT_ONCE) for token in _chosen(tail, rows)]
    except PassError:  # a model that cannot be entered at its last layer
        return None
    return sum(token == tokens[label] for token, label in zip(chosen, labels, strict=True))


def _last(model: Model, part: Part, last: Any) -> Tensor:
    """The last layer at the last token of each text, as the model made it."""
    if last in part.sites:
        values = part.values[part.sites.index(last)]
    else:
        values = vectors(model, list(part.texts or ()), sites=last, token="last", truncate=True).values[0]
    return values.to(model.device, model.dtype)


def _chosen(tail: Tail, rows: Tensor) -> list[int]:
    found: list[int] = tail.logits(tail.ready(rows)).argmax(-1).tolist()
    return found


def _token(model: Model, label: Any) -> int | None:
    """The one token that a label is after a space, as in the middle of a sentence."""
    if not isinstance(label, str) or not label.strip() or model.tokenizer is None:
        return None
    try:
        with model.lock:
            return model.encoder.one(label if label.startswith(" ") else f" {label}", "label")
    except TextError:
        return None
