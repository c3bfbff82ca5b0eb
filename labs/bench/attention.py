"""Look inside attention: all heads' outputs, and all patterns of a text.

Heads' outputs are compared with a bare pass without the head, and patterns with the
pass that reports them, which needs eager attention.
"""

from copy import deepcopy
from typing import Any

import torch

import hiddenscope as hs
from labs.bench import measure
from labs.bench.capture import TEXTS, TOKENS, batch
from labs.bench.measure import Row

PATTERN_TOKENS = 64
Z_BAR, PATTERN_BAR = 1.05, 1.2


@torch.no_grad()
def rows(repeats: int) -> list[Row]:
    """Compare a capture of every `z`, and `hs.attention`, with passes of transformers."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    return [_outputs(model, repeats), _patterns(model, repeats)]


def _outputs(model: hs.Model, repeats: int) -> Row:
    base: Any = model.module
    given = batch(model.module)
    texts = given["input_ids"].tolist()
    ways = {
        "bare": lambda: base.model(**given),
        "ours": lambda: model.capture(texts, "*.attn.z"),
    }
    ratio = measure.ratios(measure.interleaved(ways, repeats), "bare")["ours"]
    what = f"smollm2, float32, {TEXTS} texts x {TOKENS} tokens, every z"
    return Row(
        "attention",
        f"{what}: capture / bare pass without the head",
        ratio.cpu,
        ratio.wall,
        Z_BAR,
    )


def _patterns(model: hs.Model, repeats: int) -> Row:
    eager: Any = deepcopy(model.module)
    eager.set_attn_implementation("eager")
    ids = batch(model.module)["input_ids"][:1, :PATTERN_TOKENS]
    texts = model.encode(ids.tolist())
    ways = {
        "eager": lambda: eager(input_ids=ids, use_cache=False, output_attentions=True),
        "ours": lambda: hs.attention(model, texts, draws=0),
    }
    ours = torch.from_numpy(ways["ours"]().data["pattern"].to_numpy())
    theirs = torch.cat(ways["eager"]().attentions)
    difference = (ours - theirs).abs().max().item()
    ratio = measure.ratios(measure.interleaved(ways, repeats), "eager")["ours"]
    what = f"smollm2, float32, one text of {PATTERN_TOKENS} tokens, every pattern"
    against = "eager pass with output_attentions=True"
    return Row(
        "attention",
        f"{what}: hs.attention / {against} (largest difference {difference:.0e})",
        ratio.cpu,
        ratio.wall,
        PATTERN_BAR,
    )
