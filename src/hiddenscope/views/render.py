"""Results as pages, figures and notebook outputs.

page     one result: its findings, its views, and where it comes from
story    several results on one page, each with its findings and its views

`Result` imports this module when it is saved as a page or a figure, or shown.
"""

import base64
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from hiddenscope.arguments import checked
from hiddenscope.catalog import ANALYSIS
from hiddenscope.errors import FileError
from hiddenscope.files import replacing
from hiddenscope.results import (
    Facts,
    Listing,
    Result,
    Section,
    findings_of,
    in_words,
    story_of,
    views_of,
)
from hiddenscope.results.sentences import capitalised
from hiddenscope.views.figures.pages import image
from hiddenscope.views.page import frame
from hiddenscope.views.painter import figure_bytes as figure_bytes
from hiddenscope.views.painter import figure_of as figure_of
from hiddenscope.views.painter import named_views as named_views
from hiddenscope.views.story import story_page, unfolded

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
    sections = list(unfolded(story_of(result), folds=folds))
    first = sections[0]
    findings = []
    for sentence in findings_of(result):
        # What the caption of the first picture says need not be said beside it.
        if sentence not in first.reading:
            findings.append(sentence.replace("\n", " "))
    sections[0], more = _with_findings(first, findings)
    # A kind without sentences shows its facts as they are.
    if result.kind not in ANALYSIS and result.facts:
        tables = (_facts_table(result.facts), *sections[0].tables)
        sections[0] = replace(sections[0], tables=tables)
    closing = []
    if more:
        closing += ["# More findings", "\n".join(f"- {sentence}" for sentence in more)]
    origin = [f"- {name}: {value}" for name, value in _items(_origin(result))]
    if origin:
        closing += ["# Where it comes from", "\n".join(origin)]
    title = capitalised(result.title)
    return story_page(sections, title, closing="\n\n".join(closing), docs=docs)


def _with_findings(
    first: Section, findings: Sequence[str]
) -> tuple[Section, Sequence[str]]:
    """Return the first section with the findings that stand around its picture, and
    those for the end of the page.

    The title of the page says what the first section is about, and the first finding
    stands right above its picture.
    """
    lead, *others = findings or [""]
    count = len(others) if len(others) <= BESIDE + 1 else BESIDE
    beside = "\n".join(f"- {sentence}" for sentence in others[:count])
    return replace(first, title="", sentences=(lead, beside)), others[count:]


def _facts_table(facts: Facts) -> Listing:
    """Return the facts of a kind that has no sentences for them."""
    rows = [(name.replace("_", " "), value) for name, value in _items(facts)]
    return Listing("What was found", ("name", "value"), tuple(rows))


def _origin(result: Result) -> Facts:
    """Return where a result comes from; of a second model, what differs."""
    origin: dict[str, object] = {}
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
        if isinstance(value, dict) and _is_large(value):
            items += [(key, f"{name}: {words}") for name, words in _items(value)]
        elif value not in (None, "", [], {}):
            items.append((key, in_words(value)))
    return items


def _is_large(group: Facts) -> bool:
    has_groups = any(isinstance(inner, dict) for inner in group.values())
    return has_groups or len(group) > LARGE_GROUP


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


def _docs_from(path: str | os.PathLike[str]) -> str:
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
