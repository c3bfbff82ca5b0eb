"""Write pages that show source files, for the links of the docs that lead to them.

They are plain HTML and no pages of Sphinx: the search of the site is for prose, and
three hundred files would double the time of a build. To colour them takes as long as
all that Sphinx does, so that a test may leave it out.
"""

import os
from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from docs.site.structure import ROOT

SUFFIXES = (".py", ".toml", ".json", ".js", ".css")
# Where the copies stand, below the root of the site.
FOLDER = "source"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="{root}/{folder}/source.css">
</head>
<body>
<nav><a href="{root}/index.html">hiddenscope</a> / {title}</nav>
<main>{body}</main>
</body>
</html>
"""
STYLE = """body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
pre { overflow-x: auto; font-size: 0.85rem; }
:root { color-scheme: light dark; }
body { color: light-dark(#1b1f24, #dfe3e8); background: light-dark(#fff, #14181e); }
a { color: light-dark(#b3401f, #ff9a6b); }
.highlight { background: none; }
"""


class Sources:
    """The source files that pages link to."""

    def __init__(self, *, colours: bool = True) -> None:
        self.colours = colours
        self._targets: set[Path] = set()

    def link(self, target: Path, page: str) -> str:
        """Return the address of a file's or a folder's copy, seen from a page."""
        self._targets.add(target)
        return os.path.relpath(_name(target), Path(page).parent)

    def write(self, site: Path) -> None:
        """Write a page for every target, and for everything inside its folders."""
        waiting = list(self._targets)
        written = set()
        while waiting:
            target = waiting.pop()
            if target in written:
                continue
            written.add(target)
            children = []
            if target.is_dir():
                children = _children(target)
                waiting += children
                body = _listing(target, children)
            else:
                body = self._text(target)
            _write(site, target, body)
        light = HtmlFormatter(style="a11y-high-contrast-light").get_style_defs()
        dark = HtmlFormatter(style="a11y-high-contrast-dark").get_style_defs()
        style = f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{STYLE}"
        (site / FOLDER / "source.css").write_text(style, "utf-8")

    def _text(self, path: Path) -> str:
        text = path.read_text("utf-8")
        if not self.colours:
            return f"<pre>{escape(text)}</pre>"
        try:
            lexer = get_lexer_for_filename(path.name)
        except ClassNotFound:
            lexer = TextLexer()
        return str(highlight(text, lexer, HtmlFormatter()))


def _name(target: Path) -> str:
    return f"{FOLDER}/{target.relative_to(ROOT).as_posix()}.html"


def _write(site: Path, target: Path, body: str) -> None:
    path = site / _name(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    title = escape(target.relative_to(ROOT).as_posix())
    root = os.path.relpath(site, path.parent)
    page = PAGE.format(title=title, root=root, folder=FOLDER, body=body)
    path.write_text(page, "utf-8")


def _children(folder: Path) -> list[Path]:
    """Return the files of source code in a folder, and the folders that hold some."""
    children = []
    for child in sorted(folder.iterdir()):
        has_code = child.is_dir() and any(child.glob("*.py"))
        if has_code or child.suffix in SUFFIXES:
            children.append(child)
    return children


def _listing(folder: Path, children: list[Path]) -> str:
    rows = []
    for child in children:
        address = os.path.relpath(_name(child), Path(_name(folder)).parent)
        rows.append(f'<li><a href="{address}">{escape(child.name)}</a></li>')
    return f"<ul>{''.join(rows)}</ul>"
