"""Sections and views as one HTML document that needs nothing else: no network, no
server, no other file.

Beside the contents, each part of a page has one sentence, its picture, and how to read
it.

>>> from hiddenscope.results.pictures import Lines, Series
>>> norms = Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))
>>> html = document([norms], "A first look")
>>> html.startswith("<!doctype html>"), "<h1>A first look</h1>" in html
(True, True)
>>> "http://" in html.replace(XML_NAME, "")
False
>>> section = Section("How large?", ("They grow.",), (norms,), "Lines are norms.")
>>> html = story_page([section], "A look")
>>> claim, picture = html.index("They grow."), html.index("<section data-view")
>>> claim < picture < html.index("Lines are norms.")
True
"""

import base64
import hashlib
import html
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import chain, groupby, zip_longest

from hiddenscope.errors import StatesError
from hiddenscope.results import Listing, Section
from hiddenscope.results.pictures import View
from hiddenscope.results.sentences import shortened
from hiddenscope.views.payload import pack
from hiddenscope.views.terms import new_terms, words_on

# An XML namespace, which is never fetched.
XML_NAME = "http://www.w3.org/2000/svg"

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
# A cell of a table is cut here, in characters.
LONGEST_CELL = 600
MOST_ROWS = 100
# The first change the direction of the line, so that a text could look like another;
# the others show nothing, or are no characters at all.
_UNSEEN = re.compile(
    "[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]"
)


def document(views: Sequence[View], title: str, prose: Sequence[str] = ()) -> str:
    """Return a page with the views in order; `prose[i]` comes before view i, and one
    more may follow the last.

    Prose is plain text: blank lines separate paragraphs, a line that begins with `# `
    is a heading, lines that begin with `- ` are a list, and words between backticks are
    code. Nothing in it is markup. Without a title, the title of the first view names
    the page.
    """
    if len(prose) > len(views) + 1:
        raise StatesError(
            f"Cannot make the page {title!r}",
            f"there are {len(prose)} pieces of prose for {len(views)} views",
            "Give one for each view, and at most one after the last.",
        )
    texts = [paragraphs(text) for text in prose]
    pictures = [placed(view, place) for place, view in enumerate(views)]
    pairs = zip_longest(texts, pictures, fillvalue="")
    return assembled(views, title, "".join(chain.from_iterable(pairs)))


def story_page(
    sections: Sequence[Section],
    title: str,
    opening: str = "",
    closing: str = "",
    docs: str = "",
) -> str:
    """Return a page of the sections in order; `docs` is where the docs lie, seen from
    the page.

    A folded section stands behind "More" in the part of the one before it. The page has
    contents if several of its parts have prose; a page whose opening says it all has
    none.
    """
    parts: list[list[Section]] = []
    for section in sections:
        if parts and section.folded:
            parts[-1].append(section)
        else:
            parts.append([section])
    page = _Page(docs)
    body = [paragraphs(opening)]
    lines = []
    for number, part in enumerate(parts, 1):
        body.append(page.part(part, number, opening if number == 1 else ""))
        link = f'<a href="#part-{number}">{html_text(part[0].title)}</a>'
        lines.append(f"<li>{link}</li>\n")
    body.append(paragraphs(closing))
    contents = (
        '<nav class="contents" aria-label="Contents">\n<h2>On this page</h2>\n'
        f"<ol>\n{''.join(lines)}</ol>\n</nav>\n"
    )
    with_prose = [part for part in parts if part[0].prose]
    if len(with_prose) < 2:
        contents = ""
    return assembled(page.views, title, "".join(body), contents)


