"""Results: what an analysis returns, its story, and its files.

result     the value itself: its arrays, its facts, how it is saved and shown
report     what was found, typed; `facts` is its plain form
story      what is said and shown, as sections
pictures   what a section shows: grids, panels, lines and patterns
drawing    from labelled arrays to pictures
sentences  the phrases that all stories share

Each name is imported when it is first used: pictures need numpy, and a report does not.
"""

from typing import TYPE_CHECKING

from hiddenscope.lazy import lazy_names

if TYPE_CHECKING:
    from hiddenscope.results.report import Facts as Facts
    from hiddenscope.results.report import Report as Report
    from hiddenscope.results.report import frozen as frozen
    from hiddenscope.results.result import Look as Look
    from hiddenscope.results.result import Result as Result
    from hiddenscope.results.result import to_bytes as to_bytes
    from hiddenscope.results.story import Aside as Aside
    from hiddenscope.results.story import Explanation as Explanation
    from hiddenscope.results.story import Listing as Listing
    from hiddenscope.results.story import Section as Section
    from hiddenscope.results.story import Table as Table
    from hiddenscope.results.story import findings_in as findings_in
    from hiddenscope.results.story import findings_of as findings_of
    from hiddenscope.results.story import story_of as story_of
    from hiddenscope.results.story import table_of as table_of
    from hiddenscope.results.story import tables_of as tables_of
    from hiddenscope.results.story import views_of as views_of

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "Facts": "report",
            "Report": "report",
            "frozen": "report",
            "Look": "result",
            "Result": "result",
            "to_bytes": "result",
            "Aside": "story",
            "Explanation": "story",
            "Listing": "story",
            "Section": "story",
            "Table": "story",
            "findings_in": "story",
            "findings_of": "story",
            "story_of": "story",
            "table_of": "story",
            "tables_of": "story",
            "views_of": "story",
        },
    )
