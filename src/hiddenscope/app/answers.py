"""Answers: a result as it travels from the worker to the page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hiddenscope.results import Result, findings_of, story_of, to_bytes
from hiddenscope.results.drawing import MOST_TOKENS
from hiddenscope.views import pack
from hiddenscope.views.render import named_views
from hiddenscope.workers import Header

# Below this size JSON is written faster than netCDF, which takes 20 ms or more.
MAX_JSON_BYTES = 2**15
# The position of a column in which a text has no token.
NO_TOKEN = -1


@dataclass(frozen=True)
class AnswerBytes:
    """What the page reads, the payload of the views, and the data as a file."""

    header: Header
    payload: bytes = b""
    data: bytes = b""


def pack_result(result: Result, titles: Sequence[str] = ()) -> AnswerBytes:
    """Pack a result with its views; `titles` replace those of the first views.

    With titles, the views are shown without sections.
    """
    by_name = dict(named_views(result))
    names = list(by_name)
    views = list(by_name.values())
    for place, title in enumerate(titles[: len(views)]):
        views[place] = replace(views[place], title=title)

    sections = []
    if not titles:
        place_of = {view.title: place for place, view in enumerate(views)}
        for section in story_of(result):
            # A section may have views that the result does not name.
            for view in section.views:
                if view.title not in place_of:
                    place_of[view.title] = len(views)
                    names.append("")
                    views.append(view)
            places = [place_of[view.title] for view in section.views]
            sections.append(
                {"title": section.title, "prose": section.prose, "views": places}
            )

    listed = []
    for name, view in zip(names, views, strict=True):
        kind = type(view).__name__.lower()
        listed.append({"name": name, "title": view.title, "kind": kind})
    header: Header = {
        "title": result.title,
        "findings": findings_of(result),
        "views": listed,
        "sections": sections,
        "columns": _columns(result, "position"),
        "other_columns": _columns(result, "other_position"),
    }
    suffix = ".json" if result.data.nbytes <= MAX_JSON_BYTES else ".nc"
    return AnswerBytes(header, pack(views).encode("ascii"), to_bytes(result, suffix))


def _columns(result: Result, coordinate: str) -> list[int | None]:
    """Return the token that each column of a grid stands for, None for a gap."""
    positions = result.data.coords.get(coordinate)
    if positions is None or positions.dims != ("token",):
        return []
    columns: list[int | None] = []
    for position in positions.to_numpy()[:MOST_TOKENS].tolist():
        is_gap = position == NO_TOKEN
        columns.append(None if is_gap else position)
    return columns