@dataclass
class _Page:
    """Writes the parts of a page one after the other: counts its views, and remembers
    the terms it has explained.
    """

    docs: str
    views: list[View] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def part(self, part: Sequence[Section], number: int, before: str) -> str:
        """Return one part: its claim, its first picture, how to read that, and then
        everything else.

        Terms in the text `before` the part are explained in it too, so that nothing but
        the claim is above a picture.
        """
        first, *folded = part
        claim, others = _claim(first)
        pictures = self.pictures(first)
        guide = f"{others}{self.reading(first, before)}"
        if first.docs:
            # A link where the page lies beside the docs.
            name = f"docs/{first.docs}.md"
            where = f"<code>{name}</code>"
            if self.docs:
                link = html_text(f"{self.docs}/{first.docs}.md")
                where = f'<a href="{link}">{html_text(name)}</a>'
            guide += f'<p class="docs">How it is measured: {where}</p>\n'
        # Folds come after the reading: a term is explained where it is first used.
        rest = [*pictures[1:], *map(self.fold, folded)]
        return "".join(
            [
                f'<article class="part" id="part-{number}">\n',
                _block("prose claim", claim),
                _block("pictures", "".join(pictures[:1])),
                _block("prose guide", guide),
                _block("pictures", "".join(rest)),
                "</article>\n",
            ]
        )

    def fold(self, section: Section) -> str:
        """Return a section that is closed at first; all of its text stands above its
        pictures.
        """
        lead, others = _claim(replace(section, title=""))
        words = _block("prose", f"{lead}{others}{self.reading(section)}")
        summary = f"<summary>More: {html_text(section.title)}</summary>\n"
        pictures = "".join(self.pictures(section))
        return f'<details class="fold">\n{summary}{words}{pictures}</details>\n'

    def reading(self, section: Section, before: str = "") -> str:
        """Return how to read the views of a section, and the terms that the page uses
        for the first time.
        """
        reading = ""
        if section.reading:
            reading = _block("reading", "".join(prose_markup(section.reading)))
        texts = [before, section.title, section.prose, section.reading]
        texts += map(words_on, section.views)
        terms = [
            f"<dt>{html_text(term)}</dt><dd>{inline(meaning)}.</dd>\n"
            for term, meaning in new_terms(" ".join(texts), self.known)
        ]
        if terms:
            reading += f'<dl class="terms">\n{"".join(terms)}</dl>\n'
        return reading

    def pictures(self, section: Section) -> list[str]:
        """Return the markup of a section's views in order, and then of its lists."""
        pictures = []
        for view in section.views:
            pictures.append(placed(view, len(self.views)))
            self.views.append(view)
        listings = [table for table in section.tables if isinstance(table, Listing)]
        pictures.append(html_lists(listings))
        return pictures


def _block(kind: str, markup: str) -> str:
    return f'<div class="{kind}">\n{markup}</div>\n' if markup else ""


def _claim(section: Section) -> tuple[str, str]:
    """Return what stands above the picture, the heading and the first paragraph, and
    the paragraphs that follow it.
    """
    heading = f"<h2>{html_text(section.title)}</h2>\n" if section.title else ""
    lead, *others = re.split(r"\n\s*\n", section.prose.strip(), maxsplit=1)
    return heading + "".join(prose_markup(lead)), "".join(prose_markup("".join(others)))


def html_lists(listings: Sequence[Listing]) -> str:
    """Return lists and tables of texts and numbers, side by side where there is room.

    >>> rows = ((0.5, "A kitten."), (0.25, "<b>"))
    >>> nearest = Listing("Nearest to “cat”", ("score", "text"), rows, bar="score")
    >>> html = html_lists([nearest])
    >>> "<td>A kitten.</td>" in html, '<rect width="50"' in html, "&lt;b&gt;" in html
    (True, True, True)
    """
    if not listings:
        return ""
    return f'<div class="listings">\n{"".join(map(_listing, listings))}</div>\n'


