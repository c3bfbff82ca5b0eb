"""Sampling: which states of each text are measured, and how texts are averaged.

Nothing here imports torch or numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from hiddenscope.arguments import checked, integer
from hiddenscope.errors import TextError
from hiddenscope.interface import ask, readable

if TYPE_CHECKING:
    import numpy as np

# Targets of each text. A target of a 64-token text of smollm2 costs about a third of a
# second of one core, so that 200 texts take minutes.
DEFAULT_TARGETS = 16
# A shorter text has no distances to speak of.
SHORTEST = 8


@readable
@checked
@dataclass(frozen=True)
class Sampling:
    """Say what `hs.visibility` computes of each text, and how it averages texts.

    Several texts are aligned by "distance": `per_text` states of each are drawn, with
    equal chances for every layer and place, and their influences are averaged by how
    many tokens back and how many layers below the source is. What goes out of states is
    measured at `per_text` tokens of each text, at all layers. Aligned by "position",
    the whole maps are averaged place by place. With `baseline="random"` the same is
    computed for a copy of the model with random weights. `probes` random vectors
    estimate a Frobenius norm.

    >>> Sampling(per_text=4).per_text
    4
    """

    per_text: Annotated[
        int, ask("Of several texts: how many states of each are drawn.", aside=True)
    ] = DEFAULT_TARGETS
    align: Annotated[
        Literal["distance", "position"],
        ask(
            "Average several texts by distance, or whole maps by position.", aside=True
        ),
    ] = "distance"
    baseline: Annotated[
        Literal["random"] | None,
        ask("Of several texts: compare with random weights.", aside=True),
    ] = None
    probes: Annotated[
        int | None,
        ask("Random vectors that estimate a Frobenius norm.", least=2, aside=True),
    ] = None

    def __post_init__(self) -> None:
        integer(self.per_text, "per_text", 1)
        if self.probes is not None:
            # An interval needs two.
            integer(self.probes, "probes", 2)


class DrawnTarget(NamedTuple):
    """A state whose sources are looked up: its row among the sites, and its token."""

    row: int
    token: int


class DistanceWindow(NamedTuple):
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
        """Return the window of texts with at least this many tokens."""
        if shortest < SHORTEST:
            raise TextError(
                "Cannot align these texts by distance",
                f"the shortest has {shortest} tokens, and {SHORTEST} are needed",
                "Give longer texts, or Sampling(align='position').",
            )
        return cls(shortest // 2 if causal else (shortest - 1) // 3, causal)

    def places(self, length: int) -> range:
        """Return the tokens of a text of this length that see every distance.

        >>> DistanceWindow(4, True).places(8), DistanceWindow(2, False).places(8)
        (range(5, 8), range(2, 6))
        """
        if self.causal:
            return range(self.farthest + 1, length)
        return range(self.farthest, length - self.farthest)


def draw_targets(
    rows: Sequence[int], places: range, count: int, generator: "np.random.Generator"
) -> list[DrawnTarget]:
    """Draw states of some rows and places, each with the same chance.

    Rows are drawn systematically from a random start, in a random order: their counts
    differ by at most one. The places of a row are drawn systematically too, so that
    they spread over the text. If `count` states or fewer exist, all are returned.

    >>> import numpy as np
    >>> generator = np.random.default_rng(0)
    >>> len(draw_targets([1, 2, 3], range(5, 8), 4, generator))
    4
    >>> len(draw_targets([1, 2, 3], range(5, 8), 100, generator))
    9
    """
    if count >= len(rows) * len(places):
        return list(starmap(DrawnTarget, product(rows, places)))
    counts = [count // len(rows)] * len(rows)
    for place in generator.permutation(len(rows))[: count % len(rows)]:
        counts[place] += 1
    targets = []
    for row, of_row in zip(rows, counts, strict=True):
        start = generator.random() if of_row else 0.0
        for step in range(of_row):
            place = int((start + step) * len(places) / of_row)
            targets.append(DrawnTarget(row, places[place]))
    return targets
