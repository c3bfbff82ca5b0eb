"""Kinds of tokens that a direction prefers, with intervals over texts.

Half of the texts propose kinds, and the others test them, so that a kind that stood out
by chance is not measured on the tokens that made it stand out.
"""

from collections.abc import Iterator

import numpy as np

from hiddenscope.analyses.examples.story import PreferredKind
from hiddenscope.measures.grouped import LEVEL, effective_count, standard_error
from hiddenscope.states.arrays import Bools, Ints

# Kinds of tokens that are tested for each direction.
CANDIDATES = 3
# What a kind needs in either half of the texts to be proposed, and to be tested.
FEWEST_TOKENS = 10
FEWEST_GROUPS = 5
# How many deviations above chance the share of a kind must be to be proposed.
PROPOSED = 2.0
# What Agresti and Coull add to the tokens that are strong and to those that are not.
ADDED = 2.0


def tested_kinds(
    strong: Bools, ids: Ints, groups: Ints, directions: int
) -> Iterator[PreferredKind]:
    """Yield the kinds that half of the groups propose, as the other half has them.

    The intervals hold for all kinds of this many directions together.
    """
    from scipy.stats import t

    proposing = groups % 2 == 0
    hits, half = strong[proposing], ids[proposing]
    known, kinds = np.unique(half, return_inverse=True)
    sizes = np.bincount(kinds)
    expected = hits.mean() if len(hits) else 0.0
    spread = np.sqrt(max(expected * (1 - expected), 1e-12) / np.maximum(sizes, 1))
    away = (np.bincount(kinds, hits, len(known)) / sizes - expected) / spread
    away[sizes < FEWEST_TOKENS] = -np.inf
    best = np.argsort(-away, kind="stable")[:CANDIDATES]
    level = (1 - LEVEL) / 2 / (CANDIDATES * directions)
    strong, ids, groups = strong[~proposing].astype(float), ids[~proposing], groups // 2
    groups = groups[~proposing]
    for token in known[best[away[best] > PROPOSED]].tolist():
        of_kind = ids == token
        count = int(of_kind.sum())
        _, own_groups = np.unique(groups[of_kind], return_inverse=True)
        too_few = count < FEWEST_TOKENS or own_groups.max(initial=0) + 1 < FEWEST_GROUPS
        if too_few or of_kind.all():
            continue
        share, others = strong[of_kind].mean(), strong[~of_kind].mean()
        # The difference of two means, as the mean of one number for each token.
        weight = of_kind.mean()
        parts = np.where(
            of_kind, (strong - share) / weight, (others - strong) / (1 - weight)
        )
        error = standard_error(parts, groups)
        # A share of 0 or 1 shows no spread: independent tokens have at least this one.
        adjusted = (count * share + ADDED) / (count + 2 * ADDED)
        least = np.sqrt(adjusted * (1 - adjusted) / (count + 2 * ADDED))
        reach = t.ppf(1 - level, max(1.0, effective_count(own_groups) - 1))
        reach *= max(least, 0.0 if error is None else float(error))
        yield PreferredKind(
            id=token,
            tokens=count,
            share=float(share),
            others=float(others),
            low=max(-1.0, float(share - others - reach)),
            high=min(1.0, float(share - others + reach)),
        )
