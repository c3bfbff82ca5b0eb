"""Embed texts of many lengths, against sentence-transformers."""

import warnings
from typing import Any

import numpy as np

import hiddenscope as hs
from hiddenscope.loading import zoo
from labs.bench import measure, ragged
from labs.bench.measure import Row

TEXTS, BAR = 192, 1.3


def rows(repeats: int) -> list[Row]:
    """Compare texts a second of our vectors with sentence-transformers'."""
    try:
        theirs = _theirs()
    except ImportError:
        return [
            Row(
                "embed",
                "minilm, against sentence-transformers",
                skipped="sentence-transformers is not installed",
            )
        ]
    model = hs.load("minilm")
    texts, kind = ragged.texts(model.tokenizer, TEXTS)
    ours, other = hs.embed(model, texts), theirs(texts)
    ways = {"ours": lambda: hs.embed(model, texts), "theirs": lambda: theirs(texts)}
    found = measure.ratios(measure.interleaved(ways, repeats), "ours")["theirs"]
    what = (
        f"minilm: {len(texts)} {kind} of {ragged.SHORTEST} to {ragged.LONGEST} tokens:"
        " texts a second of embed / of "
    )
    what += (
        "sentence-transformers in its own batches (largest difference"
        f" {np.abs(ours - other).max():.0e})"
    )
    return [Row("embed", what, found.cpu, found.wall, BAR, at_least=True)]


def _theirs() -> Any:
    """Build sentence-transformers' model of the same folder, with its own defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer, models

        reader = models.Transformer(str(zoo.zoo_folder("minilm")), max_seq_length=256)
        modules = [reader, models.Pooling(384, pooling_mode="mean"), models.Normalize()]
        made = SentenceTransformer(modules=modules, device="cpu")
    return lambda texts: made.encode(texts, show_progress_bar=False)
