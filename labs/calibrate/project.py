"""Project: the p-values of how far apart classes are, corrected for several sites or
not.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hiddenscope.measures.distances import Distances
from hiddenscope.measures.permutations import permuted
from hiddenscope.measures.separation import SCORES, corrected, separation
from hiddenscope.texts import belonging
from labs.calibrate.trials import Claim, Experiment, Study, each

SITES, WIDTH, SHUFFLES = 8, 16, 199
Ints: TypeAlias = NDArray[np.int64]


def trial(seed: int, texts: int, tokens: int) -> tuple[float, float]:
    """Texts of several tokens that go together, with a label a text: shares of p <=
    0.05, and whether any is so.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = np.repeat(np.arange(texts), tokens)
    labels = torch.from_numpy(
        np.random.default_rng(seed).permutation(np.arange(texts) % 2)[groups]
    )
    return called(_noise(groups, 0.5, generator), labels, groups, seed)


def pairs(seed: int, count: int) -> tuple[float, float]:
    """Minimal pairs, of which either text may have the first label."""
    generator, draw = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    groups = np.repeat(np.arange(count), 2)
    labels = (np.arange(2 * count) + draw.integers(2, size=count)[groups]) % 2
    return called(
        _noise(groups, 0.3, generator), torch.from_numpy(labels), groups, seed
    )


def copies(seed: int, count: int, times: int) -> tuple[float, float]:
    """Texts of which those of one class come several times: `project` scores each once."""
    generator = torch.Generator().manual_seed(seed)
    text = np.repeat(np.arange(count), [times, 1] * (count // 2))
    labels, states = (
        text % 2,
        _noise(np.arange(count), 0.0, generator)[:, torch.from_numpy(text)],
    )
    found = belonging([f"text {number}" for number in text], labels.tolist(), None)
    once = np.flatnonzero(found.first)
    groups = np.array(found.groups)[once]
    return called(
        states[:, torch.from_numpy(once)], torch.from_numpy(labels[once]), groups, seed
    )


def _noise(groups: Ints, own: float, generator: torch.Generator) -> torch.Tensor:
    """States that know their group, with so large a deviation of their own."""
    shared = torch.randn(SITES, int(groups.max()) + 1, WIDTH, generator=generator)[
        :, torch.from_numpy(groups)
    ]
    return shared + own * torch.randn(shared.shape, generator=generator)


def called(
    states: torch.Tensor, labels: torch.Tensor, groups: ArrayLike, seed: int
) -> tuple[float, float]:
    """The share of p-values that are at most 0.05, and of scores that are so at any
    site when corrected.
    """
    under = permuted(labels, SHUFFLES, seed, groups).labellings
    scores = [separation(Distances(site), under, groups) for site in states]
    alone = np.mean([score.p <= 0.05 for site in scores for score in site.values()])
    together = [
        min(corrected([site[name] for site in scores])) <= 0.05 for name in SCORES
    ]
    return float(alone), float(np.mean(together))


def sum_up(records: Sequence[tuple[float, float]]) -> Mapping[str, Sequence[float]]:
    return {
        "alone": [alone for alone, _ in records],
        "together": [together for _, together in records],
    }


STUDY = Study(
    "project",
    f"{SITES} independent sites of noise in which the tokens of a text go together, and"
    " meaningless labels; the mean over\nthe four scores (silhouette, neighbour, fisher,"
    " within). Paraphrases are given as groups.",
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
    ]
    + [
        Experiment(
            "10 groups of 4 paraphrases",
            each(partial(trial, texts=10, tokens=4)),
            sum_up,
        ),
        Experiment("16 minimal pairs", each(partial(pairs, count=16)), sum_up),
        Experiment(
            "24 texts, those of one class 6 times",
            each(partial(copies, count=24, times=6)),
            sum_up,
        ),
    ],
)
