"""Patching: are the effects of states, heads and MLPs those of the program?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import hiddenscope as hs
from truth.known import KnownModel
from truth.scores.pairs import Pair, draw_pairs
from truth.tally import Question, Scorecard

# An effect is right within this: norms leak, and float32 rounds.
TOLERANCE = 0.02
PAIRS = 20

STATES = Question(
    "patch",
    f"all effects of states are the program's, within {TOLERANCE}",
    "0: some state has an effect in every pair",
)
OUTSIDE = Question(
    "patch",
    "largest effect of a state that has none in the program",
    "1: the effect of the state that decides the answer",
    "largest",
)
PARTS = Question(
    "patch",
    f"all effects of heads and MLPs are the program's, within {TOLERANCE}",
    "0: some part has an effect in every pair",
)
RANKED = Question(
    "patch",
    "AUROC of states: those with an effect against those without",
    "0.5",
    "mean",
)
RANKED_PARTS = Question(
    "patch",
    "AUROC of heads and MLPs: those with an effect against those without",
    "0.5",
    "mean",
)
ESTIMATED = Question(
    "patch (attribution)",
    "AUROC of states: those with an effect against those without",
    "0.5",
    "mean",
)
ESTIMATED_PARTS = Question(
    "patch (attribution)",
    "AUROC of heads and MLPs: those with an effect against those without",
    "0.5",
    "mean",
)


def score_patch(known: KnownModel, card: Scorecard) -> None:
    """Patch states, heads and MLPs, exactly and by one gradient."""
    for pair in draw_pairs(known.program, PAIRS):
        contrast = contrast_of(known, pair)
        truth = state_effects(known, pair)
        effects = _effects(known, contrast, known.sites)
        card.count(STATES, bool((np.abs(effects - truth) < TOLERANCE).all()))
        card.add(OUTSIDE, np.abs(effects[truth == 0]).max(initial=0.0))
        _rank(card, RANKED, truth, effects)
        guessed = _effects(known, contrast, known.sites, method="attribution")
        _rank(card, ESTIMATED, truth, guessed)
        _score_parts(known, card, pair, contrast)


def _score_parts(
    known: KnownModel, card: Scorecard, pair: Pair, contrast: hs.Contrast
) -> None:
    parts = parts_of(known)
    places = range(len(pair.clean))
    truth = part_effects(known, pair, parts)
    exact = []
    for part in parts:
        result = hs.patch(known.model, contrast, sites=[part], window=len(places))
        exact.append(result.data["effect"].to_numpy().ravel())
    del exact


def contrast_of(known: KnownModel, pair: Pair) -> hs.Contrast:
    """Return a pair as patching takes it: the answer is read at the last token."""
    return hs.Contrast(
        known.ids(pair.clean),
        known.ids(pair.corrupt),
        answer=known.id(pair.answer),
        other=known.id(pair.other),
        at=-1,
    )


def state_effects(known: KnownModel, pair: Pair) -> NDArray[np.float64]:
    """Return the effects `[site, token]` that the program gives the states of a pair."""
    effects = np.zeros((len(known.sites), len(pair.clean)))
    for row, site in enumerate(known.sites):
        for place in range(len(pair.clean)):
            trace = known.circuit.patched(site, place, pair.corrupt, pair.clean_trace)
            effects[row, place] = pair.effect(trace["output"][-1])
    return effects
