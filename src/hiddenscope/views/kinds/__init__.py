"""Kinds of results: one module for each, which says what it looks like and what there is to tell.

`pictures` gives the views of a result, the one to look at first in front; `tell` gives the sections of a story.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hiddenscope.results import Result
from hiddenscope.views.kinds import (
    anatomy,
    cluster,
    compare,
    lens,
    patch,
    probe,
    profile,
    project,
    search,
    steer,
    visibility,
)
from hiddenscope.views.values import Section, View


class Kind(NamedTuple):
    """How results of one kind are shown, and how they are told where there is more to say than their views show."""

    pictures: Callable[[Result], Iterator[View]]
    tell: Callable[[Result], Iterator[Section]] | None = None


KINDS = {
    "anatomy": Kind(anatomy.pictures, anatomy.tell),
    "cluster": Kind(cluster.pictures, cluster.tell),
    "compare": Kind(compare.pictures, compare.tell),
    "lens": Kind(lens.pictures, lens.tell),
    "patch": Kind(patch.pictures, patch.tell),
    "probe": Kind(probe.pictures, probe.tell),
    "profile": Kind(profile.pictures, profile.tell),
    "project": Kind(project.pictures, project.tell),
    "search": Kind(search.pictures, search.tell),
    "steer": Kind(steer.pictures, steer.tell),
    "visibility": Kind(visibility.pictures, visibility.tell),
}
