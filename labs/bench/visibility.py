"""Map what every state sees, against one backward pass a target, and one a pair.

The weights are random, in GPT-2's shape: what a product costs does not depend on them.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import hiddenscope as hs
from labs.bench import measure, plain
from labs.bench.measure import Row

TOKENS, DEPTH, WORDS = 16, 12, 1000
SAMPLE = 12
BAR, LOOP_BAR = 3.5, 400
SITES = f"layer.0-{DEPTH - 1},final"
WHAT = f"GPT-2's shape, float32, {TOKENS} tokens, {SITES}"
Cell = tuple[int, int]
Pair = tuple[Cell, Cell]


def rows(repeats: int) -> list[Row]:
    """Measure both ratios; a map that is not the same stops the run."""
    module = _module()
    model = hs.load((module, None))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (1, TOKENS), generator=generator)
    sample = random.Random(0).sample(_pairs(), SAMPLE)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: _ours(model, ids),
        "separate": lambda: plain.visibility(module, ids),
        "loop": lambda: _loop(module, ids, sample),
    }
    _check(ways["ours"](), ways["separate"](), ways["loop"]())
    costs = measure.interleaved(ways, max(1, repeats // 2))
    cost = measure.ratios(costs, "ours")
    separate, loop = cost["separate"], cost["loop"]
    pairs = len(_pairs())
    times = pairs / len(sample)
    targets = TOKENS * (DEPTH + 1)
    what = f"{WHAT}: {targets} separate backward passes, one a target / ours"
    by_pair = (
        f"the same: {pairs:,} whole backward passes, one a pair of states"
        f" (from {SAMPLE} of them) / ours"
    )
    cpu, wall = loop.cpu * times, loop.wall * times
    return [
        Row(
            "visibility",
            f"{what}; same numbers",
            separate.cpu,
            separate.wall,
            BAR,
            at_least=True,
        ),
        Row("visibility", by_pair, cpu, wall, LOOP_BAR, at_least=True),
    ]


def _ours(model: hs.Model, ids: Tensor) -> np.ndarray[Any, Any]:
    result = hs.visibility(model, ids.tolist(), sites=SITES)
    influence: np.ndarray[Any, Any] = result.data["l1"].to_numpy()
    return influence


def _loop(
    module: Any, ids: Tensor, pairs: Sequence[Pair]
) -> dict[tuple[int, ...], float]:
    """Run one `backward` through the whole model for each pair, weights and all."""
    influence = {}
    with torch.enable_grad():
        states = plain.hidden_states(module, ids)
        for state in states:
            state.retain_grad()
        for target, source in pairs:
            plain.length(states[target[0]][0, target[1]]).backward(retain_graph=True)
            gradient = states[source[0]].grad
            assert gradient is not None
            influence[(*target, *source)] = float(gradient[0, source[1]].abs().sum())
            module.zero_grad()
            for state in states:
                state.grad = None
    return influence


def _check(
    ours: np.ndarray[Any, Any], separate: Tensor, loop: dict[tuple[int, ...], float]
) -> None:
    """Compare our map with both others."""
    least = 1e-6 * float(separate.max())
    np.testing.assert_allclose(ours, separate.numpy(), rtol=1e-3, atol=least)
    for place, value in loop.items():
        np.testing.assert_allclose(ours[place], value, rtol=1e-3, atol=least)


def _module() -> Any:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=DEPTH, vocab_size=WORDS, **ends)).eval()


def _pairs() -> list[Pair]:
    """Return every pair of a state and one that it can see, itself included."""
    cells = list(itertools.product(range(DEPTH + 1), range(TOKENS)))
    pairs = []
    for target, source in itertools.product(cells, cells):
        if source[0] <= target[0] and source[1] <= target[1]:
            pairs.append((target, source))
    return pairs
