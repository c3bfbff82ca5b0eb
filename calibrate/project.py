"""Project: the p-values of how far apart classes are, corrected for several sites or not."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from calibrate.trials import Claim, Experiment, Study, each
from hiddenscope.measures.distances import Distances
from hiddenscope.measures.permutations import shuffled
from hiddenscope.measures.separation import SCORES, corrected, separation

SITES, WIDTH, SHUFFLES = 8, 16, 199


def trial(seed: int, texts: int, tokens: int) -> tuple[float, float]:
    """Texts of several tokens that go together, with a label a text: shares of p <= 0.05, and whether any is so."""
    generator = torch.Generator().manual_seed(seed)
    groups = np.repeat(np.arange(texts), tokens)
    labels = torch.from_numpy(np.random.default_rng(seed).permutation(np.arange(texts) % 2)[groups])
    under = shuffled(labels, SHUFFLES, seed, groups)
    scores = []
    for _ in range(SITES):
        own = torch.randn(texts, WIDTH, generator=generator)[torch.from_numpy(groups)]
        scores.append(separation(Distances(own + 0.5 * torch.randn(own.shape, generator=generator)), under))
    alone = np.mean([score.p <= 0.05 for site in scores for score in site.values()])
    together = [min(corrected([site[name] for site in scores])) <= 0.05 for name in SCORES]
    return float(alone), float(np.mean(together))


def sum_up(records: Sequence[tuple[float, float]]) -> Mapping[str, Sequence[float]]:
    return {"alone": [alone for alone, _ in records], "together": [together for _, together in records]}


STUDY = Study(
    "project",
    f"{SITES} independent sites of noise in which the tokens of a text go together, and labels of texts that mean\n"
    "nothing; the mean over the four scores (silhouette, neighbour, fisher, within).",
    {
        "alone": Claim("p ≤ 0.05 at a site", 0.0, 0.05),
        "together": Claim("corrected p ≤ 0.05 at any site", 0.0, 0.05),
    },
    [
        Experiment(
            f"{texts} texts, {tokens} token{'s' * (tokens > 1)} each",
            each(partial(trial, texts=texts, tokens=tokens)),
            sum_up,
        )
        for texts, tokens in ((20, 1), (40, 1), (20, 5))
    ],
)
