"""Panels on paper: one scatter a layer, the same points in each."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hiddenscope.views.figures.lettering import Lettering, width_of
from hiddenscope.views.figures.pen import Box, Lead, Pen, Plan
from hiddenscope.views.figures.scale import CLASSES, MUTED, Array
from hiddenscope.views.values import Panels

PAGE, GAP = 480.0, 10.0
TITLE, LINE, HEAD, ROW = 13.0, 9.0, 18.0, 13.0
SMALL, NAME = 6.5, 7.5
MARGIN = 0.05
MOST_KEYS = 40


@dataclass(frozen=True)
class _Layout:
    boxes: tuple[Box, ...]
    heads: tuple[tuple[float, str], ...]
    keys: tuple[tuple[float, float, str], ...]
    width: float
    height: float


def plan_panels(panels: Panels, lettering: Lettering) -> Plan:
    """Every panel, wrapped, with its caption."""
    layout = _layout(panels, lettering)
    return Plan(layout.width, layout.height, partial(_paint, panels, layout))


def _layout(panels: Panels, lettering: Lettering) -> _Layout:
    count = len(panels.sites)
    across = max(1, min(count, int((PAGE + GAP) / ((84 if count > 4 else 110) + GAP))))
    size = min(120.0 if count > 4 else 180.0, (PAGE - GAP * (across - 1)) / across)
    captions = [lettering.wrapped(lettering.text(said), size, SMALL) for said in panels.captions]
    deep = TITLE + size + LINE * max(map(len, captions), default=0) + GAP
    keys, y = _keys(panels, lettering)
    boxes: list[Box] = []
    heads: list[tuple[float, str]] = []
    column = 0
    for panel in range(count):
        fresh = bool(panels.rows) and (panel == 0 or panels.rows[panel] != panels.rows[panel - 1])
        if column == across or (fresh and column):
            column, y = 0, y + deep
        if fresh:
            heads.append((y + 6, lettering.text(panels.rows[panel], 80)))
            y += HEAD
        boxes.append(Box(column * (size + GAP), y + TITLE, size, size))
        column += 1
    width = max(across * (size + GAP) - GAP, max((x + 9 + width_of(said, NAME) for x, _, said in keys), default=0))
    return _Layout(tuple(boxes), tuple(heads), tuple(keys), width, y + deep - GAP)


def _keys(panels: Panels, lettering: Lettering) -> tuple[list[tuple[float, float, str]], float]:
    """Where the name of each class stands, and where the panels may begin."""
    found: list[tuple[float, float, str]] = []
    classes = list(dict.fromkeys(panels.labels))
    named = [lettering.text(label, 30) or "∅" for label in classes[:MOST_KEYS]]
    if len(classes) > MOST_KEYS:
        named.append(f"and {len(classes) - MOST_KEYS} more")
    x = y = 0.0
    for said in named:
        wide = 9 + width_of(said, NAME)
        if x and x + wide > PAGE:
            x, y = 0.0, y + ROW
        found.append((x, y + 5, said))
        x += wide + 14
    return found, y + ROW + 3 if found else 0.0


def _paint(panels: Panels, layout: _Layout, pen: Pen, top: float) -> None:
    classes = {label: place for place, label in enumerate(dict.fromkeys(panels.labels))}
    for place, (x, y, said) in enumerate(layout.keys):
        if place < MOST_KEYS:
            pen.dots(np.array([[x + 3, top + y]]), CLASSES[place % len(CLASSES)], 2.6)
        pen.text(said, x + 9, top + y, Lead(size=NAME))
    for y, name in layout.heads:
        pen.text(name, 0, top + y, Lead(size=9, bold=True))
    inks = np.array([CLASSES[classes[label] % len(CLASSES)] for label in panels.labels] or CLASSES[:1])
    for panel, box in enumerate(layout.boxes):
        _paint_panel(panels, panel, replace(box, top=box.top + top), inks, pen)


def _paint_panel(panels: Panels, panel: int, box: Box, inks: np.ndarray, pen: Pen) -> None:
    title = pen.lettering.fitted(pen.lettering.text(panels.sites[panel], 60), box.width, NAME, bold=True)
    pen.text(title, box.left, box.top - 6.5, Lead(size=NAME, bold=True))
    pen.outline(box)
    if panels.captions:
        lines = pen.lettering.wrapped(pen.lettering.text(panels.captions[panel]), box.width, SMALL)
        for place, said in enumerate(lines):
            pen.text(said, box.left, box.bottom + 7 + LINE * place, Lead(MUTED, SMALL))
    if panels.messages and panels.messages[panel]:
        lines = pen.lettering.wrapped(pen.lettering.text(panels.messages[panel], 200), box.width - 12, NAME)
        for place, said in enumerate(lines):
            y = box.top + box.height / 2 + (place - (len(lines) - 1) / 2) * 11
            pen.text(said, box.left + box.width / 2, y, Lead(MUTED, NAME, anchor="center"))
        return
    units = _units(panels.points[panel].astype(np.float64))
    there = np.isfinite(units).all(axis=1)
    count = len(units)
    radius = 1.9 if count <= 200 else 1.5 if count <= 1500 else 1.1 if count <= 4000 else 0.8
    places = units[there] * box.width + [box.left, box.top]
    ink = inks[there].tolist() if len(inks) == count else str(inks[0])
    if len(places):
        pen.dots(places, ink, radius, 0.88 if count <= 1500 else 0.7 if count <= 4000 else 0.55)


def _units(points: Array) -> Array:
    """The points between 0 and 1, y downwards, both axes to one scale."""
    finite = np.where(np.isfinite(points), points, np.nan)
    there = finite[~np.isnan(finite).any(axis=1)]
    if not len(there):
        return finite
    low, high = there.min(axis=0), there.max(axis=0)
    span = float((high - low).max()) or 1.0
    return np.asarray(0.5 + (finite - (low + high) / 2) * [1, -1] * ((1 - 2 * MARGIN) / span))
