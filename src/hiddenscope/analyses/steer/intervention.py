"""Interventions: how the states of a model are changed along a direction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hiddenscope.passes import Add, Change, Project
from hiddenscope.sites import Site

How: TypeAlias = Literal["add", "ablate"]


@dataclass(frozen=True)
class Intervention:
    """A change of states: a vector at every changed site, and its strengths.

    A batch holds its texts once for each strength.
    """

    how: How
    vectors: Mapping[Site, Tensor]
    strengths: tuple[float, ...]

    @property
    def entry(self) -> Site:
        """Return the lowest site that is changed."""
        return min(self.vectors)

    def at_entry(self, states: Tensor) -> Tensor:
        """Change states [token, width] at the entry, once for each strength."""
        vector = self.vectors[self.entry]
        if self.how == "ablate":
            return Project(vector).of(states)
        copies = [Add(vector, scale=strength).of(states) for strength in self.strengths]
        return torch.cat(copies)

    def changes(self, texts: int, *, entry: bool) -> dict[str | Site, Change]:
        """Return the change at each site of a batch; at the entry only with `entry`.

        `texts` is the number of texts that the batch holds for each strength.
        """
        changes: dict[str | Site, Change] = {}
        for site, vector in self.vectors.items():
            if entry or site != self.entry:
                changes[site] = self._change(vector, texts)
        return changes

    def _change(self, vector: Tensor, texts: int) -> Change:
        if self.how == "ablate":
            return Project(vector)
        steps = torch.tensor(self.strengths, dtype=torch.float64)[:, None] * vector
        shifts = steps.repeat_interleave(texts, 0)[:, None]
        return lambda states: states + shifts.to(states.device, states.dtype)
