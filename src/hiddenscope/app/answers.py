"""Answers: a result as it travels from the worker to the page."""

from collections.abc import Sequence
from dataclasses import replace

from hiddenscope.app.cache import StoredResult
from hiddenscope.results import Result, findings_in, story_of, to_bytes
from hiddenscope.results.drawing import MOST_TOKENS
from hiddenscope.results.pictures import View
from hiddenscope.views import pack
from hiddenscope.views.render import by_name

# Below this size JSON is written faster than netCDF, which takes 20 ms or more.
MAX_JSON_BYTES = 2**15
# The position of a column in which a text has no token.
NO_TOKEN = -1


def pack_result(result: Result, titles: Sequence[str] = ()) -> StoredResult:
    """Pack a result with its views; `titles` replace those of the first views.

    With titles, the views are shown without sections.
    """
    story = story_of(result)
    views: list[View] = []
    sections = []
    for section in story:
        views += section.figures
        places = range(len(views), len(views) + len(section.views))
        views += section.views
        sections.append(
            {"title": section.title, "prose": section.prose, "views": list(places)}
        )
    for place, title in enumerate(titles[: len(views)]):
        views[place] = replace(views[place], title=title)
    listed = []
    for name, view in by_name(views).items():
        kind = type(view).__name__.lower()
        listed.append({"name": name, "title": view.title, "kind": kind})
    header = {
        "title": result.title,
        "findings": findings_in(story),
        "views": listed,
        "sections": [] if titles else sections,
        "columns": _columns(result, "position"),
        "other_columns": _columns(result, "other_position"),
    }
    suffix = ".json" if result.data.nbytes <= MAX_JSON_BYTES else ".nc"
    return StoredResult(header, pack(views).encode("ascii"), to_bytes(result, suffix))


def _columns(result: Result, coordinate: str) -> list[int | None]:
    """Return the token that each column of a grid stands for, None for a gap."""
    positions = result.data.coords.get(coordinate)
    if positions is None or positions.dims != ("token",):
        return []
    columns = []
    for position in positions.to_numpy()[:MOST_TOKENS].tolist():
        columns.append(None if position == NO_TOKEN else position)
    return columns
