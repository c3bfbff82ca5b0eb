"""Write the pages that Sphinx reads, from the Markdown that GitHub shows.

The Markdown of the repository holds nothing that GitHub cannot show. What the site
needs besides is added to copies: tables of contents, live views in place of pictures,
and links to source files, which become pages that show them.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

import hiddenscope as hs
from docs.site.reference import reference_page, types_page
from docs.site.sources import Sources
from docs.site.structure import ROOT, Section, name_groups, sections, type_names
from hiddenscope.catalog import PUBLIC

LINK = re.compile(
    r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<fragment>#[^)\s]*)?\)"
)
FENCE = re.compile(r"^ *(`{3,}|~{3,})")
# A comment that names a saved result, and the picture that GitHub shows in its place.
LIVE = re.compile(
    r"^<!-- live: (?P<name>[\w-]+)\.nc(?: (?P<height>\d+))? -->\n+"
    r"!\[(?P<caption>[^\]]*)\]\([^)]*\)$",
    re.MULTILINE,
)
RESULTS = ROOT / "docs" / "results"
HEIGHT = 700
# What the gallery shows of a tall picture, in pixels: its upper left. The whole of it
# would be so small that nobody could read it.
THUMBNAIL = (640, 400)
# A public name in a table of docs/reference.md.
NAME = re.compile(r"(?<=^\| )`hs\.(\w+)`(?= \|)", re.MULTILINE)
CARDS = re.compile(
    r"(?<=<!-- sections: `make docs` writes them -->\n)(.*)"
    r"(?=<!-- end of sections -->)",
    re.DOTALL,
)
# A table of pages, as docs/generate.py writes it, and one of its rows.
TABLE = re.compile(
    r"^\| page \| question \|\n\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE
)
ROW = re.compile(r"^\| \[(?P<title>.*?)\]\((?P<address>.*?)\) \| (?P<line>.*) \|$")
# Sections whose pages have pictures: their tables become a gallery.
GALLERIES = ("questions", "experiments")
PICTURE = re.compile(r"^!\[[^\]]*\]\((?P<target>[^)\s]+\.png)\)", re.MULTILINE)
# Sphinx has a page of this name itself, the results of its search.
TAKEN = {"search": "search-texts"}
# The page of the API that explains the short names in signatures.
TYPES = "api/types"
# Folders that have a page of their own.
FOLDERS = {"docs": "index", "docs/decisions": "decisions"}


class Pages:
    """The pages of the site, written into a folder."""

    def __init__(self, folder: Path, *, colours: bool = True) -> None:
        self.folder = folder
        self.sections = sections()
        # The Markdown of each page as a reader of plain text wants it, by its name.
        self.plain: dict[str, str] = {}
        self.sources = Sources(colours=colours)
        # Files that the site keeps as they are, by their place in it.
        self.files: dict[str, Path] = {}
        # The Markdown of each page, by the page's name.
        self.names: dict[str, Path] = {}
        # Pages that links may lead to; other Markdown is shown as a source file.
        self.written = {"index"}
        for section in self.sections:
            self.written.add(page_name(section.page.path))
            for page in section.pages:
                self.names[page_name(page.path)] = page.path
        self.written |= set(self.names)

    def write(self) -> None:
        """Write all pages and what they show."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        shutil.copytree(ROOT / "docs" / "pictures", self.folder / "pictures")
        self._write_page(ROOT / "docs" / "index.md", _contents(self.sections))
        for section in self.sections:
            names = [_toctree_entry(page.path) for page in section.pages]
            if section.word == "reference":
                names = self._write_reference() + names
            self._write_page(section.page.path, _toctree(names))
            for page in section.pages:
                self._write_page(page.path)

    def _write_page(self, path: Path, ending: str = "") -> None:
        name = page_name(path)
        text = path.read_text("utf-8")
        self.plain[name] = text
        # Links first: what is put in for a live view is a page's own address.
        text = self._with_site_links(text, path)
        text = LIVE.sub(lambda match: self._live(match, name), text)
        if name == "reference":
            text = NAME.sub(_name_link, text)
        if name in GALLERIES:
            text = TABLE.sub(lambda table: self._gallery(table[1], path), text)
        text = CARDS.sub(r"\n:::{container} cards\n\1:::\n", text)
        self._write(name, text + ending)

    def _write(self, name: str, text: str) -> None:
        path = self.folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def _write_reference(self) -> list[str]:
        names = []
        for group in name_groups():
            name = f"api/{group.word}"
            self.plain[name] = reference_page(group)
            self._write(name, self.plain[name])
            names.append(name)
        self.plain[TYPES] = types_page(type_names())
        self._write(TYPES, self.plain[TYPES])
        return [*names, TYPES]

    def _with_site_links(self, text: str, path: Path) -> str:
        """Point the links of a page at pages of the site, outside blocks of code."""
        lines = []
        fence = ""
        for line in text.split("\n"):
            mark = FENCE.match(line)
            if fence:
                if mark and mark[1].startswith(fence):
                    fence = ""
            elif mark:
                fence = mark[1]
            else:
                line = LINK.sub(lambda link: self._site_link(link, path), line)
            lines.append(line)
        return "\n".join(lines)

    def _site_link(self, link: re.Match[str], path: Path) -> str:
        target = (path.parent / link["target"]).resolve()
        assert target.exists(), f"{path} links to {link['target']}, which is not there"
        page = page_name(path)
        inside = target.relative_to(ROOT).as_posix()
        if inside.startswith("docs/pictures/"):
            address = inside.removeprefix("docs/")
        elif target.suffix == ".ipynb":
            return self._notebook_link(target, link["text"], page)
        elif inside in FOLDERS:
            address = f"{FOLDERS[inside]}.md"
        elif target.suffix == ".md" and page_name(target) in self.written:
            address = f"{page_name(target)}.md"
        else:
            # Sphinx does not know these pages, so the link is HTML already.
            return f'<a href="{self.sources.link(target, page)}">{link["text"]}</a>'
        address = os.path.relpath(address, Path(page).parent)
        return f"[{link['text']}]({address}{link['fragment'] or ''})"

    def _notebook_link(self, notebook: Path, text: str, page: str) -> str:
        """Return a link that downloads a notebook, which is kept with the site."""
        name = f"notebooks/{notebook.name}"
        self.files[name] = notebook
        address = os.path.relpath(name, Path(page).parent)
        return f'<a href="{address}" download>{text}</a>'

    def _gallery(self, rows: str, path: Path) -> str:
        """Return the pages of a table as cards, each with the page's first picture."""
        cards = []
        for line in rows.splitlines():
            row = ROW.match(line)
            assert row, f"{path} has a row that is no link and a question: {line}"
            # The table was written for the site already.
            source = self.names[row["address"].removesuffix(".md")]
            thumbnail = self._thumbnail(source)
            label = f"[**{row['title']}**]({row['address']})<br>{row['line']}"
            cards.append(f"- {thumbnail}{label}\n")
        return f":::{{container}} cards gallery\n{''.join(cards)}:::\n"

    def _thumbnail(self, page: Path) -> str:
        """Cut out a part of a page's first picture, and return what shows it."""
        match = PICTURE.search(page.read_text("utf-8"))
        if not match:
            return ""
        picture = (page.parent / match["target"]).resolve()
        inside = picture.relative_to(ROOT / "docs" / "pictures")
        # Sphinx keeps all pictures in one folder, so that names must differ.
        name = f"pictures/small/small-{inside.as_posix().replace('/', '-')}"
        small = self.folder / name
        small.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(picture) as image:
            width, height = THUMBNAIL
            if image.width * height > 0.9 * image.height * width:
                width, height = image.size
            box = (0, 0, min(width, image.width), min(height, image.height))
            image.convert("RGB").crop(box).save(small, optimize=True)
        # The title beside it says what it shows.
        return f"![]({name})"

    def _live(self, match: re.Match[str], page: str) -> str:
        """Return the frame that shows a saved result in place of its picture."""
        name, caption = match["name"], match["caption"]
        path = self.folder / "live" / f"{name}.html"
        path.parent.mkdir(exist_ok=True)
        # A page that is saved inside a checkout links to its Markdown.
        with tempfile.TemporaryDirectory() as elsewhere:
            saved = Path(elsewhere) / path.name
            hs.Result.load(RESULTS / f"{name}.nc").save(saved)
            shutil.copy(saved, path)
        address = os.path.relpath(f"live/{name}.html", Path(page).parent)
        return (
            "```{raw} html\n"
            '<figure class="live">\n'
            f'<iframe src="{address}" title="{caption}" loading="lazy"'
            f' height="{match["height"] or HEIGHT}"'
            ' sandbox="allow-scripts allow-downloads"></iframe>\n'
            f'<figcaption>{caption}. <a href="{address}">Open it alone</a>'
            "</figcaption>\n</figure>\n```"
        )


