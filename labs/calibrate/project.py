"""Project: the p-values of how far apart classes are, corrected for several sites or
not; and the comparison of two datasets in the same classes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hiddenscope.measures.comparison import Difference, Parts, Sets, compared
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
        Experiment(
            "6 groups of 4 paraphrases", each(partial(trial, texts=6, tokens=4)), sum_up
        ),
        Experiment("16 minimal pairs", each(partial(pairs, count=16)), sum_up),
        Experiment("6 minimal pairs", each(partial(pairs, count=6)), sum_up),
        Experiment(
            "24 texts, those of one class 6 times",
            each(partial(copies, count=24, times=6)),
            sum_up,
        ),
    ],
)


class Law(NamedTuple):
    """How two datasets in two classes are drawn.

    `sizes` are the numbers of texts of groups, and `copied` says that these are equal.
    `apart` is how far the means of the classes are from the middle, `tight` scales the
    spread of the first dataset. `elsewhere` puts the second at another place, at
    another scale and with its classes along another direction.
    """

    sizes: tuple[int, ...] = (1,) * 30
    paired: bool = True
    apart: float = 1.5
    tight: float = 1.0
    copied: bool = False
    elsewhere: bool = False


# Share of the variance that belongs to the group, and to the pair.
GROUP_SHARE, PAIR_SHARE = 0.35, 0.35
COMPARED_SITES = 6
# Draws that the true difference of sets of this size is the mean of.
TRUTH_DRAWS = 200


def two_datasets(seed: int, law: Law, permutations: int) -> dict[str, Difference]:
    """Draw two datasets at several independent sites, and compare them."""
    generator = torch.Generator().manual_seed(seed)
    groups = np.repeat(np.arange(len(law.sizes)), law.sizes)
    classes = groups % 2
    shape = (COMPARED_SITES, len(groups), WIDTH)

    def noise() -> tuple[torch.Tensor, torch.Tensor]:
        of_groups = torch.randn(
            COMPARED_SITES, len(law.sizes), WIDTH, generator=generator
        )
        return of_groups[:, groups], torch.randn(shape, generator=generator)

    of_group, of_pair = noise()
    sides = []
    for kind in (0, 1):
        if not law.paired:
            of_group, of_pair = noise()
        own = torch.randn(shape, generator=generator)
        left = 1 - GROUP_SHARE - PAIR_SHARE
        rows = GROUP_SHARE**0.5 * of_group + PAIR_SHARE**0.5 * of_pair + left**0.5 * own
        if law.copied:
            _, first = np.unique(groups, return_index=True)
            rows = rows[:, first[groups]]
        rows = rows * (1.0 if kind else law.tight)
        direction = kind if law.elsewhere else 0
        rows[:, :, direction] += law.apart * torch.from_numpy(2.0 * classes - 1)
        if law.elsewhere and kind:
            rows = 3 * rows + 10
        sides.append(rows)
    numbers = [groups, groups if law.paired else groups + len(law.sizes)]
    sets = Sets(
        np.repeat([0, 1], len(groups)), np.tile(classes, 2), np.concatenate(numbers)
    )
    parts = Parts(sets, permutations, seed)
    return compared(list(torch.cat(sides, 1)), sets, parts)


@lru_cache
def true_differences(law: Law) -> dict[str, float]:
    """Return the mean difference of many datasets of this size."""
    draws = [two_datasets(10**6 + seed, law, 1) for seed in range(TRUTH_DRAWS)]
    truth = {}
    for name in draws[0]:
        truth[name] = float(np.mean([draw[name].value for draw in draws]))
    return truth


def compare(seed: int, law: Law) -> dict[str, float]:
    """Say whether a difference was found at any site, and whether all intervals hold."""
    same = law.tight == 1
    truth = {"dispersion": 0.0, "neighbour": 0.0}
    if not same:
        truth = true_differences(law)
    record = {}
    for name, numbers in two_datasets(seed, law, SHUFFLES).items():
        called_at_any = float((numbers.p <= 0.05).any())
        kind = "alarm" if same else "power"
        record[f"{name}_{kind}"] = called_at_any
        if name == "dispersion":
            holds = (numbers.low <= truth[name]) & (truth[name] <= numbers.high)
            # Where there is no interval, none is wrong.
            holds |= np.isnan(numbers.low)
            record["dispersion_held"] = float(holds.all())
    return record


def sum_up_comparisons(
    records: Sequence[Mapping[str, float]],
) -> Mapping[str, Sequence[float]]:
    return {key: [record[key] for record in records] for key in records[0]}


LAWS = {
    "30 pairs": Law(),
    "12 pairs": Law((1,) * 12),
    "30 pairs, no classes": Law(apart=0.0),
    "30 pairs, the second dataset elsewhere": Law(elsewhere=True),
    "20 groups of unequal size": Law((6, 5, 4, 3, 2, 2) + (1,) * 14),
    "20 groups of unequal size, copies": Law(
        (6, 5, 4, 3, 2, 2) + (1,) * 14, copied=True
    ),
    "30 and 30 texts without pairs": Law(paired=False),
    "20 and 20 groups of two, without pairs": Law((2,) * 20, paired=False),
    "30 pairs, the first 0.7 times as wide": Law(tight=0.7),
    "30 pairs, the first 0.7 times as wide, the second elsewhere": Law(
        tight=0.7, elsewhere=True
    ),
    "30 and 30 texts without pairs, the first 0.7 times as wide": Law(
        paired=False, tight=0.7
    ),
}
COMPARISON = Study(
    "project, two datasets",
    f"{COMPARED_SITES} independent sites, two classes, and two datasets that come from"
    " one law, or of which the first is planted\nto be tighter. The texts of a group, and"
    " more so those of a pair, go together. Intervals must hold at all sites together.",
    {
        "dispersion_alarm": Claim("dispersion: p ≤ 0.05 at any site", 0.0, 0.05),
        "neighbour_alarm": Claim("neighbour: p ≤ 0.05 at any site", 0.0, 0.05),
        "dispersion_held": Claim("dispersion: all intervals hold", 0.95, 1.0),
        "dispersion_power": Claim("dispersion: found, where it was planted"),
        "neighbour_power": Claim("neighbour: found, where it was planted"),
    },
    [
        Experiment(name, each(partial(compare, law=law)), sum_up_comparisons)
        for name, law in LAWS.items()
    ],
)
