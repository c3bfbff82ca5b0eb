"""One axis for models of different depths.

A layer lies at the fraction of its model's depth: layer 6 of 12 at 0.5, `final` at 1.
Members with the same sites keep the names of these. Where depths differ, a place of
the axis is a depth, and a member has a number there only if it has a layer there:
nothing is interpolated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from hiddenscope.sites import Site


class AxisPlace(NamedTuple):
    """A place of the axis: stack, depth, whether it is `final`, and part of a block."""

    stack: str
    depth: Fraction
    is_final: bool
    part: str

    @property
    def label(self) -> str:
        """Return the place by its depth.

        >>> AxisPlace("", Fraction(1, 3), False, "attn").label
        'depth 0.333 attn'
        """
        name = "final" if self.is_final else f"depth {float(self.depth):.3g}"
        return " ".join(part for part in (self.stack, name, self.part) if part)


@dataclass(frozen=True)
class DepthAxis:
    """The places of the axis from the bottom up, and the site of each member there.

    `sites` has a row for each member, with "" where it has none.
    """

    labels: list[str]
    depths: list[float]
    sites: list[list[str]]

    def rows(self, member: int) -> list[int]:
        """Return the places at which a member has sites, in their order."""
        places = enumerate(self.sites[member])
        return [place for place, site in places if site]


def depth_axis(
    sites: Sequence[Sequence[str]], depths: Sequence[Mapping[str, int]]
) -> DepthAxis:
    """Lay the sites of all members on one axis.

    >>> axis = depth_axis([["layer.0", "layer.1"], ["layer.0", "layer.1", "layer.2"]],
    ...                   [{"decoder": 1}, {"decoder": 2}])
    >>> axis.labels, axis.sites[0]
    (['depth 0', 'depth 0.5', 'depth 1'], ['layer.0', '', 'layer.1'])
    """
    placed: list[dict[AxisPlace, str]] = []
    for names, stacks in zip(sites, depths, strict=True):
        placed.append({_place(name, stacks): name for name in names})
    every: set[AxisPlace] = set()
    for of_member in placed:
        every.update(of_member)
    axis = sorted(every, key=lambda place: _order(place, placed))
    rows = [[of_member.get(place, "") for place in axis] for of_member in placed]
    labels, fractions = [], []
    for place in axis:
        labels.append(place.label)
        fractions.append(float(place.depth))
    if all(row == rows[0] for row in rows):
        labels = rows[0]
    return DepthAxis(labels, fractions, rows)


def _place(name: str, stacks: Mapping[str, int]) -> AxisPlace:
    """Return where a site lies; what is no site, such as logits, comes last."""
    if name == "logits":
        return AxisPlace("", Fraction(1), True, name)
    site = Site.parse(name)
    # A model of one stack leaves its name out.
    stack = site.stack or next(iter(stacks))
    total = stacks[stack]
    layer = total if site.layer is None else site.layer
    depth = Fraction(layer, max(1, total))
    return AxisPlace(site.stack or "", depth, site.layer is None, site.part)


def _order(
    place: AxisPlace, placed: Sequence[Mapping[AxisPlace, str]]
) -> tuple[bool, Fraction, bool, int]:
    """Order places by stack and depth, and within a block as the forward pass does."""
    within = 0
    for of_member in placed:
        if place in of_member:
            within = list(of_member).index(place)
            break
    return place.stack == "decoder", place.depth, place.is_final, within
