"""A page of sections: contents at the side, and in each part one sentence, its picture,
and how to read it.

>>> from hiddenscope.views.values import Lines, Section, Series
>>> norms = Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))
>>> html = story_page([Section("How large states are", "They grow.", (norms,), "The line is the norm.")], "A look")
>>> html.index("They grow.") < html.index("<section data-view") < html.index("The line is the norm.")
True
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hiddenscope.views.listing import listed
from hiddenscope.views.page import assembled, blocks, inline, paragraphs, placed, plain
from hiddenscope.views.terms import explained, words_on
from hiddenscope.views.values import Section, View


def story_page(
    sections: Sequence[Section],
    title: str,
    opening: str = "",
    closing: str = "",
    docs: str = "",
) -> str:
    """A page of the sections in order; `docs` is where the docs lie, seen from the
    page.

    A folded section stands behind "More" in the part of the one before it. A page whose
    parts say what was found has contents, where there are several; one whose opening
    says it all has none.
    """
    parts = _parts(sections)
    page = _Page(docs)
    bodies = [
        page.part(part, number, opening if number == 1 else "")
        for number, part in enumerate(parts, 1)
    ]
    body = "".join([paragraphs(opening), *bodies, paragraphs(closing)])
    several = sum(bool(part[0].prose) for part in parts) > 1
    return assembled(page.views, title, body, _contents(parts) if several else "")


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
        f'<li><a href="#part-{n}">{plain(part[0].title)}</a></li>\n'
        for n, part in enumerate(parts, 1)
    ]
    return (
        '<nav class="contents" aria-label="Contents">\n<h2>On this'
        f" page</h2>\n<ol>\n{''.join(lines)}</ol>\n</nav>\n"
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
        rest = [*pictures[1:], *map(self.fold, folded)]
        blocks_in_order = [
            _block("prose claim", claim),
            _block("pictures", "".join(pictures[:1])),
            _block("prose guide", guide),
            _block("pictures", "".join(rest)),
        ]
        return (
            '<article class="part"'
            f' id="part-{number}">\n{"".join(blocks_in_order)}</article>\n'
        )

    def fold(self, section: Section) -> str:
        """Return a section that is closed at first: all of its words stand above its
        pictures.
        """
        lead, others = _claim(replace(section, title=""))
        words = _block("prose", f"{lead}{others}{self.reading(section)}")
        summary = f"<summary>More: {plain(section.title)}</summary>\n"
        return (
            "<details"
            f' class="fold">\n{summary}{words}{"".join(self.pictures(section))}</details>\n'
        )

    def reading(self, section: Section, before: str = "") -> str:
        """Return how to read the views of a section, and the terms that the page uses
        for the first time.
        """
        reading = (
            _block("reading", "".join(blocks(section.reading)))
            if section.reading
            else ""
        )
        text = " ".join(
            [
                before,
                section.title,
                section.prose,
                section.reading,
                *map(words_on, section.views),
            ]
        )
        return f"{reading}{_terms(text, self.known)}"

    def more_in_docs(self, section: Section) -> str:
        """Return the docs page that says more: a link where the page lies beside the
        docs, its name elsewhere.
        """
        if not section.docs:
            return ""
        name = f"docs/{section.docs}.md"
        link = plain(f"{self.docs}/{section.docs}.md")
        shown = (
            f'<a href="{link}">{plain(name)}</a>'
            if self.docs
            else f"<code>{name}</code>"
        )
        return f'<p class="docs">How it is measured: {shown}</p>\n'

    def pictures(self, section: Section) -> list[str]:
        """Return the places of a section's views in order, and then its lists."""
        start = len(self.views)
        self.views += section.views
        places = [
            placed(view, place) for place, view in enumerate(section.views, start)
        ]
        return [*places, listed(section.tables)] if section.tables else places


def _block(kind: str, markup: str) -> str:
    return f'<div class="{kind}">\n{markup}</div>\n' if markup else ""


def _claim(section: Section) -> tuple[str, str]:
    """Return what stands above the picture, the heading and the first paragraph, and
    the paragraphs that follow it.
    """
    heading = f"<h2>{plain(section.title)}</h2>\n" if section.title else ""
    lead, *others = re.split(r"\n\s*\n", section.prose.strip(), maxsplit=1)
    return heading + "".join(blocks(lead)), "".join(blocks("".join(others)))


def _terms(text: str, known: set[str]) -> str:
    lines = [
        f"<dt>{plain(term)}</dt><dd>{inline(meaning)}.</dd>\n"
        for term, meaning in explained(text, known)
    ]
    return f'<dl class="terms">\n{"".join(lines)}</dl>\n' if lines else ""


def unfolded(sections: Sequence[Section]) -> Iterator[Section]:
    """The sections of a page about one result, where the findings stand above all of
    them and nothing is folded.
    """
    for section in sections:
        title = section.title if section.reading else ""
        yield Section(title, "", section.views, section.reading, tables=section.tables)
