"""Lists and tables of texts and numbers, as markup of a page.

>>> from hiddenscope.results import Listing
>>> rows = ((0.5, "A kitten."), (0.25, "<b>"))
>>> nearest = Listing("Nearest to “cat”", ("score", "text"), rows, bar="score")
>>> html = html_lists([nearest])
>>> "<td>A kitten.</td>" in html, '<rect width="50"' in html, "&lt;b&gt;" in html
(True, True, True)
"""

import math
from collections.abc import Sequence

from hiddenscope.results import Listing
from hiddenscope.results.sentences import shortened
from hiddenscope.views.page import html_text

# A cell is cut here, in characters.
LONGEST = 600
MOST_ROWS = 100


def html_lists(listings: Sequence[Listing]) -> str:
    """Return the lists, side by side where there is room."""
    if not listings:
        return ""
    return f'<div class="listings">\n{"".join(map(_figure, listings))}</div>\n'


def _figure(listing: Listing) -> str:
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
    heads = []
    for name, cell in zip(listing.columns, first_row, strict=True):
        heads.append(f'<th scope="col"{_class(cell)}>{_cell(name)}</th>')
        if name == listing.bar:
            heads.append('<td aria-hidden="true"></td>')
    rows = [f"<tr>{_row(listing, row)}</tr>\n" for row in listing.rows[:MOST_ROWS]]
    return (
        f"<table>\n<thead><tr>{''.join(heads)}</tr></thead>\n"
        f"<tbody>\n{''.join(rows)}</tbody>\n</table>\n"
    )


def _row(listing: Listing, row: Sequence[str | float]) -> str:
    cells = []
    for name, cell in zip(listing.columns, row, strict=True):
        # On a narrow screen, the cells of a wide table stand beneath one another, each
        # with its name.
        label = f' data-name="{_cell(name)}"' if len(listing.columns) > 2 else ""
        text = _cell(cell, _decimals(listing, name))
        cells.append(f"<td{_class(cell)}{label}>{text}</td>")
        if name == listing.bar and not isinstance(cell, str):
            bar = _bar(cell, _full_bar(listing))
            cells.append(f'<td class="bar" aria-hidden="true">{bar}</td>')
    return "".join(cells)


def _sizes(listing: Listing, column: str) -> list[float]:
    """Return the absolute values of the finite numbers of a column."""
    place = listing.columns.index(column)
    sizes = []
    for row in listing.rows:
        cell = row[place]
        if not isinstance(cell, str) and math.isfinite(cell):
            sizes.append(abs(cell))
    return sizes


def _full_bar(listing: Listing) -> float:
    return listing.most or max(_sizes(listing, listing.bar), default=1.0) or 1.0


def _decimals(listing: Listing, column: str) -> int:
    """Return as many decimals as give the largest number of a column three digits."""
    largest = max(_sizes(listing, column), default=0.0)
    if not largest:
        return 0
    return min(6, max(0, 2 - math.floor(math.log10(largest))))


def _bar(value: float, full: float) -> str:
    percent = round(100 * max(0.0, value) / full) if math.isfinite(value) else 0
    return (
        '<svg viewBox="0 0 100 8" preserveAspectRatio="none">'
        f'<rect width="{percent}" height="8"/></svg>'
    )


def _class(cell: str | float) -> str:
    return "" if isinstance(cell, str) else ' class="number"'


def _cell(cell: str | float, decimals: int = 0) -> str:
    if isinstance(cell, str):
        return html_text(shortened(cell, LONGEST))
    # A count or a rank is exact, and has no decimals.
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.{decimals}f}".replace("-", "−")
