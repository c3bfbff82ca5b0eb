"""Variables: is a learned subspace the compiler's own, and what do the controls expose?

A variable has a direction: what the compiler writes for one value less what it writes
for another. Pairs of inputs differ in it at their last token, and the program says what
follows where a base gets its source's value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from labs.truth.circuit import Written
from labs.truth.hosts import compile_into
from labs.truth.known import KnownModel
from labs.truth.program import Trace, Value
from labs.truth.programs import PROGRAMS
from labs.truth.scores.steer import is_read_in_place
from labs.truth.tally import Question, Scorecard

# Inputs that are drawn, and the pairs that are made of them.
DRAWN, PAIRS, FEWEST = 400, 40, 24
# Questions with answers at random, of each variable.
NOISES = 4
# How much larger what nobody reads is made, so that a dormant pathway does something.
LOUDER = 40.0
DORMANT = "parity"

ANGLE = Question(
    "variable",
    "degrees between the learned direction and the compiler's own",
    "about 80 to 90: the row of a random direction",
    "mean",
    by_program=True,
)
RANDOM = Question("variable", "the same, for a random direction (null)", "null", "mean")
COMPONENT = Question(
    "variable",
    "the same, for the first principal component of the differences",
    "the row of a random direction",
    "mean",
)
ACCURACY = Question(
    "variable",
    "share of pairs that the learned direction turns, on pairs that it has not seen",
    "0.00: nothing is exchanged",
    "mean",
)
FOUND = Question(
    "variable",
    "the learned direction survives all controls",
    "0.05: the level of the test",
)
OWN = Question(
    "variable",
    "the compiler's own direction survives all controls",
    "0.05: the level of the test",
)
NOISE = Question(
    "variable",
    "a direction survives where the counterfactuals are drawn at random (null)",
    "0.05: the level of the test; lower is better",
)
WORKS = Question(
    "variable (dormant pathway)",
    "share of pairs that a direction turns which only wakes a dormant pathway",
    "0.00: nothing is exchanged",
    "mean",
)
EXPOSED = Question(
    "variable (dormant pathway)",
    "the controls expose it: what is read of it does no more than a random subspace",
    "0.00: it turns the answers",
)
SPARED = Question(
    "variable (dormant pathway)",
    "the variable's own direction, at the same place, survives all controls",
    "0.05: the level of the test",
)


@dataclass(frozen=True)
class _Asked:
    """Two values of a variable, and pairs that have one and the other."""

    written: Written
    values: tuple[Value, Value]
    pairs: list[hs.Interchange]

    @property
    def site(self) -> str:
        """Return the first state with the variable that can be exchanged."""
        layer = f"layer.{self.written.block + 1}"
        return f"{layer}.attn" if self.written.part == "attn" else layer


def score_variable(known: KnownModel, card: Scorecard) -> None:
    """Learn the direction of every variable that acts where it is written."""
    if known.compiled is None:
        return
    chance = random.Random(0)
    for written in known.circuit.written:
        if written.part == "embeddings":
            continue
        if not is_read_in_place(known.circuit, written.variable.name):
            continue
        asked = _ask(known, written, chance)
        if asked is not None:
            _score(known, card, asked, chance)
    if (known.host, known.program.name) == ("plain", DORMANT):
        score_dormant(card)


def _score(
    known: KnownModel, card: Scorecard, asked: _Asked, chance: random.Random
) -> None:
    own = own_direction(known, asked.written, *asked.values)
    learned = _told(known, asked, asked.pairs)
    card.add(ANGLE, angle(learned, own))
    (cell,) = learned.facts["cells"]
    card.add(ACCURACY, cell["value"])
    card.count(FOUND, not cell["failed"])
    card.add(COMPONENT, angle(_told(known, asked, asked.pairs, "pca"), own))
    drawn = np.random.default_rng(0).standard_normal((NOISES, len(own)))
    for vector in drawn:
        card.add(RANDOM, _degrees(vector, own))
    (cell,) = _told(known, asked, asked.pairs, own).facts["cells"]
    card.count(OWN, not cell["failed"])
    for _ in range(NOISES):
        noise = _with_noise(known, asked, chance)
        (cell,) = _told(known, asked, noise).facts["cells"]
        card.count(NOISE, not cell["failed"])


def _told(
    known: KnownModel,
    asked: _Asked,
    pairs: Sequence[hs.Interchange],
    subspace: Any = "learned",
) -> hs.Result:
    return hs.variable(
        known.model, pairs, sites=asked.site, tokens=[-1], subspace=subspace
    )


def angle(result: hs.Result, own: Any) -> float:
    """Return the principal angle, in degrees, of a learned direction and the own one."""
    return _degrees(result.data["basis"].to_numpy()[0, 0, 0], own)


def _degrees(vector: Any, own: Any) -> float:
    cosine = abs(vector @ own) / (np.linalg.norm(vector) * np.linalg.norm(own))
    return math.degrees(math.acos(min(1.0, float(cosine))))


def own_direction(known: KnownModel, written: Written, old: Value, new: Value) -> Any:
    """Return what the compiler writes for a new value less that for an old one."""
    compiled = known.compiled
    assert compiled is not None
    variable = written.variable
    column = compiled.channels.zeros()
    if variable.is_numeric:
        column[compiled.channels.of(variable, None)] = float(new) - float(old)
    else:
        column[compiled.channels.of(variable, old)] -= 1
        column[compiled.channels.of(variable, new)] += 1
    return compiled.writing(column[:, None])[:, 0].double().numpy()


def _ask(known: KnownModel, written: Written, chance: random.Random) -> _Asked | None:
    """Draw pairs of the two values that most pairs can be made of; None if too few."""
    name = written.variable.name
    inputs: dict[tuple[Value, int], list[list[str]]] = {}
    distinct = {tuple(tokens): tokens for tokens in known.program.draw(DRAWN)}
    traces = {}
    for key, tokens in distinct.items():
        traces[key] = known.program.run(tokens)
        value = traces[key][name][-1]
        inputs.setdefault((value, len(tokens)), []).append(tokens)
    best: _Asked | None = None
    values = list(dict.fromkeys(value for value, _ in inputs))
    for number, old in enumerate(values):
        for new in values[number + 1 :]:
            pairs = []
            for (value, length), bases in inputs.items():
                if value not in (old, new):
                    continue
                sources = inputs.get((new if value == old else old, length), [])
                for base in bases if sources else ():
                    source = chance.choice(sources)
                    donor = traces[tuple(source)]
                    pairs += _pair(known, written, base, source, donor)
            if len(pairs) > len(best.pairs if best else ()):
                best = _Asked(written, (old, new), pairs)
    if best is None or len(best.pairs) < FEWEST:
        return None
    pairs = chance.sample(best.pairs, min(PAIRS, len(best.pairs)))
    return _Asked(written, best.values, pairs)


def _pair(
    known: KnownModel,
    written: Written,
    base: list[str],
    source: list[str],
    donor: Trace,
) -> list[hs.Interchange]:
    """Return the pair, unless the answer would stay."""
    name = written.variable.name
    answer = known.program.run(base)["output"][-1]
    forced = {(name, len(base) - 1): donor[name][-1]}
    follows = known.program.run(base, forced)["output"][-1]
    if follows == answer:
        return []
    ids = [known.id(str(token)) for token in (answer, follows)]
    return [hs.Interchange(known.ids(base), known.ids(source), *ids)]


def _with_noise(
    known: KnownModel, asked: _Asked, chance: random.Random
) -> list[hs.Interchange]:
    """Return the pairs with the counterfactuals in another order.

    Where there are two answers, some are the base's own: nothing should follow.
    """
    follows = [pair.counterfactual for pair in asked.pairs]
    chance.shuffle(follows)
    noise = []
    for pair, other in zip(asked.pairs, follows, strict=True):
        noise.append(hs.Interchange(pair.base, pair.source, pair.answer, other))
    return noise


def score_dormant(card: Scorecard) -> None:
    """Exchange a direction that only wakes a dormant pathway.

    Half of it carries the share that the MLP before the site has read, which goes with
    the variable and is read by nobody after it. The other half is the answer itself,
    which nothing has written yet. The model is exact: the share is written louder and
    read softer.
    """
    known = louder(compile_into("plain", PROGRAMS[DORMANT]()))
    assert known.compiled is not None
    written = known.circuit.place("ones")
    chance = random.Random(0)
    asked = _ask(known, written, chance)
    assert asked is not None
    old, new = asked.values
    share = known.circuit.place("ones_share")
    unread = own_direction(known, share, 1 / (1 + old), 1 / (1 + new))
    answers = ["odd" if value % 2 else "even" for value in (old, new)]
    dormant = own_direction(known, known.circuit.place("output"), *answers)
    vector = unread / np.linalg.norm(unread) + dormant / np.linalg.norm(dormant)
    (cell,) = _told(known, asked, asked.pairs, vector).facts["cells"]
    card.add(WORKS, cell["value"])
    card.count(EXPOSED, "read" in cell["failed"])
    own = own_direction(known, written, *asked.values)
    (cell,) = _told(known, asked, asked.pairs, own).facts["cells"]
    card.count(SPARED, not cell["failed"])


def louder(known: KnownModel) -> KnownModel:
    """Return a model that writes its share louder, and reads it as much softer."""
    assert known.compiled is not None
    module: Any = deepcopy(known.module)
    share = known.circuit.place("ones_share").variable
    channel = known.compiled.channels.of(share, None)
    block = module.blocks[0]
    with torch.no_grad():
        block.output.weight[channel] *= LOUDER
        block.reads.weight[:, channel] /= LOUDER
    return KnownModel(known.host, known.program, known.circuit, module, known.compiled)
