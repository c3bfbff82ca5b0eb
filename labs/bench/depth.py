"""Capture layers up to k of L: the pass should cost k/L of the whole."""

import torch

import hiddenscope as hs
from labs.bench import measure
from labs.bench.measure import Row

DEPTHS = (5, 10, 15, 20, 25)
TEXTS, TOKENS = 4, 64
BAR = 1.08


@torch.no_grad()
def rows(repeats: int) -> list[Row]:
    """Compare the time up to layer k with k/L of the time up to layer L."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    depth = model.anatomy.stacks[0].depth
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        100, model.module.config.vocab_size, (TEXTS, TOKENS), generator=generator
    ).tolist()
    ways = {
        str(k): lambda k=k: model.capture(ids, f"layer.{k}") for k in (*DEPTHS, depth)
    }
    ratios = measure.ratios(measure.interleaved(ways, repeats), str(depth))
    what = (
        f"smollm2, float32, {TEXTS} texts x {TOKENS} tokens: capture of layer.{{k}} /"
        f" {{k}}/{depth} of layer.{depth}"
    )
    rows = []
    for k in DEPTHS:
        cost, share = ratios[str(k)], k / depth
        rows.append(
            Row("depth", what.format(k=k), cost.cpu / share, cost.wall / share, BAR)
        )
    return rows
