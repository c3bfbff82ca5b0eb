"""Lists and tables of texts and numbers, as markup of a page.

>>> from hiddenscope.views.values import Listing
>>> html = listed([Listing("Nearest to “cat”", ("score", "text"), ((0.5, "A kitten."), (0.25, "<b>")), bar="score")])
>>> "<td>A kitten.</td>" in html, '<rect width="50"' in html, "&lt;b&gt;" in html
(True, True, True)
"""

import math
from collections.abc import Sequence

from hiddenscope.views.page import plain
from hiddenscope.views.values import Listing

LONGEST = 600  # characters of a cell
MOST_ROWS = 100


def listed(listings: Sequence[Listing]) -> str:
    """The lists, side by side where there is room."""
    return (
        f'<div class="listings">\n{"".join(map(_one, listings))}</div>\n'
        if listings
        else ""
    )


def _one(listing: Listing) -> str:
    texts = (
        sum(isinstance(cell, str) for cell in listing.rows[0]) if listing.rows else 0
    )
    kind = "listing texts" if texts > 1 else "listing"
    more = len(listing.rows) - MOST_ROWS
    notes = [
        listing.note,
        f"And {more:,} more: a CSV of the result has them all." if more > 0 else "",
    ]
    return "".join(
        [
            (
                "<figure"
                f' class="{kind}">\n<figcaption>{_cell(listing.title)}</figcaption>\n'
            ),
            _bullets(listing) if len(listing.columns) == 1 else _table(listing),
            *(f'<p class="note">{_cell(note)}</p>\n' for note in notes if note),
            "</figure>\n",
        ]
    )


def _bullets(listing: Listing) -> str:
    return f"<ul>{''.join(f'<li>{_cell(cell)}</li>' for (cell,) in listing.rows[:MOST_ROWS])}</ul>\n"


def _table(listing: Listing) -> str:
    numbers = (
        {
            place
            for place, cell in enumerate(listing.rows[0])
            if not isinstance(cell, str)
        }
        if listing.rows
        else ()
    )
    heads = "".join(
        f'<th scope="col"{_number(place in numbers)}>{_cell(name)}</th>{_bar_head(listing, name)}'
        for place, name in enumerate(listing.columns)
    )
    rows = "".join(
        f"<tr>{_row(listing, row)}</tr>\n" for row in listing.rows[:MOST_ROWS]
    )
    return (
        f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n"
    )


def _bar_head(listing: Listing, name: str) -> str:
    return '<td aria-hidden="true"></td>' if name == listing.bar else ""


def _row(listing: Listing, row: Sequence[str | float]) -> str:
    cells = []
    for name, cell in zip(listing.columns, row, strict=True):
        named = f' data-name="{_cell(name)}"' if len(listing.columns) > 2 else ""
        cells.append(
            f"<td{_number(not isinstance(cell, str))}{named}>{_cell(cell, _decimals(listing, name))}</td>"
        )
        if name == listing.bar and not isinstance(cell, str):
            cells.append(
                '<td class="bar"'
                f' aria-hidden="true">{_bar(cell, _largest(listing))}</td>'
            )
    return "".join(cells)


def _numbers(listing: Listing, column: str) -> list[float]:
    place = listing.columns.index(column)
    return [
        abs(cell)
        for row in listing.rows
        if not isinstance(cell := row[place], str) and math.isfinite(cell)
    ]


def _largest(listing: Listing) -> float:
    return listing.most or max(_numbers(listing, listing.bar), default=1.0) or 1.0


def _decimals(listing: Listing, column: str) -> int:
    """So many that the largest number of a column has three digits."""
    largest = max(_numbers(listing, column), default=0.0)
    return min(6, max(0, 2 - math.floor(math.log10(largest)))) if largest else 0


def _bar(value: float, largest: float) -> str:
    share = round(100 * max(0.0, value) / largest) if math.isfinite(value) else 0
    return (
        f'<svg viewBox="0 0 100 8" preserveAspectRatio="none"><rect width="{share}"'
        ' height="8"/></svg>'
    )


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _cell(cell: str | float, decimals: int = 0) -> str:
    if isinstance(cell, str):
        return plain(cell if len(cell) <= LONGEST else cell[: LONGEST - 1] + "…")
    return (
        f"{cell:,}"
        if isinstance(cell, int)
        else f"{cell:,.{decimals}f}".replace("-", "−")
    )
