"""Likeness: linear CKA for every pair of sites, over the tokens that both sides have."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hiddenscope.analyses.compare.cells import Piece
from hiddenscope.errors import TextError
from hiddenscope.measures import FEWEST, WORTH_READING, linear_cka
from hiddenscope.states import States

if TYPE_CHECKING:
    import xarray

CKA = {
    "cka": "linear CKA",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}
MOST = 1000


class Sample:
    """At most a thousand of the paired states, each as likely to be kept as any other, however many come.

    Every pair draws a number, and those with the lowest stay; so it does not matter how texts are cut.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._draws = torch.Generator().manual_seed(0)
        self._drawn = torch.zeros(0)
        self._kept: list[list[torch.Tensor]] = [[], []]

    def add(self, piece: Piece, sides: tuple[States, States]) -> None:
        """See the paired tokens of one text."""
        rows = torch.from_numpy(piece.paired)
        self.seen += rows.shape[1]
        self._drawn = torch.cat([self._drawn, torch.rand(rows.shape[1], generator=self._draws)])
        for kept, side, own in zip(self._kept, sides, rows, strict=True):
            kept.append(side.values.detach().cpu()[:, own])
        if len(self._drawn) > 2 * MOST:
            self._thin()

    def sides(self) -> list[torch.Tensor]:
        """What was kept of both sides, `[site, token, width]` each."""
        self._thin()
        return [kept[0] for kept in self._kept]

    def _thin(self) -> None:
        stay = self._drawn.argsort(stable=True)[:MOST].sort().values
        self._drawn = self._drawn[stay]
        self._kept = [[torch.cat(kept, 1)[:, stay]] for kept in self._kept]


def put_cka(data: "xarray.Dataset", piece: Piece, sample: Sample, *, needed: bool) -> dict[str, Any]:
    """Put the CKA of every pair of sites into the data; what it shows."""
    if sample.seen < FEWEST:
        if needed:
            reason = f"{sample.seen} tokens are in both and it takes {FEWEST}; a few hundred make it worth reading"
            raise TextError("Linear CKA of two models", reason, "Give a longer text, or several.")
        return {}
    x, y = sample.sides()
    found_cka, chance = (values.float().numpy() for values in linear_cka(x, y))
    names = [[str(site) for site in side] for side in piece.every]
    place = [names[0].index(site) for site in data["site"].to_numpy().tolist()]
    for name, values in zip(CKA, (found_cka, chance), strict=True):
        data[name] = (("site", "source_site"), values[place], {"long_name": CKA[name]})
    data.coords["source_site"] = names[1]
    facts: dict[str, Any] = {"tokens": x.shape[1], **({"sampled of": sample.seen} if sample.seen > x.shape[1] else {})}
    shown = found_cka[place]
    if not np.isfinite(shown).any():
        return {"cka": facts | {"none": "all states of a site are equal, on one side at least"}}
    row, column = np.unravel_index(np.nanargmax(shown), shown.shape)
    facts |= {"median": float(np.nanmedian(found_cka)), "median by chance": float(np.nanmedian(chance))}
    best = {"site": data["site"].values[row], "source_site": names[1][column]}
    facts["most alike"] = {**best, "cka": shown[row, column]}
    if x.shape[1] < WORTH_READING or facts["median by chance"] > 0.3:
        facts["few tokens"] = "with so few, states that have nothing to do with each other look alike: give more text"
    return {"cka": facts}
