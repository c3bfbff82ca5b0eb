"""Visibility: which tokens reach which states, and does the Jacobian say so?

Two truths are compared with it. What a state *reads* at this input: the positions at
which heads of the circuit look, and what these have read. And what *changes* it: the
tokens of which some other value would change a variable there. A Jacobian can tell only
the first: where attention is saturated, a key that is not looked at has no slope.

The idle head of every block looks everywhere, and reads the constant: only it
connects tokens that the circuit does not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.program import Attended, Mapped, Program, Trace, Variable
from labs.truth.tally import Question, Scorecard

INPUTS = 6
Measure: TypeAlias = Literal["l1", "frobenius"]
MEASURES: tuple[Measure, ...] = ("l1", "frobenius")


@dataclass(frozen=True)
class _Questions:
    """What is asked of one measure of influence."""

    future: Question
    read: Question
    read_elsewhere: Question
    unread: Question
    changing: Question
    changing_elsewhere: Question


def _questions(measure: str) -> _Questions:
    name = f"visibility ({measure})"
    return _Questions(
        future=Question(
            name,
            "largest influence of a later token, relative to that of the same token",
            "1.00 is that of the same token",
            "largest",
        ),
        read=Question(
            name,
            "AUROC of earlier tokens: those that a head of the circuit reads",
            "the row of another input: those that are read",
            "mean",
        ),
        read_elsewhere=Question(
            name,
            "the influence of another input of this length: those that are read (null)",
            "null",
            "mean",
        ),
        unread=Question(
            name,
            "largest influence of an earlier token that only the idle head reads,"
            " relative to that of the same token",
            "1.00 is that of the same token",
            "largest",
        ),
        changing=Question(
            name,
            "AUROC of earlier tokens: those of which another value changes the state",
            "the row of another input: those that change it; a Jacobian cannot see"
            " changes of where saturated attention looks",
            "mean",
        ),
        changing_elsewhere=Question(
            name,
            "the influence of another input of this length: those that change it (null)",
            "null",
            "mean",
        ),
    )


QUESTIONS = {measure: _questions(measure) for measure in MEASURES}


def score_visibility(known: KnownModel, card: Scorecard) -> None:
    """Map the influence of the first states of inputs, one by one."""
    chance = random.Random(f"{known.host} {known.program.name}")
    for tokens in known.program.draw(INPUTS, chance.randrange(1_000_000)):
        other = _other_input(known.program, tokens, chance)
        for measure in MEASURES:
            _score_input(known, tokens, other, measure, card)


def _other_input(
    program: Program, tokens: Sequence[str], chance: random.Random
) -> list[str]:
    """Draw another input of the same length."""
    letters = [token for token in tokens if token in program.letters]
    while True:
        drawn = chance.choices(program.letters, k=len(letters))
        if drawn != letters:
            return program.input_of(drawn)


def _score_input(
    known: KnownModel,
    tokens: list[str],
    other: list[str],
    measure: Measure,
    card: Scorecard,
) -> None:
    """Compare the influence in one input with what its states read.

    The null is the influence in another input: it tells what follows from the
    positions alone.
    """
    asked = QUESTIONS[measure]
    influence = _influence(known, tokens, measure)
    elsewhere = _influence(known, other, measure)
    reads = tokens_read(known, tokens)
    places = np.arange(len(tokens))
    is_later = np.broadcast_to(places[:, None] < places, reads.shape)
    is_earlier = np.broadcast_to(places[:, None] > places, reads.shape)
    card.add(asked.future, influence[is_later].max(initial=0.0))
    if known.host != "trained":
        # Where a trained head looks is not enforced, nor are others idle.
        _rank(card, asked.read, reads[is_earlier], influence[is_earlier])
        _rank(card, asked.read_elsewhere, reads[is_earlier], elsewhere[is_earlier])
        unread = influence[is_earlier & ~reads]
        card.add(asked.unread, unread.max(initial=0.0))
    changes = tokens_that_change(known, tokens)
    # The start token and the question marks have no other value.
    is_letter = np.array([token in known.program.letters for token in tokens])
    may_change = is_earlier & is_letter
    truth = changes[may_change]
    _rank(card, asked.changing, truth, influence[may_change])
    _rank(card, asked.changing_elsewhere, truth, elsewhere[may_change])


def _influence(
    known: KnownModel, tokens: Sequence[str], measure: Measure
) -> NDArray[np.float64]:
    """Return the influence `[site, token, source token]` of the first states.

    It is relative to that of the state at the same token.
    """
    sites = ",".join(known.sites)
    ids = known.ids(list(tokens))
    result = hs.visibility(known.model, ids, influence=measure, sites=sites)
    values = result.data[measure].sel(source_site="layer.0").to_numpy()[1:]
    same = values.diagonal(axis1=1, axis2=2)
    relative: NDArray[np.float64] = values / same[:, :, None]
    return relative


def _rank(
    card: Scorecard,
    question: Question,
    truth: NDArray[np.bool_],
    influence: NDArray[np.float64],
) -> None:
    if truth.any() and not truth.all():
        card.add(question, roc_auc_score(truth, influence))


def tokens_read(known: KnownModel, tokens: Sequence[str]) -> NDArray[np.bool_]:
    """Tell `[site, token, source token]` which tokens the states of an input read."""
    trace = known.program.run(tokens)
    reads = np.zeros((len(known.sites) - 1, len(tokens), len(tokens)), dtype=bool)
    sources: dict[tuple[str, int], set[int]] = {}
    for variable in known.program.variables:
        for place in range(len(tokens)):
            found = _sources(variable, place, trace, sources)
            sources[variable.name, place] = found
    for row, site in enumerate(known.sites[1:]):
        for name in known.circuit.present(site):
            for place in range(len(tokens)):
                reads[row, place, list(sources[name, place])] = True
    return reads


def _sources(
    variable: Variable,
    place: int,
    trace: Trace,
    sources: dict[tuple[str, int], set[int]],
) -> set[int]:
    """Return the tokens from which one value was computed."""
    if isinstance(variable, Mapped):
        return set().union(*(sources[read.name, place] for read in variable.inputs))
    if not isinstance(variable, Attended):
        return {place}
    attended = variable.attended(trace, place)
    gathered = [sources[variable.source.name, other] for other in attended]
    return set().union(*gathered)


def tokens_that_change(known: KnownModel, tokens: Sequence[str]) -> NDArray[np.bool_]:
    """Tell `[site, token, source token]` where another token would change a state."""
    program, circuit = known.program, known.circuit
    changes = np.zeros((len(known.sites) - 1, len(tokens), len(tokens)), dtype=bool)
    trace = program.run(tokens)
    for source, others in enumerate(_other_values(program, tokens)):
        for other in others:
            changed = program.run(tokens, {(program.tokens.name, source): other})
            for row, site in enumerate(known.sites[1:]):
                for name in circuit.present(site):
                    pairs = zip(trace[name], changed[name], strict=True)
                    differs = [before != after for before, after in pairs]
                    changes[row, differs, source] = True
    return changes


def _other_values(program: Program, tokens: Sequence[str]) -> list[list[str]]:
    """Return the letters that could stand in the place of each one."""
    others: list[list[str]] = []
    for token in tokens:
        letters = [letter for letter in program.letters if letter != token]
        others.append(letters if token in program.letters else [])
    return others