def page_name(path: Path) -> str:
    """Return the name of the page of a Markdown file, without a suffix.

    README.md of the repository becomes `readme`, docs/lens.md becomes `lens`.
    """
    inside = path.relative_to(ROOT).with_suffix("").as_posix()
    if not inside.startswith("docs/"):
        return inside.lower()
    name = inside.removeprefix("docs/")
    return TAKEN.get(name, name)


def _name_link(match: re.Match[str]) -> str:
    """Return the link from a public name to its entry in the API reference."""
    name = match[1]
    for group in name_groups():
        if name in group.names:
            address = f"api/{group.word}.html"
            if name in PUBLIC:
                address += f"#hiddenscope.{name}"
            return f'<a href="{address}">{match[0]}</a>'
    raise LookupError(f"{name} is in no group of docs/site/structure.toml")


def _contents(parts: Iterable[Section]) -> str:
    names = []
    for section in parts:
        names.append(f"{section.title} <{section.word}>")
    return _toctree(names)


def _toctree_entry(path: Path) -> str:
    # The heading of README.md is the name of the project.
    if path.name == "README.md":
        return f"README <{page_name(path)}>"
    return page_name(path)


def _toctree(names: Iterable[str]) -> str:
    entries = "\n".join(names)
    if not entries:
        return ""
    # The names begin at the root of the site, wherever the page is.
    return f"\n```{{toctree}}\n:hidden:\n:maxdepth: 2\n\n{entries}\n```\n"
