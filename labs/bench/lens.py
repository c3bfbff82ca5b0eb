"""Read every layer and token, against the bare products with the unembedding."""

import json
import subprocess
import sys
from typing import Any

import torch

import hiddenscope as hs
from hiddenscope.analyses.lens.reading import read_predictions
from hiddenscope.passes.unembed import Unembedding
from labs.bench import measure
from labs.bench.measure import Row

TOKENS, K = 64, 5
BAR, MOST = 1.15, 64 * 2**20
WHAT = f"smollm2, float32, {TOKENS} tokens, layer.0 to layer.30, 49,152 words"


def _model() -> tuple[Any, list[list[int]]]:
    model = hs.load("smollm2", dtype="float32", device="cpu")
    size = model.text_encoder.vocabulary
    return model, torch.randint(
        100, size, (1, TOKENS), generator=torch.Generator().manual_seed(0)
    ).tolist()


@torch.no_grad()
def rows(repeats: int) -> list[Row]:
    """Reading every layer of given states, the loop that people write, and the whole
    analysis with its pass.
    """
    model, texts = _model()
    states = model.capture(texts, "layer.*").values
    norm, weight = model.module.model.norm, model.module.lm_head.weight.T
    unembedding = Unembedding(model)

    def bare() -> None:
        for layer in states:
            layer @ weight

    def loop() -> list[Any]:
        return [(norm(layer) @ weight).softmax(-1).topk(K) for layer in states]

    ways = {
        "bare": bare,
        "ours": lambda: read_predictions(
            unembedding, [(states, unembedding.last)], len(states) - 1, k=K
        ),
        "loop": loop,
        "whole": lambda: hs.lens(model, texts, k=K),
        "pass": lambda: model.capture(texts, "layer.*"),
    }
    costs = measure.interleaved(ways, repeats)
    ratios, to_loop = (
        measure.ratios(costs, "bare"),
        measure.ratios(costs, "loop")["ours"],
    )
    ours, way, whole, one = (ratios[name] for name in ("ours", "loop", "whole", "pass"))
    return [
        Row(
            "lens",
            f"{WHAT}: {K} best words, entropy and KL / bare products",
            ours.cpu,
            ours.wall,
            BAR,
        ),
        Row(
            "lens",
            "the plain loop of norm, softmax and top-k / bare products",
            way.cpu,
            way.wall,
        ),
        Row(
            "lens",
            "hs.lens, which also computes entropy and KL / the plain loop",
            to_loop.cpu,
            to_loop.wall,
            1.0,
        ),
        Row(
            "lens",
            "hs.lens / the pass and the bare products",
            whole.cpu / (1 + one.cpu),
            whole.wall / (1 + one.wall),
        ),
        _memory(),
    ]


def _memory() -> Row:
    """Compare the peak of the lens with that of a capture of the same states."""
    what = "peak memory of hs.lens less that of capture / 64 MiB"
    if not sys.platform.startswith("linux"):
        return Row("lens", what, skipped="the peak is read from /proc, which Linux has")
    done = subprocess.run(
        [sys.executable, "-m", "labs.bench.lens"],
        capture_output=True,
        text=True,
        check=True,
    )
    growth = json.loads(done.stdout.splitlines()[-1])["growth"]
    return Row("lens", what, growth / MOST, None, 1.0)


@torch.no_grad()
def _measure_memory() -> dict[str, int]:
    """Measure in a process of its own: the peaks of a capture and of a lens."""
    model, texts = _model()
    model.capture(texts, "layer.*")
    hs.lens(model, texts, k=K)
    held = measure.peak(lambda: model.capture(texts, "layer.*"))
    return {"growth": measure.peak(lambda: hs.lens(model, texts, k=K)) - held}


if __name__ == "__main__":
    print(json.dumps(_measure_memory()))
