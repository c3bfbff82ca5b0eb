"""Embed texts with sentence-transformers."""

import warnings

from sentence_transformers import SentenceTransformer, models

from labs.bench.peers.ways import Job, Numbers, Way


def embed(job: Job) -> Way:
    """Encode with its own batches, which it sorts by length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = models.Transformer(job["folder"], max_seq_length=job["longest"])
        pooling = models.Pooling(job["width"], pooling_mode="mean")
        parts = [reader, pooling, models.Normalize()]
        model = SentenceTransformer(modules=parts, device="cpu")

    def run() -> Numbers:
        return {"vectors": model.encode(job["texts"], show_progress_bar=False)}

    return Way(run)
