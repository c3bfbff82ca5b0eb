"""Sweep a patch over every layer and token, against a loop of one pass for each cell."""

import torch

import hiddenscope as hs
from labs.bench import measure, plain
from labs.bench.measure import Row

LAYERS, TOKENS = 30, 12

WHAT = (
    f"smollm2, float32, {LAYERS} layers x {TOKENS} tokens, texts that differ from the"
    " first token on"
)


@torch.no_grad()
def rows(repeats: int) -> list[Row]:
    """Compare the sweep with a loop, of which one cell of each layer is timed."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    generator = torch.Generator().manual_seed(0)
    clean, corrupt = torch.randint(100, 40_000, (2, 1, TOKENS), generator=generator)
    contrast = hs.Contrast(clean[0].tolist(), corrupt[0].tolist(), 7042, 9145)
    cells = [(layer, 5 * layer % TOKENS) for layer in range(1, LAYERS)]
    ways = {
        "loop": lambda: plain.patch(model.module, clean, corrupt, cells),
        "ours": lambda: hs.patch(model, contrast, layers=0),
    }
    ratio = measure.ratios(measure.interleaved(ways, repeats), "loop")["ours"]
    share = len(cells) / (LAYERS * TOKENS)
    what = f"{WHAT}: hs.patch / a loop of one pass for each cell"
    return [Row("patch", what, ratio.cpu * share, ratio.wall * share)]
