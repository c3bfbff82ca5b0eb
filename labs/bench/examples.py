"""Look up a thousand directions in a million stored states, against reading them and
one bare product.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.store import StorePlan, StoreSequence, create
from labs.bench import measure
from labs.bench.measure import Row

TOKENS, WIDTH, DIRECTIONS = 1_000_000, 576, 1_000
LENGTH, UNITS, VOCABULARY = 100, 20, 49_152
BAR, MEMORY_BAR = 1.25, 1.25
SITE = "layer.1"


def rows(repeats: int) -> list[Row]:
    """Compare looking up directions with reading the states and multiplying them."""
    folder = Path(tempfile.mkdtemp(prefix="hiddenscope-bench-"))
    try:
        path, small_path = folder / "states", folder / "small"
        _store(path, TOKENS, UNITS)
        _store(small_path, TOKENS // 4, UNITS // 4)
        vectors = np.random.default_rng(1).standard_normal((DIRECTIONS, WIDTH))
        units = hs.Dictionary.of(vectors, SITE)
        assert units.encoder is not None
        right = units.encoder

        def bare() -> None:
            for block in hs.open(path).blocks(SITE):
                block.float() @ right

        ways = {"bare": bare, "examples": lambda: hs.examples(hs.open(path), units)}
        ratio = measure.ratios(measure.interleaved(ways, repeats), "bare")["examples"]
        most = measure.peak(lambda: hs.examples(hs.open(path), units))
        few = measure.peak(lambda: hs.examples(hs.open(small_path), units))
    finally:
        shutil.rmtree(folder)
    what = (
        f"{TOKENS:,} stored states, {WIDTH} wide: the tokens that excite each of"
        f" {DIRECTIONS:,} directions"
    )
    return [
        Row(
            "examples",
            f"{what} / reading them and one bare product",
            ratio.cpu,
            ratio.wall,
            BAR,
        ),
        Row(
            "examples memory",
            f"the same: peak memory ({most / 1e9:.2f} GB) / that with a quarter of the"
            " states",
            most / few,
            None,
            MEMORY_BAR,
        ),
    ]


def _store(path: Path, tokens: int, units: int) -> None:
    """Write texts of random tokens, with random states in bfloat16."""
    generator = np.random.default_rng(0)
    plan = StorePlan({"model": "drawn"}, {}, (SITE,), {SITE: WIDTH}, "bfloat16")
    spans = tuple((place, place + 1) for place in range(LENGTH))
    texts = tokens // LENGTH // units
    sequences = []
    for unit in range(units):
        part = []
        for text in range(unit * texts, (unit + 1) * texts):
            ids = generator.zipf(1.3, LENGTH) % VOCABULARY
            part.append(StoreSequence(text, 0, tuple(ids.tolist()), spans, 0))
        sequences.append(part)
    writer = create(path, plan, sequences)
    for unit in range(units):
        shape = texts * LENGTH, WIDTH
        values = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
        bits = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        writer.commit(f"{unit:06d}", {SITE: bits})
