"""Differences: what is measured in every column of tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.compare.sides import UNKNOWN, ComparedStates, align_tokens
from hiddenscope.errors import SiteError, StatesError
from hiddenscope.passes import TokenColumns
from hiddenscope.results.dataset import Attributes
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states import Pair, Source, States, Tokens

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
}


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
    measures: dict[str, NDArray[np.float32]] | None

    @property
    def stack(self) -> str | None:
        """Return the stack that it is in, where there are two."""
        return self.every[0][0].stack

    @property
    def one_model(self) -> bool:
        """Tell whether both sides are known to come from one model."""
        return self.source[0] == self.source[1] != UNKNOWN

    @property
    def paired(self) -> NDArray[np.int64]:
        """Return the rows of both sides that stand in one column, `[2, pair]`."""
        rows = [(i, j) for i, j in self.columns if i is not None and j is not None]
        return np.array(rows, dtype=np.int64).reshape(-1, 2).T


def compare_text(
    number: int,
    pair: tuple[ComparedStates, ComparedStates],
    sites: SitePatterns,
    *,
    by_spans: bool,
) -> Iterator[tuple[Comparison, tuple[States, States]]]:
    """Compare one text, stack by stack; yield the states that were measured, too."""
    if type(pair[0]) is not type(pair[1]):
        reason = "one has an encoder and a decoder and the other one stack"
        raise StatesError(
            "Cannot compare the two models", reason, "Compare models of one kind."
        )
    for a, b in zip(stacks_of(pair[0]), stacks_of(pair[1]), strict=True):
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
            measures = measured(a, b, common, columns)
        elif isinstance(pair[0], Pair):
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


def largest_relative(first: ComparedStates, second: ComparedStates) -> float:
    """Return the largest relative difference of one text's states computed twice."""
    largest = 0.0
    for a, b in zip(stacks_of(first), stacks_of(second), strict=True):
        columns: TokenColumns = [(row, row) for row in range(len(a.tokens))]
        # The second run may hold two copies of the text.
        relative = measured(a, b.of(0), a.sites, columns)["relative"]
        largest = max(largest, float(relative.max()))
    return largest


def stacks_of(side: ComparedStates) -> list[States]:
    """Return the states of each stack."""
    if isinstance(side, Pair):
        return [side.encoder, side.decoder]
    return [side]


def measured(
    a: States, b: States, sites: tuple[Site, ...], columns: TokenColumns
) -> dict[str, NDArray[np.float32]]:
    """Return every measure, `[site, column]`, NaN in gaps.

    They are computed in float64 and returned as float32.
    """
    shape = len(sites), len(columns)
    cells = {name: np.full(shape, np.nan, dtype=np.float32) for name in MEASURES}
    places, left, right = [], [], []
    for place, (i, j) in enumerate(columns):
        if i is not None and j is not None:
            places.append(place)
            left.append(i)
            right.append(j)
    for row, site in enumerate(sites):
        x = _rows(a[site], left)
        y = _rows(b[site], right)
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
        for name, values in numbers.items():
            cells[name][row, places] = values.numpy()
    return cells


def _rows(states: Tensor, rows: list[int]) -> Tensor:
    return states.detach().cpu()[torch.tensor(rows, dtype=torch.long)].double()
