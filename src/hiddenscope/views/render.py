"""Results as pages, figures and notebook outputs.

page       one result: its findings, its views, and where it comes from
story      several results on one page, each with its findings and its views
figure_of  some of the views, drawn with matplotlib

`Result` imports this module when it is saved as a page or a figure, or shown.
"""

import base64
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from hiddenscope.arguments import checked
from hiddenscope.catalog import STORIES
from hiddenscope.errors import FileError, StatesError
from hiddenscope.files import PathLike, replacing
from hiddenscope.results import (
    Facts,
    Listing,
    Look,
    Result,
    findings_in,
    story_of,
    views_of,
)
from hiddenscope.results.drawing import long_name
from hiddenscope.results.pictures import Grid, Patterns, View
from hiddenscope.results.sentences import capitalised, in_words
from hiddenscope.views.figures.pages import FigureFormat, figure, image
from hiddenscope.views.page import frame, story_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS: dict[str, float | None] = {"": None, "column": 3.3, "page": 6.9}  # inches
NOTEBOOK_DPI = 130
# The height of a notebook's output until the page has reported its own.
HEIGHT = 620
# Findings beside the first picture, where there are many.
BESIDE = 3
# More facts than this are listed one by one.
LARGE_GROUP = 5
# Keys of a second source.
SECOND = {
    "other": "other side",
    "candidate": "candidate",
    "donor": "donor",
}
ORIGIN = (
    "model",
    "revision",
    "weights",
    "base_weights",
    "adapters",
    "quantisation",
    "dtype",
    "device",
    "attention",
    "versions",
)


def page(result: Result, docs: str = "", *, folds: bool = False) -> str:
    """Return a result as one HTML page: its findings, then the views. `docs` is where
    the docs lie, seen from the page. With `folds`, all but the main view is closed at
    first.
    """
    story_sections = story_of(result)
    sections = []
    for section in story_sections:
        # The findings stand above all sections, so that these have no prose.
        folded = folds and section.folded
        title = section.title if section.reading or folded else ""
        sections.append(replace(section, title=title, sentences=(), folded=folded))
    first, *others = sections
    # What the caption of the first picture says need not be said beside it.
    findings = [
        sentence.replace("\n", " ")
        for sentence in findings_in(story_sections)
        if sentence not in first.reading
    ]
    lead, *more = findings or [""]
    beside = len(more) if len(more) <= BESIDE + 1 else BESIDE
    tables = first.tables
    # A kind without sentences shows its facts as they are.
    if result.kind not in STORIES and result.facts:
        rows = [(name.replace("_", " "), value) for name, value in _items(result.facts)]
        facts = Listing("What was found", ("name", "value"), tuple(rows))
        tables = (facts, *tables)
    # The title of the page says what the first section is about.
    sentences = (lead, _bullets(more[:beside]))
    first = replace(first, title="", sentences=sentences, tables=tables)
    closing = []
    if more[beside:]:
        closing += ["# More findings", _bullets(more[beside:])]
    origin = [f"{name}: {value}" for name, value in _items(_origin(result))]
    if origin:
        closing += ["# Where it comes from", _bullets(origin)]
    title, end = capitalised(result.title), "\n\n".join(closing)
    return story_page([first, *others], title, closing=end, docs=docs)


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _origin(result: Result) -> Facts:
    """Return where a result comes from; of a second model, what differs."""
    origin = {}
    for key in ORIGIN:
        origin[key] = _told(key, result.source)
        for role, name in SECOND.items():
            second = result.source.get(role)
            value = _told(key, second) if isinstance(second, dict) else None
            if value is not None and value != origin[key]:
                origin[f"{key} of the {name}"] = value
    # "base_weights" is the name of a field.
    return {key.replace("_", " "): value for key, value in origin.items()}


def _told(key: str, source: Facts) -> object:
    """Return a fact of a source; of an adapter its name, kind, strength and weights."""
    value = source.get(key)
    if key != "adapters" or not isinstance(value, list):
        return value
    adapters = []
    for adapter in value:
        # A file may hold anything in the place of an adapter.
        if not isinstance(adapter, dict):
            return value
        details = [adapter.get("kind"), f"strength {adapter.get('strength')}"]
        if adapter.get("merged"):
            details.append("merged")
        details.append(adapter.get("weights"))
        adapters.append(f"{adapter.get('name')} ({', '.join(map(str, details))})")
    return adapters


def _items(facts: Facts) -> list[tuple[str, str]]:
    """Return the name and the words of each fact.

    A large group of facts is listed one by one, each behind the name of the group.
    """
    items = []
    for key, value in facts.items():
        key = key.replace("\n", " ")
        inner = value.values() if isinstance(value, dict) else ()
        has_groups = any(isinstance(group, dict) for group in inner)
        if has_groups or len(inner) > LARGE_GROUP:
            items += [(key, f"{name}: {words}") for name, words in _items(value)]
        elif value not in (None, "", [], {}):
            items.append((key, in_words(value)))
    return items


