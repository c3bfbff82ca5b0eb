"""Compare two live models by drift, against a bare pass of each."""

import copy
from typing import Any

import torch

import hiddenscope as hs
from labs.bench import measure
from labs.bench.measure import Row

TOKENS = 128
# Two passes of each model are needed to feed the candidate the reference's states, one
# is in float64, and one of each without hooks is the self-check: seven passes for two,
# and float64 costs twice as much as float32.


def rows(repeats: int) -> list[Row]:
    """Compare smollm2 with a copy of itself, over one bare pass of each."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    candidate = copy.deepcopy(model.module)
    ids = torch.randint(
        100, 40_000, (1, TOKENS), generator=torch.Generator().manual_seed(0)
    )

    def bare() -> list[Any]:
        with torch.no_grad():
            return [
                module(input_ids=ids, use_cache=False).logits
                for module in (model.module, candidate)
            ]

    def ours() -> Any:
        return hs.drift(model, candidate, ids.tolist())

    assert not ours().facts["drifted"], "a copy is no drift"
    cost = measure.ratios(
        measure.interleaved({"ours": ours, "bare": bare}, repeats), "bare"
    )["ours"]
    passes = ours().facts["passes"]
    counted = (
        f"{passes['reference']} passes of the reference and {passes['candidate']} of"
        " the candidate"
    )
    what = (
        f"smollm2, float32, {TOKENS} tokens: drift from a copy, {counted} and the"
        " self-check / one bare pass of each"
    )
    return [Row("drift", what, cost.cpu, cost.wall)]
