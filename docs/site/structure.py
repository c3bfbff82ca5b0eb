"""Read which sections the site has, and which pages: docs/site/structure.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenscope.catalog import ANALYSES

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Page:
    """A Markdown file of the repository and the line that introduces it."""

    path: Path
    line: str

    @property
    def title(self) -> str:
        """Return the first heading of the file."""
        first = self.path.read_text("utf-8").split("\n", 1)[0]
        assert first.startswith("# "), f"{self.path} does not begin with its title"
        return first.removeprefix("# ").strip()


@dataclass(frozen=True)
class Section:
    """A part of the site: a page of its own, and the pages below it."""

    word: str
    title: str
    line: str
    pages: tuple[Page, ...]

    @property
    def page(self) -> Page:
        """Return the page of the section itself."""
        return Page(ROOT / "docs" / f"{self.word}.md", self.line)


@dataclass(frozen=True)
class NameGroup:
    """Public names that share a page of the API reference."""

    word: str
    title: str
    line: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class TypeName:
    """A short name that signatures use for what a function takes."""

    name: str
    line: str


def sections() -> list[Section]:
    """Return the sections in order."""
    found = []
    for entry in _structure()["section"]:
        pages = []
        for page in entry["pages"]:
            if page == "analyses":
                pages += _analysis_pages()
            else:
                path, line = page
                pages.append(Page(ROOT / f"{path}.md", line))
        found.append(
            Section(entry["word"], entry["title"], entry["line"], tuple(pages))
        )
    return found


def name_groups() -> list[NameGroup]:
    """Return the groups of public names in order."""
    groups = []
    for entry in _structure()["reference"]:
        names = []
        for name in entry["names"]:
            if name == "analyses":
                names += [a.word for a in ANALYSES if a.group == entry["word"]]
            else:
                names.append(name)
        groups.append(
            NameGroup(entry["word"], entry["title"], entry["line"], tuple(names))
        )
    return groups


def type_names() -> list[TypeName]:
    """Return the short names of signatures in order."""
    return [TypeName(*entry) for entry in _structure()["types"]]


def _structure() -> dict[str, Any]:
    path = Path(__file__).with_name("structure.toml")
    return tomllib.loads(path.read_text("utf-8"))


def _analysis_pages() -> list[Page]:
    pages = []
    for analysis in ANALYSES:
        path = ROOT / "docs" / f"{analysis.word}.md"
        pages.append(Page(path, analysis.question))
    return pages
