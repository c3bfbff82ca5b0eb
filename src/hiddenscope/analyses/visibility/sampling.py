"""How much of a map is computed, and how the texts are put together.

Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Literal, NamedTuple

import numpy as np

from hiddenscope.arguments import checked, integer
from hiddenscope.errors import TextError
from hiddenscope.states.arrays import Ints

# Targets of each text. A target of a 64-token text of smollm2 costs about a third of a
# second of one core, so that 200 texts take minutes.
DEFAULT_TARGETS = 16
# A shorter text has no distances to speak of.
SHORTEST = 8


@checked
@dataclass(frozen=True)
class Sampling:
    """Say what `hs.visibility` computes of each text, and how it averages texts.

    Several texts are aligned by "distance": `per_text` states of each are drawn, with
    equal chances for every layer and place, and their influences are averaged by how
    many tokens back and how many layers below the source is. Aligned by "position", the
    whole maps are averaged place by place. With `baseline="random"` the same is
    computed for a copy of the model with random weights. `probes` random vectors
    estimate a Frobenius norm.

    >>> Sampling(per_text=4).per_text
    4
    """

    per_text: int = DEFAULT_TARGETS
    align: Literal["distance", "position"] = "distance"
    baseline: Literal["random"] | None = None
    probes: int | None = None

    def __post_init__(self) -> None:
        integer(self.per_text, "per_text", 1)


class DrawnTarget(NamedTuple):
    """A state whose sources are looked up: its row among the sites, and its token."""

    row: int
    token: int


@dataclass(frozen=True)
class DistanceWindow:
    """The distances that every drawn target has, and the places that have them.

    Influence is compared between distances. If near places were drawn too, far
    distances would be seen by late tokens alone, whose influence is spread over more
    sources: even uniform attention would seem to decay. So only places are drawn that
    have a source at every distance. The first token of a causal text is no such
    source: many models rest their attention on it.
    """

    farthest: int
    causal: bool

    @classmethod
    def of(cls, shortest: int, causal: bool) -> "DistanceWindow":
        """Return the window of texts with at least so many tokens."""
        if shortest < SHORTEST:
            raise TextError(
                "Cannot align these texts by distance",
                f"the shortest has {shortest} tokens, and {SHORTEST} are needed",
                "Give longer texts, or Sampling(align='position').",
            )
        if causal:
            return cls(shortest // 2, causal)
        return cls((shortest - 1) // 3, causal)

    def places(self, length: int) -> range:
        """Return the tokens of a text of this length that see every distance.

        >>> DistanceWindow(4, True).places(8), DistanceWindow(2, False).places(8)
        (range(5, 8), range(2, 6))
        """
        if self.causal:
            return range(self.farthest + 1, length)
        return range(self.farthest, length - self.farthest)


def deepest_of(sites: int) -> int:
    """Return the largest depth that is counted: half of the sites below the last.

    As with distances, a depth is counted only of targets that have all depths. Targets
    of the upper half have them.

    >>> deepest_of(32), deepest_of(2)
    (15, 1)
    """
    return max(1, (sites - 1) // 2)


def draw_targets(
    rows: Sequence[int], places: range, count: int, generator: np.random.Generator
) -> list[DrawnTarget]:
    """Draw states of some rows and places, each with the same chance.

    Rows are drawn systematically from a random start, in a random order: their counts
    differ by at most one. The places of a row are drawn systematically too, so that
    they spread over the text. If `count` states or fewer exist, all are returned.

    >>> generator = np.random.default_rng(0)
    >>> len(draw_targets([1, 2, 3], range(5, 8), 4, generator))
    4
    >>> len(draw_targets([1, 2, 3], range(5, 8), 100, generator))
    9
    """
    if count >= len(rows) * len(places):
        return list(starmap(DrawnTarget, product(rows, places)))
    counts = np.full(len(rows), count // len(rows))
    extra = generator.permutation(len(rows))[: count % len(rows)]
    counts[extra] += 1
    targets = []
    for row, of_row in zip(rows, counts.tolist(), strict=True):
        for place in _systematic(len(places), of_row, generator):
            targets.append(DrawnTarget(row, places[int(place)]))
    return targets


def _systematic(size: int, count: int, generator: np.random.Generator) -> Ints:
    """Draw `count` of `size` numbers, evenly spread, each with the same chance."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    steps = (generator.random() + np.arange(count)) * size / count
    numbers: Ints = np.floor(steps).astype(np.int64)
    return numbers
