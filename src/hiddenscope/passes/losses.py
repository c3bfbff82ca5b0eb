"""Losses: how well several runs of a model predict the next tokens of texts."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from hiddenscope.discovery import vocabulary
from hiddenscope.errors import NotFinite
from hiddenscope.passes.inputs import Inputs, PassModel
from hiddenscope.passes.record import Pass
from hiddenscope.states.arrays import Floats

# Logits of a batch of texts: a GPU is busy only with many.
MOST_LOGITS = {"cpu": 2**25, "cuda": 2**27}


class Losses(NamedTuple):
    """The mean loss of each text `[run, text]`, and how often the most likely next
    token is that of the model alone, and the KL divergence from its predictions.

    The first run is that of the model alone.
    """

    loss: Floats
    agreement: Floats
    divergence: Floats = np.empty(0)


def measure_losses(
    inputs: Inputs,
    runs: Iterable[tuple[int, list[int], Pass]],
    run_count: int,
    *,
    divergence: bool = False,
) -> Losses:
    """Score the next token at every token of every text but its last.

    `runs` are the number of a run, the texts in it, and what it gave; of each batch of
    texts, the model's own run is the first. The divergence is measured where asked for.
    """
    loss, agreement, apart = np.zeros((3, run_count, len(inputs)))
    of_model = whole = torch.empty(0)
    assert min(inputs.lengths) > 1, "a text of one token has no next one"
    for row, texts, run in runs:
        assert run.logits is not None
        batch = inputs.some(texts)
        lengths = np.array(batch.lengths)
        ends = np.cumsum(lengths)
        # Every token but the last of a text predicts, every one but the first is next.
        predicts = np.delete(np.arange(ends[-1]), ends - 1)
        following = np.delete(batch.flat, ends - lengths)
        device = run.logits.device
        logits = run.logits[torch.from_numpy(predicts).to(device)].float()
        targets = torch.from_numpy(following).to(device)[:, None]
        normaliser = logits.logsumexp(-1)
        losses = normaliser - logits.gather(1, targets)[:, 0]
        predicted = logits.argmax(-1)
        if row == 0:
            of_model = predicted
        columns = [(loss, losses), (agreement, predicted == of_model)]
        if divergence:
            scores = logits - normaliser[:, None]
            whole = scores if row == 0 else whole
            terms = whole.exp() * (whole - scores)
            # A word that cannot follow has no part in it. Rounding must not take equal
            # predictions below zero.
            terms = terms.masked_fill(whole == -torch.inf, 0)
            columns.append((apart, terms.sum(-1).clamp_min(0)))
        counts = lengths - 1
        starts = np.cumsum(counts) - counts
        for table, values in columns:
            sums = np.add.reduceat(values.cpu().double().numpy(), starts)
            table[row, texts] = sums / counts
    if not np.isfinite(loss).all():
        raise NotFinite(
            "No finite loss",
            "the logits hold a NaN, or rule out a token of the texts",
            "Look at the weights, or load them in float32.",
        )
    return Losses(loss, agreement, apart)


def batch_size(model: PassModel) -> int:
    """Return how many tokens of a batch have as many logits as are held at a time."""
    most = MOST_LOGITS.get(model.device.type, MOST_LOGITS["cpu"])
    return max(1, most // vocabulary(model.module))
