"""A page of sections: contents at the side, and in each part what was found, how to read it, and its views.

>>> from hiddenscope.views.values import Lines, Section, Series
>>> norms = Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))
>>> html = story_page([Section("How large states are", "They grow.", (norms,), "The line is the norm.")], "A look")
>>> html.index("They grow.") < html.index("The line is the norm.") < html.index("<section data-view")
True
"""

from collections.abc import Iterator, Sequence

from hiddenscope.views.listing import listed
from hiddenscope.views.page import assembled, blocks, inline, paragraphs, placed, plain
from hiddenscope.views.terms import explained, words_on
from hiddenscope.views.values import Section, View


def story_page(sections: Sequence[Section], title: str, opening: str = "", closing: str = "", docs: str = "") -> str:
    """A page of the sections in order; `docs` is where the docs lie, seen from the page.

    A folded section stands behind "More" in the part of the one before it. A page whose parts say what was found has
    contents, where there are several; one whose opening says it all has none.
    """
    parts = _parts(sections)
    views: list[View] = []
    known: set[str] = set()
    opened = "".join([paragraphs(opening), _terms(opening, known)])
    bodies = [_part(part, number, views, known, docs) for number, part in enumerate(parts, 1)]
    body = "".join([opened, *bodies, paragraphs(closing)])
    several = sum(bool(part[0].prose) for part in parts) > 1
    return assembled(views, title, body, _contents(parts) if several else "")


def _parts(sections: Sequence[Section]) -> list[list[Section]]:
    parts: list[list[Section]] = []
    for section in sections:
        if parts and section.folded:
            parts[-1].append(section)
        else:
            parts.append([section])
    return parts


def _contents(parts: Sequence[Sequence[Section]]) -> str:
    lines = [f'<li><a href="#part-{n}">{plain(part[0].title)}</a></li>\n' for n, part in enumerate(parts, 1)]
    return f'<nav class="contents" aria-label="Contents">\n<h2>On this page</h2>\n<ol>\n{"".join(lines)}</ol>\n</nav>\n'


def _part(part: Sequence[Section], number: int, views: list[View], known: set[str], docs: str) -> str:
    """One part: its words, its views, and its folds. The views are counted on."""
    first, *folded = part
    heading = f"<h2>{plain(first.title)}</h2>\n" if first.title else ""
    words, shown = f"{heading}{_words(first, known)}{_docs(first, docs)}", _placed(first, views)
    folds = "".join(
        f'<details class="fold">\n<summary>More: {plain(section.title)}</summary>\n'
        f'<div class="prose">\n{_words(section, known)}</div>\n{_placed(section, views)}</details>\n'
        for section in folded
    )
    return (
        f'<article class="part" id="part-{number}">\n<div class="prose">\n{words}</div>\n'
        f'<div class="pictures">\n{shown}{folds}</div>\n</article>\n'
    )


def _words(section: Section, known: set[str]) -> str:
    """What was found first; then how to read the views, and the terms that are new."""
    reading = f'<div class="reading">\n{"".join(blocks(section.reading))}</div>\n' if section.reading else ""
    text = " ".join([section.title, section.prose, section.reading, *map(words_on, section.views)])
    return f"{''.join(blocks(section.prose)) if section.prose.strip() else ''}{reading}{_terms(text, known)}"


def _terms(text: str, known: set[str]) -> str:
    lines = [f"<dt>{plain(term)}</dt><dd>{inline(meaning)}.</dd>\n" for term, meaning in explained(text, known)]
    return f'<dl class="terms">\n{"".join(lines)}</dl>\n' if lines else ""


def _docs(section: Section, docs: str) -> str:
    """The docs page that says more: a link where the page lies beside the docs, its name elsewhere."""
    if not section.docs:
        return ""
    name = f"docs/{section.docs}.md"
    shown = f'<a href="{plain(f"{docs}/{section.docs}.md")}">{plain(name)}</a>' if docs else f"<code>{name}</code>"
    return f'<p class="docs">How it is measured: {shown}</p>\n'


def _placed(section: Section, views: list[View]) -> str:
    start = len(views)
    views += section.views
    places = (placed(view, place) for place, view in enumerate(section.views, start))
    return "".join([listed(section.tables), *places])


def unfolded(sections: Sequence[Section]) -> Iterator[Section]:
    """The sections of a page about one result, where the findings stand above all of them and nothing is folded."""
    for section in sections:
        title = section.title if section.reading else ""
        yield Section(title, "", section.views, section.reading, tables=section.tables)