def _listing(listing: Listing) -> str:
    rows = listing.rows[:MOST_ROWS]
    first_row = rows[0] if rows else ()
    texts = [cell for cell in first_row if isinstance(cell, str)]
    kind = "listing texts" if len(texts) > 1 else "listing"
    if len(listing.columns) == 1:
        items = [f"<li>{_cell(cell)}</li>" for (cell,) in rows]
        body = f"<ul>{''.join(items)}</ul>\n"
    else:
        body = _table(listing)
    notes = [listing.note] if listing.note else []
    more = len(listing.rows) - MOST_ROWS
    if more > 0:
        notes.append(f"And {more:,} more: a CSV of the result has them all.")
    return "".join(
        [
            f'<figure class="{kind}">\n',
            f"<figcaption>{_cell(listing.title)}</figcaption>\n",
            body,
            *(f'<p class="note">{_cell(note)}</p>\n' for note in notes),
            "</figure>\n",
        ]
    )


def _table(listing: Listing) -> str:
    first_row = listing.rows[0] if listing.rows else [""] * len(listing.columns)
    heads, decimals = [], {}
    longest = 1.0
    for name, cell in zip(listing.columns, first_row, strict=True):
        heads.append(f'<th scope="col"{_class(cell)}>{_cell(name)}</th>')
        largest = _largest(listing, name)
        # As many decimals as give the largest number of a column three digits.
        decimals[name] = 0
        if largest:
            decimals[name] = min(6, max(0, 2 - math.floor(math.log10(largest))))
        if name == listing.bar:
            heads.append('<td aria-hidden="true"></td>')
            longest = listing.most or largest or 1.0
    rows = []
    for row in listing.rows[:MOST_ROWS]:
        cells = []
        for name, cell in zip(listing.columns, row, strict=True):
            # On a narrow screen, the cells of a wide table stand beneath one another,
            # each with its name.
            label = f' data-name="{_cell(name)}"' if len(row) > 2 else ""
            text = _cell(cell, decimals[name])
            cells.append(f"<td{_class(cell)}{label}>{text}</td>")
            if name == listing.bar and not isinstance(cell, str):
                percent = 0
                if math.isfinite(cell):
                    percent = round(100 * max(0.0, cell) / longest)
                cells.append(
                    '<td class="bar" aria-hidden="true">'
                    '<svg viewBox="0 0 100 8" preserveAspectRatio="none">'
                    f'<rect width="{percent}" height="8"/></svg></td>'
                )
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f"<table>\n<thead><tr>{''.join(heads)}</tr></thead>\n"
        f"<tbody>\n{''.join(rows)}</tbody>\n</table>\n"
    )


def _largest(listing: Listing, column: str) -> float:
    """Return the largest absolute value among the finite numbers of a column."""
    place = listing.columns.index(column)
    largest = 0.0
    for row in listing.rows:
        cell = row[place]
        if not isinstance(cell, str) and math.isfinite(cell):
            largest = max(largest, abs(cell))
    return largest


def _class(cell: str | float) -> str:
    return "" if isinstance(cell, str) else ' class="number"'


def _cell(cell: str | float, decimals: int = 0) -> str:
    if isinstance(cell, str):
        return html_text(shortened(cell, LONGEST_CELL))
    # A count or a rank is exact, and has no decimals.
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.{decimals}f}".replace("-", "−")


def assembled(views: Sequence[View], title: str, body: str, contents: str = "") -> str:
    """Return a page of trusted markup, with the script that draws the views and the
    numbers that they hold.
    """
    script, style = join_scripts("main.js"), _static("style.css")
    # Hashes allow just this script and style: nothing that a text may smuggle in runs.
    policy = (
        "default-src 'none';"
        f" script-src '{digest(script)}'; style-src '{digest(style)}';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    name = title
    if not name and views:
        name = views[0].title
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta http-equiv="Content-Security-Policy"',
            f' content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{html_text(name)}</title>\n",
            f"<style>{style}</style>\n</head>\n",
            f"<body>\n{contents}<main>\n",
            f"<h1>{html_text(title)}</h1>\n" if title else "",
            body,
            "<noscript><p>The pictures here are drawn by JavaScript,",
            " which is off.</p></noscript>\n</main>\n",
            '<script type="application/octet-stream" id="payload">',
            f"{pack(views)}</script>\n",
            f'<script type="module">{script}</script>\n</body>\n</html>\n',
        ]
    )


