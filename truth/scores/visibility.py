"""Visibility: which tokens reach which states, and does the Jacobian say so?

Two truths are compared with it. What a state *reads* at this input: the positions at
which heads of the circuit look, and what these have read. And what *changes* it: the
tokens of which some other value would change a variable there. A Jacobian can tell only
the first: where attention is saturated, a key that is not looked at has no slope.

The idle head of every block looks everywhere, and reads the constant: it alone reaches
the states that nothing else does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import hiddenscope as hs
from truth.known import KnownModel
from truth.program import Attended, Mapped, Program, Trace, Variable
from truth.tally import Question, Scorecard

INPUTS = 10
MEASURES: tuple[Literal["l1", "frobenius"], ...] = ("l1", "frobenius")


def _questions(measure: str) -> tuple[Question, Question, Question, Question]:
    name = f"visibility ({measure})"
    future = Question(
        name,
        "largest influence of a later token, relative to that of the same token",
        "1: that of the same token",
        "largest",
    )
    read = Question(
        name,
        "AUROC of earlier tokens: those that a head of the circuit reads",
        "0.5",
        "mean",
    )
    unread = Question(
        name,
        "largest influence of an earlier token that only the idle head reads,"
        " relative to that of the same token",
        "1: that of the same token",
        "largest",
    )
    changing = Question(
        name,
        "AUROC of earlier tokens: those of which another value changes the state",
        "0.5; a Jacobian cannot see changes of where saturated attention looks",
        "mean",
    )
    return future, read, unread, changing


QUESTIONS = {measure: _questions(measure) for measure in MEASURES}


def score_visibility(known: KnownModel, card: Scorecard) -> None:
    """Map the influence of the first states of inputs, one by one."""
    chance = random.Random(f"{known.host} {known.program.name}")
    for tokens in known.program.draw(INPUTS, chance.randrange(1_000_000)):
        reads = tokens_read(known, tokens)
        changes = tokens_that_change(known, tokens)
        is_letter = np.array([token in known.program.letters for token in tokens])
        for measure in MEASURES:
            influence = _influence(known, tokens, measure)
            future, read, unread, changing = QUESTIONS[measure]
            places = np.arange(len(tokens))
            is_later = np.broadcast_to(places[:, None] < places, reads.shape)
            is_earlier = np.broadcast_to(places[:, None] > places, reads.shape)
            card.add(future, influence[is_later].max(initial=0.0))
            _rank(card, read, reads[is_earlier], influence[is_earlier])
            # The start token and the question marks have no other value.
            may_change = is_earlier & is_letter
            _rank(card, changing, changes[may_change], influence[may_change])
            if known.host != "trained":
                # Heads of a trained model are not saturated, nor are others idle.
                nothing = influence[is_earlier & ~reads]
                card.add(unread, nothing.max(initial=0.0))


def _influence(
    known: KnownModel, tokens: Sequence[str], measure: Literal["l1", "frobenius"]
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
