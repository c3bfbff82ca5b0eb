"""Patching: are the effects of states, heads and MLPs those of the program?"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.scores.pairs import Pair, draw_pairs
from labs.truth.tally import Question, Scorecard

Effects: TypeAlias = NDArray[np.float64]

# An effect is right within this: norms leak, and float32 rounds.
TOLERANCE = 0.02
# An estimate that is further off would mislead.
FAR = 0.1
PAIRS = 20

STATES = Question(
    "patch",
    f"all effects of states are the program's, within {TOLERANCE}",
    "0.00: some state has an effect in every pair",
)
OUTSIDE = Question(
    "patch",
    "largest effect of a state that has none in the program",
    "1.00: the effect of the state that decides the answer",
    "largest",
)
PARTS = Question(
    "patch",
    f"all effects of heads and MLPs are the program's, within {TOLERANCE}",
    "0.00: some part has an effect in every pair",
)
ABLATED = Question(
    "patch (resample)",
    f"what the loss of each head and MLP costs is the program's, within {TOLERANCE}",
    "0.00: some part has an effect in every pair",
)
RANKED = Question(
    "patch",
    "AUROC of states: those with an effect against those without",
    "0.50",
    "mean",
)
RANKED_PARTS = Question(
    "patch",
    "AUROC of heads and MLPs: those with an effect against those without",
    "0.50",
    "mean",
)
ESTIMATED = Question(
    "patch (attribution)",
    "AUROC of states: those with an effect against those without",
    "0.50",
    "mean",
    by_program=True,
)
NEAR = Question(
    "patch (attribution)",
    f"all estimates of states are the program's effects, within {FAR}",
    "0.00: some state has an effect in every pair",
)
ESTIMATED_PARTS = Question(
    "patch (attribution)",
    "AUROC of heads and MLPs: those with an effect against those without",
    "0.50",
    "mean",
)


def score_patch(known: KnownModel, card: Scorecard) -> None:
    """Patch states, heads and MLPs, exactly and by one gradient."""
    parts = parts_of(known)
    for pair in draw_pairs(known.program, PAIRS):
        contrast = contrast_of(known, pair)
        every_place = list(range(len(pair.clean)))
        truth = state_effects(known, pair)
        result = hs.patch(known.model, contrast, sites=known.sites, method="both")
        effects = result.data["effect"].sel(site=known.sites).to_numpy()
        card.count(STATES, is_right(effects, truth))
        card.add(OUTSIDE, np.abs(effects[truth == 0]).max(initial=0.0))
        rank(card, RANKED, truth, effects)
        estimated = result.data["attribution"].sel(site=known.sites).to_numpy()
        rank(card, ESTIMATED, truth, estimated)
        card.count(NEAR, is_right(estimated, truth, FAR))

        truth = part_effects(known, pair, parts)
        result = hs.patch(
            known.model, contrast, sites=parts, window=every_place, method="both"
        )
        effects = result.data["effect"].sel(site=parts).to_numpy().ravel()
        card.count(PARTS, is_right(effects, truth))
        rank(card, RANKED_PARTS, truth, effects)
        estimated = result.data["attribution"].sel(site=parts).to_numpy().ravel()
        rank(card, ESTIMATED_PARTS, truth, estimated)

        result = hs.patch(
            known.model, contrast, sites=parts, window=every_place, method="resample"
        )
        lost = result.data["effect"].sel(site=parts).to_numpy().ravel()
        card.count(ABLATED, is_right(lost, part_losses(known, pair, parts)))


def is_right(effects: Effects, truth: Effects, tolerance: float = TOLERANCE) -> bool:
    """Tell whether all effects are those of the program."""
    return bool((np.abs(effects - truth) < tolerance).all())


def rank(card: Scorecard, question: Question, truth: Effects, scores: Effects) -> None:
    """Keep how well scores tell what has an effect from what has none.

    Thousandths are ranked: below them norms leak, and which leak is larger says nothing.
    """
    has_effect = truth.ravel() > 0
    if has_effect.any() and not has_effect.all():
        card.add(question, roc_auc_score(has_effect, scores.ravel().round(3)))


def parts_of(known: KnownModel) -> list[str]:
    """Return the sites of every head and every MLP."""
    anatomy = known.model.anatomy
    heads = anatomy.select("layer.*.attn.head.*")
    return [str(site) for site in (*heads, *anatomy.select("layer.*.mlp"))]


def contrast_of(known: KnownModel, pair: Pair) -> hs.Contrast:
    """Return a pair as patching takes it: the answer is read at the last token."""
    return hs.Contrast(
        known.ids(pair.clean),
        known.ids(pair.corrupt),
        answer=known.id(pair.answer),
        other=known.id(pair.other),
        at=-1,
    )


def state_effects(known: KnownModel, pair: Pair) -> Effects:
    """Return the effects `[site, token]` that the program gives the states of a pair."""
    effects = np.zeros((len(known.sites), len(pair.clean)))
    for row, site in enumerate(known.sites):
        for place in range(len(pair.clean)):
            trace = known.circuit.patched(site, place, pair.corrupt, pair.clean_trace)
            effects[row, place] = pair.effect(trace["output"][-1])
    return effects


def part_effects(known: KnownModel, pair: Pair, parts: list[str]) -> Effects:
    """Return the effects that the program gives the heads and MLPs of a pair."""
    places = range(len(pair.clean))
    effects = []
    for part in parts:
        trace = known.circuit.with_writer(part, places, pair.corrupt, pair.clean_trace)
        effects.append(pair.effect(trace["output"][-1]))
    return np.array(effects)


def part_losses(known: KnownModel, pair: Pair, parts: list[str]) -> Effects:
    """Return what is lost, in the program, with each head and MLP of the corrupt run."""
    places = range(len(pair.clean))
    losses = []
    for part in parts:
        trace = known.circuit.with_writer(part, places, pair.clean, pair.corrupt_trace)
        losses.append(1 - pair.effect(trace["output"][-1]))
    return np.array(losses)
