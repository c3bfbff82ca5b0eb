"""The texts, cut to the positions that all of them have, and the tokens whose log-probabilities are asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiddenscope.analyses.visibility.maps import Text
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Encoded, Texts, prepare, record
from hiddenscope.states import Tokens


@dataclass(frozen=True)
class Subject:
    """The texts one by one, the tokens of each stack, which stacks are causal, and what was done on the way."""

    texts: Sequence[Text]
    tokens: Mapping[str | None, Tokens]
    causal: Mapping[str | None, bool]
    asked: Sequence[str] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> dict[str | None, int]:
        """How many tokens a text has in each stack."""
        return {name: len(ids) for name, ids in self.texts[0].ids.items()}

    @property
    def last_length(self) -> int:
        """How many tokens a text has in the stack that predicts."""
        return list(self.lengths.values())[-1]


def read(model: Model, text: Texts, targets: Texts | None, target: str | int | None, *, logits: bool) -> Subject:
    """The texts of each stack, by the name that its sites carry; what cannot be averaged is refused."""
    encoded, aims, _ = prepare(model, text, targets)
    stacks: dict[str | None, Encoded] = {None: encoded} if aims is None else {"encoder": encoded, "decoder": aims}
    causal = dict(zip(stacks, (stack.causal for stack in model.anatomy.stacks), strict=True))
    notes = {}
    for name, some in stacks.items():
        shortest, longest = min(some.lengths), max(some.lengths)
        if shortest < longest and not causal[name]:
            reason = f"they have {shortest:,} to {longest:,} tokens, and a state here sees all of a text"
            raise TextError("An average over texts", reason, "Give texts of as many tokens.")
        if shortest < longest:
            notes["cut"] = f"every text to its first {shortest:,} tokens, which the shortest has"
    if sum(min(some.lengths) for some in stacks.values()) < 2:
        reason = "a text has one token, which has no other to see"
        raise TextError("What the states of a text see", reason, "Give longer texts.")
    asked = _asked(model, stacks, target) if logits else [()] * len(encoded.ids)
    cut = {name: _cut(some) for name, some in stacks.items()}
    texts = [Text({name: some.ids[k] for name, some in cut.items()}, asked[k]) for k in range(len(encoded.ids))]
    with model.lock:
        tokens = {name: model.encoder.tokens(some) for name, some in cut.items()}
        length = len(list(texts[0].ids.values())[-1])
        said = [_same([model.encoder.string(row[k]) for row in asked]) for k in range(length)] if logits else []
    return Subject(texts, tokens, causal, said, notes)


def _cut(encoded: Encoded) -> Encoded:
    shortest = min(encoded.lengths)
    spans = encoded.spans and tuple(row[:shortest] for row in encoded.spans)
    return Encoded(encoded.texts, tuple(ids[:shortest] for ids in encoded.ids), spans)


def _same(strings: Sequence[str]) -> str:
    """What all texts have at one place, or nothing."""
    return strings[0] if len(set(strings)) == 1 else ""


def _asked(model: Model, stacks: Mapping[str | None, Encoded], target: str | int | None) -> list[tuple[int, ...]]:
    """The token whose log-probability is asked for at each place of every text.

    Where none was given: in a causal stack the token that follows, and after the last what the model would say; in an
    encoder the token that is there.
    """
    name, predicted = list(stacks.items())[-1]
    if target is not None:
        with model.lock:
            one = model.encoder.one(target)
        return [(one,) * len(ids) for ids in predicted.ids]
    if not model.anatomy.stacks[-1].causal:
        return list(predicted.ids)
    found = []
    for number, ids in enumerate(predicted.ids):
        whole = stacks.get("encoder", predicted).ids[number]
        aims = None if name is None else [list(ids)]
        logits = record(model, [list(whole)], model.anatomy.sites[-1:], targets=aims, logits=True).logits
        assert logits is not None
        found.append((*ids[1:], int(logits[-1].argmax())))
    return found
