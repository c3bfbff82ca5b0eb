"""A guided story: results one after another on one page, each with a title, what to look at, and its view.

Every kind of result tells its own sections, in `kinds`; the numbers in them are read off the results.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from hiddenscope.errors import FileError
from hiddenscope.files import replacing
from hiddenscope.results import Result
from hiddenscope.views.kinds import sections_of
from hiddenscope.views.page import document
from hiddenscope.views.values import View


def story(
    results: Sequence[Result], path: str | os.PathLike[str], *, title: str = "", opening: str = "", closing: str = ""
) -> None:
    """Write one offline page that tells of several results in order, whole or not at all.

    `opening` and `closing` are plain text: blank lines part paragraphs, `# ` begins a heading, `- ` a list, and words
    between backticks are code.

    >>> import tempfile, xarray
    >>> from pathlib import Path
    >>> norms = Result("profile of sizes", xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["a", "b"]}), {}, {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     story([norms], f"{folder}/story.html", title="Two numbers")
    ...     "<h1>Two numbers</h1>" in Path(folder, "story.html").read_text()
    True
    """
    if Path(path).suffix.lower() != ".html":
        raise FileError(f"A story in {os.fspath(path)!r}", "it is a page", "Give the path the suffix .html.")
    told = page(results, title or ", ".join(result.title for result in results), opening, closing)
    with replacing(path) as fresh:
        fresh.write_text(told, "utf-8")


def page(results: Sequence[Result], title: str, opening: str, closing: str) -> str:
    """The page itself, as HTML."""
    prose: list[str] = []
    views: list[View] = []
    for section in (section for result in results for section in sections_of(result)):
        prose += [f"# {section.title}\n\n{section.prose}", *[""] * (len(section.views) - 1)]
        views += section.views
    return document(views, title, [f"{opening}\n\n{prose[0]}" if prose else opening, *prose[1:], closing])