def frame(page: str, height: int = 640) -> str:
    """Return a document for a notebook's output: it may run its script and offer files,
    and cannot reach anything around it.

    It sends its height to the script beside it; where scripts are off, `height` stays.

    >>> 'sandbox="allow-scripts allow-downloads"' in frame("<!doctype html>")
    True
    """
    # A notebook may hold several outputs, and each script must find its own frame.
    name = f"hiddenscope-{secrets.token_hex(6)}"
    return (
        f'<iframe id="{name}" title="hiddenscope view"'
        ' sandbox="allow-scripts allow-downloads"'
        f' width="100%" height="{int(height)}" frameborder="0"'
        f' srcdoc="{html.escape(page, quote=True)}"></iframe>\n'
        "<script>addEventListener('message', (event) => { "
        f"const frame = document.getElementById('{name}'); "
        "if (!frame || event.source !== frame.contentWindow"
        " || event.data?.hiddenscope !== 'height') return; "
        "const height = Number(event.data.height); "
        "if (height > 0 && height < 20000) frame.height = String(Math.ceil(height));"
        " });</script>"
    )


def digest(text: str) -> str:
    """Return the hash by which a content security policy names an inline text."""
    sha256 = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(sha256).decode('ascii')}"


@cache
def join_scripts(entry: str) -> str:
    """Join the ES modules that an entry needs, in the order of their imports, to one
    script.

    Joining works because modules import only named things from their own folder, in no
    circle, and no two of them share a top-level name. A test holds them to that.
    """
    texts = {}

    def gather(module: str) -> None:
        source = _static(module)
        for other in _IMPORT.findall(source):
            if other not in texts:
                gather(other)
        texts[module] = _IMPORT.sub("", source)

    gather(entry)
    return re.sub(r"^export ", "", "".join(texts.values()), flags=re.MULTILINE)


@cache
def _static(name: str) -> str:
    return (files("hiddenscope.views") / "static" / name).read_text("utf-8")


def placed(view: View, place: int) -> str:
    """Return the element in which the script draws a view, by its place on the page."""
    kind = type(view).__name__.lower()
    return f'<section data-view="{place}" class="{kind}"></section>\n'


def paragraphs(text: str) -> str:
    """Return prose as markup: paragraphs, headings, lists and code."""
    if not text.strip():
        return ""
    return f'<div class="prose">\n{"".join(prose_markup(text))}</div>\n'


def prose_markup(text: str) -> Iterator[str]:
    """Yield the pieces of prose as markup."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        for mark, lines in groupby(paragraph.splitlines(), _mark):
            if mark == "# ":
                yield from (f"<h2>{inline(line[2:])}</h2>\n" for line in lines)
            elif mark == "- ":
                items = [f"<li>{inline(line[2:])}</li>" for line in lines]
                yield f"<ul>{''.join(items)}</ul>\n"
            else:
                yield f"<p>{inline(' '.join(lines))}</p>\n"


def _mark(line: str) -> str:
    """Return the mark of a heading or a list, or "" of a paragraph."""
    return next(filter(line.startswith, ("# ", "- ", "")))


def inline(text: str) -> str:
    """Return one line of prose as markup."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html_text(text))


def html_text(text: str) -> str:
    """Return text for HTML: no markup, no invisible characters, and none that change
    the direction of the line.

    >>> html_text("<b>" + chr(0x202E))
    '&lt;b&gt;‹U+202E›'
    """
    visible = _UNSEEN.sub(lambda match: f"‹U+{ord(match[0]):04X}›", text)
    return html.escape(visible, quote=True)
