"""The map of what every state sees, against one backward pass a target, and against one
a pair of states.

The weights are random, in GPT-2's shape: what a product costs does not depend on them.
"""

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from bench import measure
from bench.measure import Row

TOKENS, DEPTH = 16, 12
SAMPLE = 12
BAR, LOOP_BAR = 2.5, 400
WHAT = f"GPT-2's shape, float32, {TOKENS} tokens, layer.0 to layer.{DEPTH}"


def rows(repeats: int) -> list[Row]:
    """Both ratios; a map that is not the same stops the run."""
    model, ids = _model(), _ids()
    sites = model.anatomy.select("layer.*")
    sample = _sample()
    ways = {
        "ours": lambda: ours(model, ids),
        "separate": lambda: separate(model, ids, sites),
        "loop": lambda: loop(model, ids, sites, sample),
    }
    expected, influence = separate(model, ids, sites), ours(model, ids)
    np.testing.assert_allclose(
        influence, expected, rtol=1e-3, atol=1e-6 * expected.max()
    )
    for (target, source), value in loop(model, ids, sites, sample).items():
        np.testing.assert_allclose(
            influence[(*target, *source)], value, rtol=1e-3, atol=1e-6 * expected.max()
        )
    costs = measure.interleaved(ways, max(1, repeats // 2))
    cost = measure.ratios(costs, "ours")
    pairs = len(_pairs())
    times = pairs / len(sample)
    return [
        Row(
            "visibility",
            f"{WHAT}: {TOKENS * len(sites)} separate backward passes, one a target /"
            " ours; same numbers",
            cost["separate"].cpu,
            cost["separate"].wall,
            BAR,
            at_least=True,
        ),
        Row(
            "visibility",
            f"the same: {pairs:,} whole backward passes, one a pair of states (from"
            f" {len(sample)} of them) / ours",
            cost["loop"].cpu * times,
            cost["loop"].wall * times,
            LOOP_BAR,
            at_least=True,
        ),
    ]


def ours(model: hs.Model, ids: list[list[int]]) -> Any:
    """The map by hiddenscope."""
    return hs.visibility(model, ids, sites="layer.*").data["l1"].to_numpy()


def separate(model: hs.Model, ids: list[list[int]], sites: Any) -> Any:
    """One pass, then for each target one backward pass to all the states below."""
    live = hs.record(model, ids, "layer.*", grad=True).live
    states = [live[site] for site in sites]
    influence = np.zeros((len(sites), TOKENS, len(sites), TOKENS))
    for site, token in itertools.product(range(len(sites)), range(TOKENS)):
        gradients = torch.autograd.grad(
            _length(states[site][0, token]), states[: site + 1], retain_graph=True
        )
        for source, gradient in enumerate(gradients):
            influence[site, token, source] = gradient[0].abs().sum(-1).numpy()
    return influence


def loop(
    model: hs.Model, ids: list[list[int]], sites: Any, pairs: list[Any]
) -> dict[Any, float]:
    """For each pair of states one `backward` through the whole model, weights and all,
    as one would write it first.
    """
    live = hs.record(model, ids, "layer.*", grad=True).live
    for state in live.values():
        state.retain_grad()
    influence = {}
    for target, source in pairs:
        _length(live[sites[target[0]]][0, target[1]]).backward(retain_graph=True)
        influence[target, source] = float(
            live[sites[source[0]]].grad[0, source[1]].abs().sum()
        )
        model.module.zero_grad()
        for state in live.values():
            state.grad = None
    return influence


def _length(state: Tensor) -> Tensor:
    return state.abs().sum() / state.norm()


def _model() -> hs.Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return hs.load((GPT2LMHeadModel(GPT2Config(n_layer=DEPTH)).eval(), None))


def _ids() -> list[list[int]]:
    return torch.randint(
        100, 50_000, (1, TOKENS), generator=torch.Generator().manual_seed(0)
    ).tolist()


def _pairs() -> list[Any]:
    """Every pair of a state and one that it can see, itself included."""
    cells = list(itertools.product(range(DEPTH + 1), range(TOKENS)))
    return [(a, b) for a in cells for b in cells if b[0] <= a[0] and b[1] <= a[1]]


def _sample() -> list[Any]:
    return random.Random(0).sample(_pairs(), SAMPLE)
