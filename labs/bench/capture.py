"""Capture every layer, against the bare forward pass of the same batch.

Our capture stops before the head, so it is compared with the bare pass of the base
model, which has none.
"""

import json
import statistics
import subprocess
import sys
from typing import Any

import torch

import hiddenscope as hs
from labs.bench import measure
from labs.bench.measure import Row

TEXTS, TOKENS = 8, 64
BAR, MEMORY_BAR, ROUNDS = 1.04, 1.05, 7
WHAT = (
    f"smollm2, float32, {TEXTS} texts x {TOKENS} tokens, layer.0 to layer.30 and final"
)


def batch(module: Any) -> dict[str, Any]:
    """Draw a batch without padding, and so without a mask, the same each time."""
    ids = torch.randint(
        100,
        module.config.vocab_size,
        (TEXTS, TOKENS),
        generator=torch.Generator().manual_seed(0),
    )
    return {"input_ids": ids, "use_cache": False}


@torch.no_grad()
def rows(repeats: int) -> list[Row]:
    """Compare ours, Hugging Face's own way and the whole model with a bare pass."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    base, given = model.module.model, batch(model.module)
    texts = given["input_ids"].tolist()
    ways = {
        "bare": lambda: base(**given),
        "ours": lambda: model.capture(texts),
        "theirs": lambda: base(**given, output_hidden_states=True),
        "head": lambda: model.module(**given),
    }
    ratios = measure.ratios(measure.interleaved(ways, repeats), "bare")
    ours, theirs, head = ratios["ours"], ratios["theirs"], ratios["head"]
    return [
        Row(
            "capture",
            f"{WHAT}: capture / bare pass without the head",
            ours.cpu,
            ours.wall,
            BAR,
        ),
        Row(
            "capture",
            "the same / bare pass with the head",
            ours.cpu / head.cpu,
            ours.wall / head.wall,
        ),
        Row(
            "capture",
            "output_hidden_states=True / bare pass without the head",
            theirs.cpu,
            theirs.wall,
        ),
        _memory(),
    ]


def _memory() -> Row:
    """Compare the peak of a capture with that of a bare pass, per byte of states."""
    what = "peak memory of capture less that of the bare pass / size of the states"
    if not sys.platform.startswith("linux"):
        return Row(
            "memory", what, skipped="the peak is read from /proc, which Linux has"
        )
    done = subprocess.run(
        [sys.executable, "-m", "labs.bench.capture"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Memory has no CPU time and no wall time: its one ratio stands in the first column.
    return Row(
        "memory",
        what,
        statistics.median(json.loads(done.stdout.splitlines()[-1])),
        None,
        MEMORY_BAR,
    )


@torch.no_grad()
def _measure_memory() -> list[float]:
    """Measure in a process of its own: peaks of a capture and of a bare pass, in turn.

    The allocator takes some rounds to settle: in the first one it may hold half the
    size of the states besides.
    """
    model = hs.load("smollm2", dtype="float32", device="cpu")
    base, given = model.module.model, batch(model.module)
    texts = given["input_ids"].tolist()
    size = model.capture(texts).values.nbytes
    shares = []
    for _ in range(ROUNDS):
        bare = measure.peak(lambda: base(**given))
        shares.append((measure.peak(lambda: model.capture(texts)) - bare) / size)
    return shares


if __name__ == "__main__":
    print(json.dumps(_measure_memory()))