@checked
def story(
    results: Sequence[Result],
    path: PathLike,
    *,
    title: str = "",
    opening: str = "",
    closing: str = "",
) -> None:
    """Write one offline page about several results in order, whole or not at all.

    `opening` and `closing` are plain text: blank lines separate paragraphs, `# ` begins
    a heading, `- ` a list, and words between backticks are code.

    >>> import tempfile, xarray
    >>> data = xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["a", "b"]})
    >>> norms = Result("sizes", data, {}, {})
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
    sections = []
    for result in results:
        sections += story_of(result)
    title = title or ", ".join(result.title for result in results)
    with replacing(path) as fresh:
        html = story_page(sections, title, opening, closing, _docs_from(fresh))
        fresh.write_text(html, "utf-8")


def _docs_from(path: PathLike) -> str:
    """Return where the docs lie, seen from a page that is written in their repository;
    empty anywhere else.
    """
    page, root = Path(path).resolve(), Path(__file__).resolve().parents[3]
    if not page.is_relative_to(root) or not (root / "docs" / "index.md").is_file():
        return ""
    return quote(Path(os.path.relpath(root / "docs", page.parent)).as_posix())


def write_page(result: Result, path: Path) -> None:
    """Write the page of a result."""
    path.write_text(page(result, _docs_from(path)), "utf-8")


def framed_page(result: Result) -> str:
    """Return the page of a result as the output of a notebook."""
    return frame(page(result, folds=True), HEIGHT)


def encoded_figure(result: Result) -> str:
    """Return the views of a result as a PNG, in base64."""
    png = image(views_of(result), ".png", dpi=NOTEBOOK_DPI)
    return base64.b64encode(png).decode("ascii")


def figure_of(result: Result, look: Look) -> "Figure":
    """Draw the selected views as a figure."""
    return figure(_selected_views(result, look), WIDTHS[look.width])


def figure_bytes(result: Result, suffix: FigureFormat, look: Look) -> bytes:
    """Draw the selected views as a file of this format."""
    return image(_selected_views(result, look), suffix, width=WIDTHS[look.width])


def named_views(result: Result) -> dict[str, View]:
    """Return the views of a result by name."""
    return by_name(views_of(result))


def by_name(all_views: Iterable[View]) -> dict[str, View]:
    """Name views by what they are (grid, panels, lines), with a number from the second
    of a kind on.
    """
    views: dict[str, View] = {}
    for view in all_views:
        kind = type(view).__name__.lower()
        count = sum(type(other) is type(view) for other in views.values())
        views[f"{kind}-{count + 1}" if count else kind] = view
    return views


def _selected_views(result: Result, look: Look) -> list[View]:
    views = named_views(result)
    # Without a name it is the main view, which comes first.
    if look.view == "all":
        selected = list(views.values())
    elif not look.view:
        selected = [next(iter(views.values()))]
    elif look.view in views:
        selected = [views[look.view]]
    else:
        raise StatesError(
            f"No view {look.view!r} of a {result.kind}",
            f"there are {', '.join(views)}",
            'Choose one of these, or "all".',
        )
    if not look.measure:
        return selected
    measure = look.measure
    if all(isinstance(view, Patterns) for view in selected):
        return [_with_head(view, measure) for view in selected]
    # A measure may be named as the data names it, or as the grid does.
    variable = result.data.get(measure)
    if variable is not None:
        measure = long_name(variable)
    return [_with_measure(view, measure) for view in selected]


def _with_measure(view: View, name: str) -> View:
    """Return a grid whose first measure is the named one, with a title that says so."""
    measures = view.measures if isinstance(view, Grid) else ()
    spelt = name.lower().replace("_", " ")
    places = {
        measure.name.lower().replace("_", " "): place
        for place, measure in enumerate(measures)
    }
    place = places.get(spelt)
    if not isinstance(view, Grid) or place is None:
        names = ", ".join(measure.name for measure in measures)
        raise StatesError(
            f"No measure {name!r} in {view.title!r}",
            f"there are {names}" if measures else "it is not a grid",
            "Choose one of a grid's measures.",
        )
    first = measures[place]
    title = f"{view.title}: {first.name}" if place else view.title
    others = (*measures[:place], *measures[place + 1 :])
    return replace(view, title=first.title or title, measures=(first, *others))


def _with_head(view: View, words: str) -> View:
    """Return heads of which the named one is large, value-weighted where that is asked
    for: "layer.3.attn.head.5", "weighted", or both.
    """
    assert isinstance(view, Patterns)
    names = {}
    for row, head in np.argwhere(view.exists):
        names[view.name_of(int(row), int(head))] = (int(row), int(head))
    large, weighted = view.large, view.weighted
    for word in words.split():
        if word in ("pattern", "weighted"):
            weighted = word == "weighted"
        elif word in names:
            large = names[word]
        else:
            first, *_, last = [*names, *names]
            raise StatesError(
                f"No head {word!r} in {view.title!r}",
                f"there are {first} to {last}",
                'Name one of these, "weighted", or both.',
            )
    return replace(view, large=large, weighted=weighted)
