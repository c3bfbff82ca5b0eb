"""Pictures of results: grid, panels, lines and patterns, drawn from one payload in
every place that shows them.
"""

from hiddenscope.views import render
from hiddenscope.views.kinds.registry import sections_of, views_of
from hiddenscope.views.payload import pack, unpack
from hiddenscope.views.values import (
    Grid,
    HeadScore,
    Lines,
    Measure,
    Panels,
    Patterns,
    Series,
    View,
    Words,
)

__all__ = [
    "Grid",
    "HeadScore",
    "Lines",
    "Measure",
    "Panels",
    "Patterns",
    "Series",
    "View",
    "Words",
    "pack",
    "render",
    "sections_of",
    "unpack",
    "views_of",
]
