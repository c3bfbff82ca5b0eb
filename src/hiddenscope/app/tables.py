"""Tables that somebody wants to upload: their columns and first rows, so that a reader
can say what each column is.

Only the beginning is looked at. `Library.add_dataset` reads all of it, strictly.

>>> table = first_rows("reviews.csv", b"review,sentiment\\nFine.,good\\n")
>>> table.columns, table.certain, table.likely.text, table.likely.label
(['review', 'sentiment'], False, 'review', 'sentiment')
"""

import csv
import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hiddenscope import texts
from hiddenscope.app.schemas import ColumnChoice, QuestionAnswer, TableAnswer
from hiddenscope.errors import TextError
from hiddenscope.texts.reading import LABEL_NAMES, TEXT_NAMES

UPLOAD_FORMATS = (".txt", ".csv", ".tsv", ".jsonl")
TABLES = (".csv", ".tsv", ".jsonl")
FIRST_ROWS = 5
MOST_COLUMNS = 200
MOST_BYTES = 2**20  # of the beginning
MOST_CHARACTERS = 200  # of a cell


def upload_format(file: str) -> str:
    """The format of an uploaded file, by its suffix; a TextError for one that cannot be
    read.
    """
    suffix = Path(file).suffix.lower()
    if suffix in UPLOAD_FORMATS:
        return suffix
    remedy = f"Upload one of {' '.join(UPLOAD_FORMATS)}; Python reads the others."
    raise TextError(
        f"Cannot read {file[:80]!r}",
        f"{suffix or 'no suffix'!r} is not a known format",
        remedy,
    )


def first_rows(file: str, content: bytes) -> TableAnswer:
    """Read the columns and the first rows of a table; a file of lines has none."""
    suffix = upload_format(file)
    rows: list[dict[str, str]] = []
    if suffix in TABLES:
        rows = list(islice(_rows(suffix, _beginning(content)), FIRST_ROWS))
    columns = list(rows[0])[:MOST_COLUMNS] if rows else []
    cells = [[row.get(name, "")[:MOST_CHARACTERS] for name in columns] for row in rows]
    by_name = _by_name(columns)
    likely = by_name if by_name.text else _by_length(columns, cells, by_name)
    return TableAnswer(
        file=Path(file).name,
        columns=columns,
        rows=cells,
        likely=likely,
        certain=by_name.text is not None,
        parameters=[_parameter(role, columns) for role in texts.COLUMNS],
    )


def _parameter(role: str, columns: list[str]) -> QuestionAnswer:
    """Describe the choice of one column, as a form asks for it."""
    return QuestionAnswer(
        name=role,
        kind="choice",
        required=role == "text",
        choices=columns,
        help=texts.COLUMNS[role],
    )


def _beginning(content: bytes) -> str:
    """The first lines as text; what is not UTF-8 is refused when all of it is read."""
    return content[:MOST_BYTES].decode("utf-8-sig", "replace")


def _rows(suffix: str, beginning: str) -> Iterator[dict[str, str]]:
    if suffix == ".jsonl":
        yield from _records(beginning)
        return
    delimiter = "\t" if suffix == ".tsv" else ","
    reader = csv.reader(io.StringIO(beginning), delimiter=delimiter)
    try:
        header = next((cells for cells in reader if cells), [])
        for cells in filter(None, reader):
            yield dict(zip(header, cells, strict=False))
    except csv.Error:  # told when all of it is read
        return


def _records(beginning: str) -> Iterator[dict[str, str]]:
    for line in filter(str.strip, beginning.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield {str(name): _cell(value) for name, value in record.items()}


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)


def _by_name(columns: list[str]) -> ColumnChoice:
    """The columns that `hs.read` would take by their names; groups are never guessed."""
    chosen: dict[str, str | None] = {}
    for role, names in (("text", TEXT_NAMES), ("label", LABEL_NAMES)):
        matches = [column for column in columns if column.lower() in names]
        chosen[role] = matches[0] if len(matches) == 1 else None
    return ColumnChoice(**chosen)


def _by_length(
    columns: list[str], cells: list[list[str]], named: ColumnChoice
) -> ColumnChoice:
    """Suggest the column with the longest cells as the texts, and of two columns the
    other one as the labels.
    """
    lengths = {
        name: sum(len(row[place]) for row in cells)
        for place, name in enumerate(columns)
        if name != named.label
    }
    if not lengths:
        return named
    text = max(lengths, key=lambda name: lengths[name])
    others = [name for name in columns if name != text]
    label = others[0] if len(others) == 1 else named.label
    return ColumnChoice(text=text, label=label)
