"""The linear CKA of every pair of sites, over a sample of the paired states."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hiddenscope.analyses.compare.differences import Comparison
from hiddenscope.errors import TextError
from hiddenscope.measures import FEWEST, WORTH_READING, linear_cka
from hiddenscope.results.dataset import site_names
from hiddenscope.states import States

if TYPE_CHECKING:
    import xarray

CKA = {
    "cka": "linear CKA",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}
MOST_SAMPLED = 1000
HIGH_BY_CHANCE = 0.3


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
        paired = torch.from_numpy(comparison.paired)
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
) -> dict[str, Any]:
    """Put the CKA of every pair of sites into the data, and return its facts."""
    if sample.pairs < FEWEST:
        if not required:
            return {}
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
        attributes = {"long_name": CKA[name]}
        data[name] = ("site", "source_site"), values[rows], attributes
    data.coords["source_site"] = other_names
    facts: dict[str, Any] = {"tokens": sample.pairs, "sampled_tokens": x.shape[1]}
    shown = cka[rows]
    if not np.isfinite(shown).any():
        return {"cka": facts}
    row, column = np.unravel_index(np.nanargmax(shown), shown.shape)
    median_by_chance = float(np.nanmedian(chance))
    facts |= {
        "median": float(np.nanmedian(cka)),
        "median_by_chance": median_by_chance,
        "most_alike": {
            "site": data["site"].values[row],
            "source_site": other_names[column],
            "cka": shown[row, column],
        },
        "few_tokens": x.shape[1] < WORTH_READING or median_by_chance > HIGH_BY_CHANCE,
    }
    return {"cka": facts}
