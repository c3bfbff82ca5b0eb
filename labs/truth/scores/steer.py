"""Steering: does a variable that is written from outside change what follows from it?

A direction is the difference of the mean states of texts that end with one value of a
variable and of those that end with another. It knows nothing of how a program was
compiled, so it also holds whatever else tells these texts apart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from labs.truth.circuit import Circuit, Written
from labs.truth.known import KnownModel
from labs.truth.layout import Compiled
from labs.truth.program import Attended, Trace, Value
from labs.truth.tally import Question, Scorecard

CASES, STEERED_CASES = 24, 8
# Inputs whose beginnings are sorted by the value that they end with.
SORTED = 120
# As many beginnings as this have one value, or fewer where there are no more.
TEXTS = 12
# How often a case is drawn, until the program says that it changes an answer.
DRAWS = 50

WRITTEN = Question(
    "steer",
    "a variable is written at one token: all answers become the program's",
    "the row of a random direction",
    by_program=True,
)
RANDOM = Question(
    "steer",
    "the same, for a random direction of the same norm (null)",
    "null",
)
EXACT = Question(
    "steer",
    "the same, along the compiler's own direction (upper bound)",
    "the row of a random direction",
)
REPLACED = Question(
    "steer",
    "a state is replaced by that of another input: all answers become the program's",
    "0.00: some answer changes in every case",
)
STEERED = Question(
    "steer",
    "a variable is steered at every token: the program's new answer is the likeliest",
    "0.00: it is not before",
)
REPORTED = Question(
    "steer",
    "largest error of a reported probability, against hs.edit",
    "1.00: the largest that there can be",
    "largest",
)


def score_steer(known: KnownModel, card: Scorecard) -> None:
    """Write variables along learned directions, and replace whole states."""
    beginnings = _Beginnings(known)
    chance = random.Random(0)
    for _ in range(CASES):
        case = beginnings.draw(chance, known.circuit.written)
        if case is None:
            break
        vector = beginnings.direction(case, chance).vectors[case.site]
        card.count(WRITTEN, _answers(known, case, hs.Add(vector, case.place)))
        if known.compiled is not None:
            exact = _compiled_direction(known.compiled, case)
            card.count(EXACT, _answers(known, case, hs.Add(exact, case.place)))
        other = _random_like(vector, chance)
        card.count(RANDOM, _answers(known, case, hs.Add(other, case.place)))
    for _ in range(CASES):
        case, values = _replaced(known, chance)
        card.count(REPLACED, _answers(known, case, hs.Replace(values, case.place)))
    in_place = []
    for written in known.circuit.written:
        if is_read_in_place(known.circuit, written.variable.name):
            in_place.append(written)
    for _ in range(STEERED_CASES):
        case = beginnings.draw(chance, in_place, at_end=True)
        if case is not None:
            _score_steered(known, card, case, beginnings.direction(case, chance))


def _score_steered(
    known: KnownModel, card: Scorecard, case: _Case, direction: hs.Direction
) -> None:
    """Steer one prompt, and compare what is reported with hs.edit."""
    ids = known.ids(case.tokens)
    tokens = known.program.vocabulary
    result = hs.steer(
        known.model,
        [ids],
        direction,
        strengths=[1.0],
        answers=list(range(len(tokens))),
        quality=[ids],
        new_tokens=0,
    )
    reported = result.data["probability"].isel(site=0, strength=0, text=0).to_numpy()
    wanted = known.id(str(case.outputs[-1]))
    card.count(STEERED, int(reported.argmax()) == wanted)
    change = hs.Add(direction.vectors[case.site])
    edited = hs.edit(known.model, [ids], {case.site: change}, (), logits=True)
    assert edited.logits is not None
    expected = edited.logits[-1].double().softmax(-1).cpu().numpy()
    card.add(REPORTED, float(np.abs(reported - expected).max()))


@dataclass(frozen=True)
class _Case:
    """A state that is changed, and what the program then answers.

    `name` is the variable that is written, and `values` are its old and new value.
    """

    tokens: list[str]
    place: int
    site: str
    outputs: list[Value]
    name: str = ""
    values: tuple[Value, Value] = (None, None)


class _Beginnings:
    """Beginnings of inputs, by the values that variables have at their last token."""

    def __init__(self, known: KnownModel) -> None:
        self.known = known
        self.inputs = known.program.draw(SORTED, seed=1)
        self.traces = [known.program.run(tokens) for tokens in self.inputs]
        self.by_value: dict[tuple[str, Value], list[list[str]]] = {}
        for tokens, trace in zip(self.inputs, self.traces, strict=True):
            for place in known.program.answers(tokens):
                self._sort(tokens[: place + 1], trace, place)

    def _sort(self, beginning: list[str], trace: Trace, place: int) -> None:
        for written in self.known.circuit.written:
            name = written.variable.name
            texts = self.by_value.setdefault((name, trace[name][place]), [])
            if beginning not in texts:
                texts.append(beginning)

    def draw(
        self, chance: random.Random, places: Sequence[Written], at_end: bool = False
    ) -> _Case | None:
        """Draw an input, a position and a new value that changes an answer.

        What the embeddings write is the input, and no variable to write.
        """
        places = [each for each in places if each.part != "embeddings"]
        for _ in range(DRAWS):
            written = chance.choice(places)
            name = written.variable.name
            number = chance.randrange(len(self.inputs))
            tokens, trace = self.inputs[number], self.traces[number]
            place = chance.choice(self.known.program.answers(tokens))
            if at_end:
                place = len(tokens) - 1
            values = [value for other, value in self.by_value if other == name]
            value = chance.choice(values)
            if not all(self._others(tokens, name, trace[name][place], value)):
                continue
            try:
                forced = {(name, place): value}
                outputs = self.known.program.run(tokens, forced)["output"]
            except ValueError:
                # The program says nothing of a value that makes two places equal.
                continue
            answers = self.known.program.answers(tokens)
            changed = [at for at in answers if outputs[at] != trace["output"][at]]
            if changed:
                pair = trace[name][place], value
                return _Case(tokens, place, written.first_site, outputs, name, pair)
        return None

    def _others(
        self, tokens: list[str], name: str, *values: Value
    ) -> list[list[list[str]]]:
        """Return the beginnings of other texts, for each value of a variable."""
        sides = []
        for value in values:
            texts = self.by_value[name, value]
            sides.append([text for text in texts if text != tokens[: len(text)]])
        return sides

    def direction(self, case: _Case, chance: random.Random) -> hs.Direction:
        """Learn the direction from a variable's old value to its new one.

        No beginning of the text that is steered is among those it is learned from.
        """
        sides = []
        for texts in self._others(case.tokens, case.name, *case.values):
            drawn = chance.sample(texts, min(TEXTS, len(texts)))
            sides.append([self.known.ids(tokens) for tokens in drawn])
        away, toward = sides
        return hs.Direction.between(self.known.model, toward, away, sites=case.site)


def _replaced(known: KnownModel, chance: random.Random) -> tuple[_Case, Tensor]:
    """Draw two inputs, and put a state of the second into the first."""
    program = known.program
    while True:
        tokens, donor = program.draw(2, seed=chance.randrange(10**9))
        places = set(program.answers(tokens)) & set(program.answers(donor))
        if not places:
            continue
        place = chance.choice(sorted(places))
        site = chance.choice(known.sites)
        try:
            trace = known.circuit.patched(site, place, tokens, program.run(donor))
        except ValueError:
            # The program says nothing of a state that makes two places equal.
            continue
        outputs, before = trace["output"], program.run(tokens)["output"]
        if any(outputs[at] != before[at] for at in program.answers(tokens)):
            states = known.model.capture([known.ids(donor)], site)[site]
            return _Case(tokens, place, site, outputs), states[place]


def _answers(known: KnownModel, case: _Case, change: hs.Add | hs.Replace) -> bool:
    """Tell whether all answers are those of the program after a change of a state."""
    edited = hs.edit(
        known.model, [known.ids(case.tokens)], {case.site: change}, (), logits=True
    )
    assert edited.logits is not None
    for place in known.program.answers(case.tokens):
        likeliest = int(edited.logits[place].argmax())
        if known.program.vocabulary[likeliest] != str(case.outputs[place]):
            return False
    return True


def is_read_in_place(circuit: Circuit, name: str) -> bool:
    """Tell whether no head carries a variable to another position, nor what follows."""
    for written in circuit.written:
        variable = written.variable
        if all(read.name != name for read in variable.reads):
            continue
        if isinstance(variable, Attended):
            carried = [variable.source, *(term.key for term in variable.terms)]
            if any(read.name == name for read in carried):
                return False
        if not is_read_in_place(circuit, variable.name):
            return False
    return True


def _compiled_direction(compiled: Compiled, case: _Case) -> Tensor:
    """Return what the compiler writes for the new value less that for the old one."""
    variable = compiled.circuit.place(case.name).variable
    old, new = case.values
    column = compiled.channels.zeros()
    if variable.is_numeric:
        column[compiled.channels.of(variable, None)] = float(new) - float(old)
    else:
        column[compiled.channels.of(variable, old)] -= 1
        column[compiled.channels.of(variable, new)] += 1
    return compiled.writing(column[:, None])[:, 0]


def _random_like(vector: Tensor, chance: random.Random) -> Tensor:
    """Return a random direction of the same norm."""
    generator = torch.Generator().manual_seed(chance.randrange(10**9))
    drawn = torch.randn(vector.shape, generator=generator, dtype=vector.dtype)
    scaled: Tensor = drawn * (vector.norm().cpu() / drawn.norm())
    return scaled
