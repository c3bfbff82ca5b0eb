"""Differences: what is measured in every column of tokens, and the linear CKA of every
pair of sites over a sample of the paired states.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hiddenscope.analyses.compare.sides import UNKNOWN, Side, Sides, align_tokens
from hiddenscope.analyses.compare.story import AlikeSites, Similarity
from hiddenscope.directions.direction import Direction
from hiddenscope.errors import SiteError, StatesError, TextError
from hiddenscope.measures import FEWEST, WORTH_READING, linear_cka
from hiddenscope.passes import TokenColumns
from hiddenscope.results.dataset import Attributes, site_names
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states import Source, States, Tokens
from hiddenscope.states.arrays import Floats32

if TYPE_CHECKING:
    import xarray

MEASURES: Mapping[str, Attributes] = {
    "l2": {"long_name": "difference", "units": "L2", "scale": "log"},
    "relative": {
        "long_name": "relative difference",
        "units": "L2 over the mean of the two norms",
    },
    "cosine": {"long_name": "cosine of the two states"},
    "mean": {
        "long_name": "mean of the difference over the width, second less first",
        "meaning": "diverging",
    },
    "deviation": {
        "long_name": "standard deviation of the difference over the width",
        "scale": "log",
    },
    "along": {
        "long_name": "difference along the direction, second less first",
        "meaning": "diverging",
    },
}


CKA = {
    "cka": "linear CKA",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}
MOST_SAMPLED = 1000
HIGH_BY_CHANCE = 0.3


@dataclass(frozen=True, eq=False)
class Comparison:
    """One text in one stack, compared: both sides, their columns and the measures.

    `sites` are those that both sides have, out of `every`. `measures` are None where
    the widths differ.
    """

    number: int
    tokens: tuple[Tokens, Tokens]
    every: tuple[tuple[Site, ...], tuple[Site, ...]]
    source: tuple[Source, Source]
    sites: tuple[Site, ...]
    columns: TokenColumns
    measures: dict[str, Floats32] | None

    @property
    def stack(self) -> str | None:
        """Return the stack that it is in, where there are two."""
        return self.every[0][0].stack

    @property
    def one_model(self) -> bool:
        """Tell whether both sides are known to come from one model."""
        return self.source[0] == self.source[1] != UNKNOWN

    @property
    def paired(self) -> torch.Tensor:
        """Return the rows of both sides that stand in one column, `[2, pair]`."""
        return _paired(self.columns)[:2]


def _paired(columns: TokenColumns) -> torch.Tensor:
    """Return the rows of both sides that stand in one column, and the column."""
    rows = []
    for place, (i, j) in enumerate(columns):
        if i is not None and j is not None:
            rows.append((i, j, place))
    return torch.tensor(rows, dtype=torch.long).reshape(-1, 3).T


def compare_text(
    number: int,
    pair: Sides,
    sites: SitePatterns,
    *,
    by_spans: bool,
    direction: Direction | None = None,
) -> Iterator[tuple[Comparison, tuple[States, States]]]:
    """Compare one text, stack by stack; yield the states that were measured, too."""
    if len(pair[0]) != len(pair[1]):
        reason = "one has an encoder and a decoder and the other one stack"
        raise StatesError(
            "Cannot compare the two models", reason, "Compare models of one kind."
        )
    for a, b in zip(*pair, strict=True):
        a, b = a.select(sites=sites), b.select(sites=sites)
        columns = align_tokens(a.tokens, b.tokens, by_spans=by_spans)
        common = tuple(site for site in a.sites if site in b.sites)
        measures = None
        if a.width == b.width:
            if not common:
                reason = f"they have {summarise(a.sites)} and {summarise(b.sites)}"
                raise SiteError(
                    "The two sides have no site in common",
                    reason,
                    "Choose sites that are in both.",
                )
            measures = measured(a, b, common, columns, direction)
        elif len(pair[0]) > 1:
            reason = f"the {a.sites[0].stack}s are {a.width} and {b.width} wide"
            remedy = "Compare one stack: compare(a.encoder, b.encoder)."
            raise StatesError("Cannot compare the two encoder-decoders", reason, remedy)
        comparison = Comparison(
            number=number,
            tokens=(a.tokens, b.tokens),
            every=(a.sites, b.sites),
            source=(a.source, b.source),
            sites=common,
            columns=columns,
            measures=measures,
        )
        yield comparison, (a, b)


def largest_relative(first: Side, second: Side) -> float:
    """Return the largest relative difference of one text's states computed twice."""
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        columns: TokenColumns = [(row, row) for row in range(len(a.tokens))]
        # The second run may hold two copies of the text.
        relative = measured(a, b.of(0), a.sites, columns)["relative"]
        largest = max(largest, float(relative.max()))
    return largest


