"""Stories: what a result says and shows, in order, as sections.

`analyses/<word>/story.py` tells the story of one kind of result, once, by a generator
`story(report, result)`. The summary, the terminal, pages, notebooks, figures and the
app read its sections; none of them adds sentences of its own.

A result of any other kind is shown by the dimensions of its data.

>>> import xarray
>>> from hiddenscope.results import Result
>>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["a", "b"]})
>>> views_of(Result("sizes", norms, {}, {"model": "toy"}))[0].series[0].name
'norm'
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from hiddenscope.catalog import ANALYSIS, STORIES
from hiddenscope.errors import Error, StatesError, first_line
from hiddenscope.files import printable
from hiddenscope.results.drawing import by_dimensions
from hiddenscope.results.pictures import View
from hiddenscope.results.report import read_report

if TYPE_CHECKING:
    from hiddenscope.results.result import Result


class Aside(str):
    """A sentence of the findings that the prose of a section leaves out."""

    __slots__ = ()


class Explanation(str):
    """A sentence in the prose of a section that is no finding."""

    __slots__ = ()


class Table(NamedTuple):
    """Rows of strings that a terminal prints beneath the findings.

    The columns at the indices in `text_columns` hold text, the others hold numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Collection[int] = (0,)
    title: str = ""


@dataclass(frozen=True)
class Listing:
    """Texts and numbers that a page shows as a table, or as a list where there is one
    column.

    The column `bar` has bars beside its numbers; the longest is `most`, or their
    largest.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    bar: str = ""
    most: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise StatesError(
                f"Cannot show the list {self.title!r}",
                f"there are rows of other lengths than {len(self.columns)}",
                "Give a cell for each column.",
            )


def table_of(listing: Listing) -> Table:
    """Return a list of a page as a table of a terminal.

    >>> table_of(Listing("Words", ("share", "word"), ((0.25, "cat"),))).text_columns
    {1}
    """
    rows = []
    text_columns = set()
    for row in listing.rows:
        cells = []
        for column, cell in enumerate(row):
            if isinstance(cell, str):
                text_columns.add(column)
                cells.append(cell)
            else:
                cells.append(f"{cell:.3g}")
        rows.append(cells)
    return Table(listing.columns, rows, text_columns, listing.title)


@dataclass(frozen=True)
class Section:
    """A part of a story: its title, its findings, and the views that show them.

    `sentences` are the findings, and the prose of the section: the first stands above
    the first view, the others beside it. `reading` says in a sentence or two what the
    views show and how their numbers are defined. A `folded` section stands behind
    "More" beneath the one before it. Of the `tables`, pages show each `Listing` and a
    terminal prints each `Table`. `figures` are views that stand on paper where a page
    has tables. `docs` is the word of the docs page that says more. A page of one result
    has that result's title in place of the first section's.
    """

    title: str
    sentences: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    reading: str = ""
    folded: bool = False
    docs: str = ""
    tables: tuple[Listing | Table, ...] = ()
    figures: tuple[View, ...] = ()

    @property
    def prose(self) -> str:
        """Return the sentences as text: the first is a paragraph of its own, unless the
        section is folded.
        """
        sentences = [text for text in self.sentences if not isinstance(text, Aside)]
        if self.folded:
            return " ".join(sentences)
        lead, *others = sentences or [""]
        return f"{lead}\n\n{' '.join(others)}".strip()


def story_of(result: "Result") -> list[Section]:
    """Return the sections of a result."""
    with explained(result):
        if result.kind not in STORIES:
            title = result.title.capitalize()
            return [Section(title, views=tuple(by_dimensions(result)))]
        story = _story_module(result.kind).story
        first, *others = story(report_of(result), result)
        if result.kind in ANALYSIS:
            first = replace(first, docs=result.kind)
        return [first, *others]


@contextmanager
def explained(result: "Result") -> Iterator[None]:
    """Raise an error of ours where the facts and the data do not fit together.

    They may come from a file that anyone has written.
    """
    try:
        yield
    except (Error, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {printable(first_line(error))}"
        raise StatesError(
            f"Cannot show the {result.title}",
            f"its facts and its data do not fit together ({reason})",
            "Compute the result again.",
        ) from error


def report_of(result: "Result") -> Any:
    """Return the facts of a result as the report that its story tells of."""
    kind = get_type_hints(_story_module(result.kind).story)["report"]
    return read_report(kind, result.facts)


def findings_of(result: "Result") -> list[str]:
    """Return what a person should read, as plain sentences."""
    return findings_in(story_of(result))


def findings_in(sections: Iterable[Section]) -> list[str]:
    """Return the findings of a story; a sentence that several sections repeat is told
    at the end.
    """
    findings: dict[str, None] = {}
    for section in sections:
        for sentence in section.sentences:
            if not isinstance(sentence, Explanation):
                findings.pop(sentence, None)
                findings[str(sentence)] = None
    return list(findings)


def tables_of(result: "Result") -> list[Table]:
    """Return what a terminal prints beneath the findings."""
    tables = []
    for section in story_of(result):
        tables += [table for table in section.tables if isinstance(table, Table)]
    return tables


def views_of(result: "Result") -> tuple[View, ...]:
    """Return the views of a result, the main one first."""
    views: list[View] = []
    for section in story_of(result):
        views += (*section.figures, *section.views)
    if not views:
        dimensions = [
            f"{name} has {', '.join(map(str, variable.dims))}"
            for name, variable in result.data.items()
        ]
        raise StatesError(
            f"Cannot draw the {result.title}",
            "; ".join(dimensions) or "it has no data",
            "Draw its data with matplotlib, or save it as .csv, .json or .nc.",
        )
    return tuple(views)


def _story_module(word: str) -> Any:
    return import_module(STORIES[word])
