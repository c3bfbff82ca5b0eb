"""The faithfulness of circuits of every size, in float64."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from tests.oracles.plain import Pair, Plain, pairs_of
from tests.oracles.wiring import Patched, Wiring, rewired


def circuit(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return the faithfulness and the ranks, without intervals.

    Circuits of the strongest edges hold those that the result names, where effects are
    too near to tell which comes first.
    """
    data = result.data
    writers, readers = data["writer"].values.tolist(), data["reader"].values.tolist()
    wiring = Wiring(Plain(model.module), writers, readers)
    pairs = pairs_of(model, asked["contrasts"])
    generator = np.random.default_rng(asked.get("seed", 0))
    choosing, testing = _split(pairs, generator)
    method = asked.get("method", "integrated")
    effect = _effect(wiring, choosing, method)
    shares = data["share"].values
    edges = np.argwhere(wiring.possible)
    sizes = [ceil(share * len(edges)) for share in shares]
    ranked = np.argsort(-np.abs(effect[tuple(edges.T)]), kind="stable")
    chosen_by = _chosen_by(edges[ranked], effect, sizes, shares, data)
    ways = data["way"].values.tolist()
    kept = np.zeros((len(ways), len(sizes), *effect.shape), dtype=bool)
    for row, way in enumerate(ways):
        order = edges
        if way == "plain gradient":
            plainly = _effect(wiring, choosing, "gradient")[tuple(edges.T)]
            order = edges[np.argsort(-np.abs(plainly), kind="stable")]
        if way.startswith("random"):
            order = generator.permutation(edges)
        for column, size in enumerate(sizes):
            if way in ("circuit", "complement"):
                kept[row, column] = chosen_by <= shares[column]
            else:
                kept[row, column][tuple(order[:size].T)] = True
            if way == "complement":
                kept[row, column] = wiring.possible & ~kept[row, column]
    mean = _mean(wiring, choosing)
    ablation = asked.get("ablation", "resample")
    where_chosen = _faithfulness(wiring, choosing, (ablation, mean), kept[:1])
    return {
        "faithfulness": _faithfulness(wiring, testing, (ablation, mean), kept),
        "where_chosen": where_chosen[0],
        "effect": effect,
        "chosen_by": chosen_by,
    }


def _split(
    pairs: Sequence[Pair], generator: np.random.Generator
) -> tuple[list[Pair], list[Pair]]:
    """Return the contrasts that choose and those that test, by groups."""
    names: list[Any] = []
    for pair in pairs:
        prompts = frozenset(str(side) for side in (pair.clean, pair.corrupt))
        names.append(prompts if pair.group is None else pair.group)
    groups = [*dict.fromkeys(names)]
    if len(groups) == 1:
        return list(pairs), list(pairs)
    few = len(groups) // 2
    # Eight groups or more test where there are enough.
    if len(groups) >= 11:
        few = min(few, len(groups) - 8)
    chosen = {groups[k] for k in generator.permutation(len(groups))[:few]}
    of_groups = list(zip(pairs, names, strict=True))
    choosing = [pair for pair, name in of_groups if name in chosen]
    return choosing, [pair for pair, name in of_groups if name not in chosen]


def _effect(wiring: Wiring, pairs: Sequence[Pair], method: str) -> np.ndarray:
    effects = []
    for pair in pairs:
        patched = Patched(wiring, pair, "clean")
        effects.append(
            patched.exact() if method == "exact" else patched.estimated(method)
        )
    return np.mean(effects, 0)


def _chosen_by(
    ranked: np.ndarray,
    effect: np.ndarray,
    sizes: Sequence[int],
    shares: np.ndarray,
    data: Any,
) -> np.ndarray:
    """Return the share of the smallest circuit that holds each edge."""
    chosen = np.full(effect.shape, np.nan)
    strengths = np.abs(effect[tuple(ranked.T)])
    near = 2e-3 * strengths.max()
    found = data["chosen_by"].values
    for share, size in zip(shares[::-1], sizes[::-1], strict=True):
        chosen[tuple(ranked[:size].T)] = share
    for edge, strength in zip(ranked.tolist(), strengths, strict=True):
        place = tuple(edge)
        for share, size in zip(shares, sizes, strict=True):
            if found[place] == share and size < len(strengths):
                weakest = strengths[size - 1]
                stronger = strength >= weakest - near
                before = sizes[max(0, list(shares).index(share) - 1)]
                weaker = size == sizes[0] or strength <= strengths[before - 1] + near
                if stronger and weaker:
                    chosen[place] = share
            elif found[place] == share and strength <= strengths[sizes[-2] - 1] + near:
                chosen[place] = share
    return chosen


def _mean(wiring: Wiring, pairs: Sequence[Pair]) -> Tensor:
    """Return what each part writes on average, over the tokens of both prompts."""
    means = []
    for pair in pairs:
        both = [wiring.written(side) for side in (pair.clean, pair.corrupt)]
        means.append(torch.cat(both, 1).mean(1))
    return torch.stack(means).mean(0)


def _faithfulness(
    wiring: Wiring,
    pairs: Sequence[Pair],
    ablation: tuple[str, Tensor],
    kept: np.ndarray,
) -> np.ndarray:
    """Return the share of the logit difference that is left [way, size]."""
    circuits = kept.reshape(-1, *kept.shape[2:])
    circuits = np.concatenate([circuits, np.zeros_like(circuits[:1])])
    left = np.zeros(len(circuits))
    whole = 0.0
    for pair in pairs:
        ablated = wiring.written(pair.corrupt)
        if ablation[0] == "zero":
            ablated = torch.zeros_like(ablated)
        if ablation[0] == "mean":
            ablated = ablation[1][:, None].expand_as(ablated)
        logits = rewired(wiring, pair.clean, ablated, circuits)
        left += pair.difference(logits, 0).numpy()
        whole += float(pair.difference(wiring.plain.run(pair.clean)[0], 0)[0])
    shares = (left[:-1] - left[-1]) / (whole - left[-1])
    return shares.reshape(kept.shape[:2])
