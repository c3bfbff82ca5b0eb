"""A page of sections: contents at the side, and in each part one sentence, its picture,
and how to read it.

>>> from hiddenscope.results.pictures import Lines, Series
>>> norms = Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))
>>> section = Section("How large?", ("They grow.",), (norms,), "Lines are norms.")
>>> html = story_page([section], "A look")
>>> claim, picture = html.index("They grow."), html.index("<section data-view")
>>> claim < picture < html.index("Lines are norms.")
True
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hiddenscope.results import Listing, Section
from hiddenscope.results.pictures import View
from hiddenscope.views.listing import html_lists
from hiddenscope.views.page import (
    assembled,
    html_text,
    inline,
    paragraphs,
    placed,
    prose_markup,
)
from hiddenscope.views.terms import new_terms, words_on


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
    parts = _parts(sections)
    page = _Page(docs)
    body = [paragraphs(opening)]
    for number, part in enumerate(parts, 1):
        body.append(page.part(part, number, opening if number == 1 else ""))
    body.append(paragraphs(closing))
    with_prose = [part for part in parts if part[0].prose]
    contents = _contents(parts) if len(with_prose) > 1 else ""
    return assembled(page.views, title, "".join(body), contents)


def _parts(sections: Sequence[Section]) -> list[list[Section]]:
    parts: list[list[Section]] = []
    for section in sections:
        if parts and section.folded:
            parts[-1].append(section)
        else:
            parts.append([section])
    return parts


def _contents(parts: Sequence[Sequence[Section]]) -> str:
    lines = [
        f'<li><a href="#part-{number}">{html_text(part[0].title)}</a></li>\n'
        for number, part in enumerate(parts, 1)
    ]
    return (
        '<nav class="contents" aria-label="Contents">\n<h2>On this page</h2>\n'
        f"<ol>\n{''.join(lines)}</ol>\n</nav>\n"
    )


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
        guide = f"{others}{self.reading(first, before)}{self.more_in_docs(first)}"
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
        return f"{reading}{_terms(' '.join(texts), self.known)}"

    def more_in_docs(self, section: Section) -> str:
        """Return the docs page that says more: a link where the page lies beside the
        docs, its name elsewhere.
        """
        if not section.docs:
            return ""
        name = f"docs/{section.docs}.md"
        shown = f"<code>{name}</code>"
        if self.docs:
            link = html_text(f"{self.docs}/{section.docs}.md")
            shown = f'<a href="{link}">{html_text(name)}</a>'
        return f'<p class="docs">How it is measured: {shown}</p>\n'

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


def _terms(text: str, known: set[str]) -> str:
    lines = [
        f"<dt>{html_text(term)}</dt><dd>{inline(meaning)}.</dd>\n"
        for term, meaning in new_terms(text, known)
    ]
    return f'<dl class="terms">\n{"".join(lines)}</dl>\n' if lines else ""


def unfolded(sections: Sequence[Section], *, folds: bool) -> Iterator[Section]:
    """Yield the sections without their prose, for a page about one result, where the
    findings stand above all of them; unfolded, unless the page may have `folds`.
    """
    for section in sections:
        folded = folds and section.folded
        title = section.title if section.reading or folded else ""
        yield replace(section, title=title, sentences=(), folded=folded)
