"""The function that users call: plan a job, show its cost and progress, run it."""

from __future__ import annotations

import os
from typing import Any

import torch

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.extract.engine import Engine, EngineKind
from hiddenscope.extract.job import ExtractJob
from hiddenscope.extract.status import JobProgress
from hiddenscope.model import ModelLike
from hiddenscope.passes import EVERYTHING
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pooling
from hiddenscope.store import Store
from hiddenscope.store import open as open_store


@checked
def extract(
    model: ModelLike,
    corpus: Any,
    to: str | os.PathLike[str],
    *,
    sites: SitePatterns = EVERYTHING,
    pool: Pooling | None = None,
    dtype: str | torch.dtype | None = None,
    engine: EngineKind | Engine = "local",
) -> Store:
    """Store the states of every text of a corpus in the folder `to`.

    `corpus` is whatever `hs.read` takes, a folder of such files, "-" for stdin, or an
    `hs.Corpus` with windows for long texts. It is never whole in memory. `pool` keeps
    one vector for each text ("mean", "max", "last", "first", "cls" or a position),
    `dtype` another precision. `engine` may be an `hs.Engine` with workers. A job that
    was stopped goes on when it is called again.

    >>> import tempfile
    >>> from hiddenscope.testing import tiny_model, tiny_tokenizer
    >>> model = (tiny_model("gpt2"), tiny_tokenizer())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = extract(model, ["The rest.", "A cat sat."], folder, sites="layer.*")
    ...     [str(site) for site in store.sites]
    ['layer.0', 'layer.1', 'layer.2', 'layer.3']
    """
    job = ExtractJob.plan(
        model, corpus, to, sites=sites, pool=pool, dtype=dtype, engine=engine
    )
    for line in job.cost.lines():
        progress.note(line)
    reported = 0
    with progress.track("Extracting tokens", total=job.pending_tokens) as advance:

        def report(now: JobProgress) -> None:
            nonlocal reported
            advance(now.tokens_computed - reported)
            reported = now.tokens_computed

        try:
            job.run(report, every_batch=True)
        except KeyboardInterrupt:
            progress.note(f"Stopped: {job.how_to_resume()}")
            raise
    return open_store(to)
