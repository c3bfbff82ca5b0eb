"""Pairs of inputs of one length whose last answers differ."""

from __future__ import annotations

import random
from dataclasses import dataclass

from labs.truth.program import Program, Trace, Value


@dataclass(frozen=True)
class Pair:
    """A clean and a corrupt input, and all variables of both."""

    clean: list[str]
    corrupt: list[str]
    clean_trace: Trace
    corrupt_trace: Trace

    @property
    def answer(self) -> str:
        """Return the clean input's last answer."""
        return str(self.clean_trace["output"][-1])

    @property
    def other(self) -> str:
        """Return the corrupt input's last answer."""
        return str(self.corrupt_trace["output"][-1])

    def effect(self, output: Value) -> float:
        """Return the share of the logit difference that an output restores.

        The answer's logit is as far above that of any other token in every case: a
        third output is in the middle.
        """
        said = str(output)
        if said == self.answer:
            return 1.0
        return 0.0 if said == self.other else 0.5


def draw_pairs(program: Program, count: int, seed: int = 0) -> list[Pair]:
    """Draw pairs that differ in one letter, and in their last answer.

    No pair is drawn twice.
    """
    chance = random.Random(seed)
    pairs: list[Pair] = []
    drawn: set[tuple[str, ...]] = set()
    while len(pairs) < count:
        length = chance.choice([size for size in program.lengths if size > 2])
        letters = chance.choices(program.letters, k=length)
        place = chance.randrange(length)
        others = [*letters]
        others[place] = chance.choice(program.letters)
        if (*letters, *others) in drawn:
            continue
        drawn.add((*letters, *others))
        clean, corrupt = program.input_of(letters), program.input_of(others)
        traces = program.run(clean), program.run(corrupt)
        if traces[0]["output"][-1] != traces[1]["output"][-1]:
            pairs.append(Pair(clean, corrupt, *traces))
    return pairs
