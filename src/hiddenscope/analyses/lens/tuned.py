"""Tuned: for each layer the affine map that brings its states nearest to the last layer's.

The map is the ridge regression of the last layer on this one, held towards the identity. Every row is divided by the
size of its last state, which the final norm takes away. How strongly it is held is chosen for each layer by the KL
divergence on half of the texts that are held out, and what is chosen is judged on the other half; where no map is
better on the one, or the chosen one is worse on the other, the layer has none.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.lens.asked import Asked, Plan, states_of
from hiddenscope.analyses.lens.maps import Map, carried
from hiddenscope.analyses.lens.reading import read
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes.tail import Tail
from hiddenscope.sites import summarise
from hiddenscope.states import States

STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)  # of the hold, as a share of each number's own size in the texts
SHARE = 5  # one text of so many is held out
MOST_HELD = 256  # tokens by which maps are chosen, and judged: each costs a product with every word
SAME = "the tokens that the maps were chosen by, for one text alone was held out: the KL after is optimistic"


def fit(model: Model, texts: Asked, plan: Plan) -> tuple[dict[int, Map], dict[str, Any]]:
    """The map of every layer that is better with one, and what was found."""
    held, kept = _parted(texts)
    with progress.track("Fitting", total=sum(kept.lengths)) as advance:
        sums = _Sums(plan)
        for some in kept.groups():
            sums.add(states_of(model, kept, some, plan))
            advance(sum(kept.lengths[some]))
    halves = _halves(held)
    choosing, judging = (_few(model, half, plan) for half in halves)
    tail = Tail(model, plan.last)
    chosen = _chosen(tail, choosing, plan, sums)
    before, after = (_divergence(tail, judging, plan, maps) for maps in ({}, chosen))
    for place in np.flatnonzero(after > before):
        chosen.pop(plan.layers[place].layer or 0, None)
    after = np.minimum(before, after)
    left = [site for site in plan.layers[:-1] if site.layer not in chosen]
    counts = {"texts": len(held.texts), "tokens chosen by": choosing.shape[1], "tokens judged": judging.shape[1]}
    facts: dict[str, Any] = {
        "texts": len(kept.texts),
        "tokens": sum(kept.lengths),
        "held out": counts | ({"judged on": SAME} if halves[0] is halves[1] else {}),
        "KL before": {str(site): kl for site, kl in zip(plan.layers, before.tolist(), strict=True)},
        "KL after": {str(site): kl for site, kl in zip(plan.layers, after.tolist(), strict=True)},
        "left as they are": summarise(left) if left else "none",
    }
    return chosen, facts


def _chosen(tail: Tail, states: Tensor, plan: Plan, sums: "_Sums") -> dict[int, Map]:
    """For every layer the best of the maps on some states, where one is better than none."""
    chosen: dict[int, Map] = {}
    best = _divergence(tail, states, plan, {})
    with progress.track("Choosing", total=len(STRENGTHS)) as advance:
        for strength in STRENGTHS:
            maps = sums.maps(strength)
            found = _divergence(tail, states, plan, maps)
            for place in np.flatnonzero(found[:-1] < best[:-1]):
                chosen[plan.layers[place].layer or 0] = maps[plan.layers[place].layer or 0]
            best = np.minimum(best, found)
            advance(1)
    return chosen


def _parted(texts: Asked) -> tuple[Asked, Asked]:
    """Some texts to choose and judge by, and the others."""
    count = len(texts.texts)
    if count < 2:
        reason = "there is one, and some are held out to judge by"
        raise TextError("Texts to fit a tuned lens on", reason, "Give many: a few hundred, with some thousand tokens.")
    held = [number for number in range(count) if number % SHARE == SHARE - 1] or [count - 1]
    return texts.some(held), texts.some([number for number in range(count) if number not in set(held)])


def _halves(held: Asked) -> tuple[Asked, Asked]:
    """The texts to choose by, and those to judge by: the same where there is only one."""
    count = len(held.texts)
    return (held, held) if count == 1 else (held.some(range(0, count, 2)), held.some(range(1, count, 2)))


class _Sums:
    """What the regressions of the last layer on every other need, added up over texts in float64."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.own: list[Tensor] = []
        self.with_rest: list[Tensor] = []

    def add(self, states: States) -> None:
        values = states.values.double()
        last = values[-1]
        scale = last.shape[1] ** 0.5 / last.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        for place, layer in enumerate(values[:-1]):
            rows = torch.cat([layer, torch.ones(len(layer), 1, dtype=layer.dtype)], 1) * scale
            own, rest = rows.T @ rows, rows.T @ ((last - layer) * scale)
            if place == len(self.own):
                self.own.append(own)
                self.with_rest.append(rest)
            else:
                self.own[place] += own
                self.with_rest[place] += rest

    def maps(self, strength: float) -> dict[int, Map]:
        """The maps, held towards the identity so strongly."""
        return {
            site.layer or 0: _ridge(own, rest, strength)
            for site, own, rest in zip(self.plan.layers, self.own, self.with_rest, strict=False)
        }


def _ridge(own: Tensor, rest: Tensor, strength: float) -> Map:
    """The map h + A h + b for which the rest is explained best."""
    size = own.diagonal().clone()
    size[-1] *= 1e-6  # the bias is free
    held = own + torch.diag(strength * size + 1e-9 * own.diagonal().mean())
    found = torch.linalg.solve(held, rest).T
    matrix = found[:, :-1] + torch.eye(len(found), dtype=found.dtype)
    return Map(matrix.float().contiguous(), found[:, -1].float().contiguous())


def _few(model: Model, held: Asked, plan: Plan) -> Tensor:
    """The states of held-out texts [site, token, width], as many as are worth their cost."""
    found: list[Tensor] = []
    room = MOST_HELD
    for some in held.groups():
        found.append(states_of(model, held, some, plan).values[:, :room])
        room -= found[-1].shape[1]
        if not room:
            break
    return torch.cat(found, 1)


def _divergence(tail: Tail, states: Tensor, plan: Plan, maps: Mapping[int, Map]) -> NDArray[np.float64]:
    """The mean KL from the model's answer of each layer, through its map."""
    values = carried(states, plan.layers, maps)
    found: NDArray[np.float64] = read([(tail, values)], len(values) - 1, k=1).kl.mean(1, dtype=np.float64)
    return found