def measured(
    a: States,
    b: States,
    sites: tuple[Site, ...],
    columns: TokenColumns,
    direction: Direction | None = None,
) -> dict[str, Floats32]:
    """Return every measure, `[site, column]`, NaN in gaps.

    They are computed in float64 and returned as float32.
    """
    shape = len(sites), len(columns)
    cells = {name: np.full(shape, np.nan, dtype=np.float32) for name in MEASURES}
    left, right, places = _paired(columns)
    for row, site in enumerate(sites):
        x = a[site].detach().cpu()[left].double()
        y = b[site].detach().cpu()[right].double()
        difference = y - x
        l2 = difference.norm(dim=-1)
        x_square, y_square = (x * x).sum(-1), (y * y).sum(-1)
        mean_norm = (x_square.sqrt() + y_square.sqrt()) / 2
        # In this form the cosine of equal states is exactly 1.
        cosine = (x * y).sum(-1) / (x_square * y_square).sqrt()
        numbers = {
            "l2": l2,
            # Two states that are both zero do not differ.
            "relative": torch.where(l2 == 0, 0.0, l2 / mean_norm),
            "cosine": cosine.clamp(-1, 1),
            "mean": difference.mean(-1),
            "deviation": difference.std(-1, correction=0),
        }
        if direction is not None:
            vector = direction.vector_at(site, x.shape[-1])
            numbers["along"] = difference @ (vector / vector.norm())
        for name, values in numbers.items():
            cells[name][row, places.numpy()] = values.numpy()
    if direction is None:
        del cells["along"]
    return cells


class CKASample:
    """At most a thousand of the paired states, each as likely as any other.

    Every pair draws a number, and those with the lowest stay; so it does not matter how
    texts are cut.
    """

    def __init__(self) -> None:
        self.pairs = 0
        self._generator = torch.Generator().manual_seed(0)
        self._draws = torch.zeros(0)
        self._states: list[list[torch.Tensor]] = [[], []]

    def add(self, comparison: Comparison, sides: tuple[States, States]) -> None:
        """Add the paired tokens of one text."""
        paired = comparison.paired
        count = paired.shape[1]
        self.pairs += count
        draws = torch.rand(count, generator=self._generator)
        self._draws = torch.cat([self._draws, draws])
        for parts, side, rows in zip(self._states, sides, paired, strict=True):
            parts.append(side.values.detach().cpu()[:, rows])
        if len(self._draws) > 2 * MOST_SAMPLED:
            self._thin()

    def sides(self) -> list[torch.Tensor]:
        """Return the sampled states of both sides, `[site, token, width]` each."""
        self._thin()
        return [parts[0] for parts in self._states]

    def _thin(self) -> None:
        lowest = self._draws.argsort(stable=True)[:MOST_SAMPLED].sort().values
        self._draws = self._draws[lowest]
        self._states = [[torch.cat(parts, 1)[:, lowest]] for parts in self._states]


def put_cka(
    data: "xarray.Dataset", first: Comparison, sample: CKASample, *, required: bool
) -> Similarity | None:
    """Put the CKA of every pair of sites into the data, and report it."""
    if sample.pairs < FEWEST:
        if not required:
            return None
        reason = (
            f"{sample.pairs} tokens are in both and it takes {FEWEST}; a few hundred"
            " make it worth reading"
        )
        raise TextError(
            "Too few tokens for linear CKA",
            reason,
            "Give a longer text, or several.",
        )
    x, y = sample.sides()
    names, other_names = map(site_names, first.every)
    rows = [names.index(site) for site in data["site"].to_numpy().tolist()]
    cka, chance = (values.float().numpy() for values in linear_cka(x, y))
    for name, values in (("cka", cka), ("cka_chance", chance)):
        data[name] = ("site", "source_site"), values[rows], {"long_name": CKA[name]}
    data.coords["source_site"] = other_names
    shown = cka[rows]
    counts = Similarity(tokens=sample.pairs, sampled_tokens=x.shape[1])
    if not np.isfinite(shown).any():
        return counts
    row, column = np.unravel_index(np.nanargmax(shown), shown.shape)
    median_by_chance = float(np.nanmedian(chance))
    return replace(
        counts,
        median=float(np.nanmedian(cka)),
        median_by_chance=median_by_chance,
        most_alike=AlikeSites(
            site=str(data["site"].values[row]),
            source_site=other_names[column],
            cka=float(shown[row, column]),
        ),
        few_tokens=x.shape[1] < WORTH_READING or median_by_chance > HIGH_BY_CHANCE,
    )
