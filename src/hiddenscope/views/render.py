"""Results as pages, figures and notebook outputs: fills the tables in which `Result`
looks for them.

page     one result: its findings, its views, and where it comes from
story    several results on one page, each with a title, what was found, how to read it, and its views
"""

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import quote

from hiddenscope.arguments import checked
from hiddenscope.errors import FileError, StatesError
from hiddenscope.files import replacing
from hiddenscope.results import (
    DISPLAYS,
    FINDINGS,
    PAINTERS,
    RENDERERS,
    TABLES,
    Facts,
    Look,
    Result,
    in_words,
)
from hiddenscope.views.figures.pages import Format, figure, image
from hiddenscope.views.kinds.registry import KINDS, sections_of, views_of
from hiddenscope.views.page import frame
from hiddenscope.views.story import story_page, unfolded
from hiddenscope.views.values import Grid, Listing, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTEBOOK_DPI = 130
WIDTHS: dict[str, float | None] = {"": None, "column": 3.3, "page": 6.9}  # inches
HEIGHT = 620  # of a notebook's output, until the page has said how high it is
BESIDE = 3  # findings beside the first picture, where there are many
# Keys of a second source.
SECOND = {
    "other": "other side",
    "candidate": "candidate",
    "donor": "donor",
}
ORIGIN = ("model", "revision", "weights", "dtype", "device", "attention", "versions")


def page(result: Result, docs: str = "") -> str:
    """A result as one HTML page: what was found, then the views; `docs` is where the
    docs lie, seen from the page.
    """
    title = f"{result.title[:1].upper()}{result.title[1:]}"
    first, *others = unfolded(sections_of(result))
    lead, beside, later = _told(
        [sentence for sentence in _findings(result) if sentence not in first.reading]
    )
    # The title of the page says what the first part is about, and the first finding
    # stands right above its picture.
    first = replace(first, title="", prose=f"{lead}\n\n{beside}")
    if result.kind not in FINDINGS and result.facts:
        first = replace(first, tables=(_table(result.facts), *first.tables))
    sections = [first, *others]
    if result.kind in KINDS:
        sections[-1] = replace(sections[-1], docs=result.kind)
    parts = {"More findings": later, "Where it comes from": _items(_origin(result))}
    closing = "\n\n".join(
        f"# {name}\n\n" + "\n".join(lines) for name, lines in parts.items() if lines
    )
    return story_page(sections, title, closing=closing, docs=docs)


def _told(findings: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """Return the finding above the first picture, those beside it, and those at the end
    of a page that has many.
    """
    lead, *others = findings or [""]
    count = len(others) if len(others) <= BESIDE + 1 else BESIDE
    beside = "\n".join(f"- {sentence}" for sentence in others[:count])
    return lead, beside, [f"- {sentence}" for sentence in others[count:]]


@checked
def story(
    results: Sequence[Result],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    opening: str = "",
    closing: str = "",
) -> None:
    """Write one offline page about several results in order, whole or not at all.

    `opening` and `closing` are plain text: blank lines separate paragraphs, `# ` begins
    a heading, `- ` a list, and words between backticks are code.

    >>> import tempfile, xarray
    >>> norms = Result("sizes", xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["a", "b"]}), {}, {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     story([norms], f"{folder}/story.html", title="Two numbers")
    ...     "<h1>Two numbers</h1>" in Path(folder, "story.html").read_text()
    True
    """
    if Path(path).suffix.lower() != ".html":
        raise FileError(
            f"Cannot write a story to {os.fspath(path)!r}",
            "a story is a page",
            "Give the path the suffix .html.",
        )
    sections = [section for result in results for section in sections_of(result)]
    title = title or ", ".join(result.title for result in results)
    with replacing(path) as fresh:
        fresh.write_text(
            story_page(sections, title, opening, closing, _docs_from(fresh)), "utf-8"
        )


def _docs_from(path: str | os.PathLike[str]) -> str:
    """Where the docs lie, seen from a page that is written in their repository;
    elsewhere nothing is known of them.
    """
    page, root = Path(path).resolve(), Path(__file__).resolve().parents[3]
    if not page.is_relative_to(root) or not (root / "docs" / "index.md").is_file():
        return ""
    return quote(Path(os.path.relpath(root / "docs", page.parent)).as_posix())


def _findings(result: Result) -> list[str]:
    findings = FINDINGS.get(result.kind)
    return (
        [sentence.replace("\n", " ") for sentence in findings(result)]
        if findings
        else []
    )


def _table(facts: Facts) -> Listing:
    """The facts of a kind that has no sentences for them, with names as a person reads
    them.
    """
    pairs = (line.removeprefix("- ").split(": ", 1) for line in _items(facts))
    return Listing(
        "What was found",
        ("name", "value"),
        tuple((key.replace("_", " "), value) for key, value in pairs),
    )


def _origin(result: Result) -> Facts:
    """Where a result comes from; of a second model, what differs."""
    origin: dict[str, Any] = {}
    for key in ORIGIN:
        origin[key] = result.source.get(key)
        for role in SECOND:
            second = result.source.get(role)
            theirs = second.get(key) if isinstance(second, dict) else None
            if theirs is not None and theirs != origin[key]:
                origin[f"{key} of the {SECOND[role]}"] = theirs
    return origin


def _items(facts: Facts) -> list[str]:
    """One line for each fact; a large group of facts is listed fact by fact, each
    behind the group's name.
    """
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict) and (
            len(value) > 5 or any(isinstance(inner, dict) for inner in value.values())
        ):
            lines += [f"- {key}: {line.removeprefix('- ')}" for line in _items(value)]
        elif value not in (None, "", [], {}):
            lines.append(f"- {key}: {in_words(value)}".replace("\n", " "))
    return lines


