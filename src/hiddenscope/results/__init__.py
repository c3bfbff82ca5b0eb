"""Results: what an analysis returns, its story, and its files.

result     the value itself: its arrays, its facts, how it is saved and shown
report     what was found, typed; `facts` is its plain form
story      what is said and shown, as sections
pictures   what a section shows: grids, panels, lines, patterns, graphs
drawing    from labelled arrays to pictures
sentences  the phrases that all stories share

Each name is imported when it is first used: pictures need numpy, and a report does not.
"""

from typing import TYPE_CHECKING

from hiddenscope.lazy import lazy_names

if TYPE_CHECKING:
    from hiddenscope.results.report import Facts, Report, frozen
    from hiddenscope.results.result import Look, Result, to_bytes
    from hiddenscope.results.story import (
        Aside,
        Explanation,
        Listing,
        Section,
        Table,
        findings_in,
        findings_of,
        story_of,
        table_of,
        tables_of,
        views_of,
    )

__all__ = [
    "Aside",
    "Explanation",
    "Facts",
    "Listing",
    "Look",
    "Report",
    "Result",
    "Section",
    "Table",
    "findings_in",
    "findings_of",
    "frozen",
    "story_of",
    "table_of",
    "tables_of",
    "to_bytes",
    "views_of",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, __all__, "report", "story", "result")