def _save_page(result: Result, path: Path) -> None:
    path.write_text(page(result, _docs_from(path)), "utf-8")


@dataclass(frozen=True)
class _Figures:
    """Draws results for print, in one format."""

    suffix: Format

    def titles(self, result: Result) -> dict[str, str]:
        return {name: view.title for name, view in named_views(result).items()}

    def figure(self, result: Result, look: Look) -> "Figure":
        return figure(_chosen_views(result, look), _inches(look))

    def write(self, result: Result, path: Path, look: Look) -> None:
        path.write_bytes(
            image(_chosen_views(result, look), self.suffix, width=_inches(look))
        )


def named_views(result: Result) -> dict[str, View]:
    """The views of a result by name: what a view is (grid, panels, lines), with a
    number from the second on.
    """
    named: dict[str, View] = {}
    for view in views_of(result):
        kind = type(view).__name__.lower()
        count = sum(type(other) is type(view) for other in named.values())
        named[f"{kind}-{count + 1}" if count else kind] = view
    return named


def _chosen_views(result: Result, look: Look) -> list[View]:
    named = named_views(result)
    if look.view and look.view != "all" and look.view not in named:
        reason = f"there are {', '.join(named)}"
        raise StatesError(
            f"No view {look.view!r} of a {result.kind}",
            reason,
            'Choose one of these, or "all".',
        )
    views = (
        list(named.values())
        if look.view == "all"
        else [named[look.view or next(iter(named))]]
    )
    known = result.data.get(look.measure)
    name = (
        look.measure
        if known is None
        else str(known.attrs.get("long_name", look.measure))
    )
    return [_with_measure(view, name) for view in views] if name else views


def _with_measure(view: View, name: str) -> View:
    """A grid whose first measure is the named one, under a title that says so."""
    measures = view.measures if isinstance(view, Grid) else ()
    known = {_plain(measure.name): place for place, measure in enumerate(measures)}
    if not isinstance(view, Grid) or _plain(name) not in known:
        reason = (
            f"there are {', '.join(measure.name for measure in measures)}"
            if measures
            else "it is not a grid"
        )
        raise StatesError(
            f"No measure {name!r} in {view.title!r}",
            reason,
            "Choose one of a grid's measures.",
        )
    chosen = measures[known[_plain(name)]]
    title = chosen.title or (
        f"{view.title}: {chosen.name}" if known[_plain(name)] else view.title
    )
    return replace(
        view,
        title=title,
        measures=(chosen, *(one for one in measures if one is not chosen)),
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", " ")


def _inches(look: Look) -> float | None:
    if look.width not in WIDTHS:
        reason, choices = (
            f"got {look.width!r}",
            " or ".join(repr(name) for name in WIDTHS if name),
        )
        raise StatesError(
            "Cannot draw a figure of this width",
            reason,
            f"Give {choices}, or leave it out.",
        )
    return WIDTHS[look.width]


def _framed_page(result: Result) -> str:
    return frame(page(result), HEIGHT)


def _encoded_figure(result: Result) -> str:
    return base64.b64encode(image(views_of(result), ".png", dpi=NOTEBOOK_DPI)).decode(
        "ascii"
    )


RENDERERS[".html"] = _save_page
for _suffix in get_args(Format):
    PAINTERS[_suffix] = _Figures(_suffix)
DISPLAYS.update({"text/html": _framed_page, "image/png": _encoded_figure})
FINDINGS.update({word: kind.findings for word, kind in KINDS.items() if kind.findings})
TABLES.update({word: kind.tables for word, kind in KINDS.items() if kind.tables})
