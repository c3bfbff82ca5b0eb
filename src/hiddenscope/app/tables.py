"""Tables: the columns and first rows of a file, before it is uploaded.

The page shows them, so that a reader can say what each column is. Only the beginning is
looked at, and faults in it are passed over: `Uploads.add` reads the whole file,
strictly.

>>> table = preview_table("reviews.csv", b"review,sentiment\\nFine.,good\\n")
>>> table.columns, table.certain, table.likely.text, table.likely.label
(['review', 'sentiment'], False, 'review', 'sentiment')
"""

import csv
import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from hiddenscope import texts
from hiddenscope.app.schemas import (
    ColumnChoice,
    QuestionAnswer,
    TableAnswer,
    form_field,
)
from hiddenscope.app.stores import encodable
from hiddenscope.errors import TextError
from hiddenscope.interface import Parameter
from hiddenscope.texts import LABEL_NAMES, TEXT_NAMES

UPLOAD_FORMATS = (".txt", ".csv", ".tsv", ".jsonl")
TABLES = (".csv", ".tsv", ".jsonl")
FIRST_ROWS = 5
MAX_COLUMNS = 200
MAX_CELL_CHARACTERS = 200
# The beginning of a file that is looked at.
MAX_BYTES = 2**20


def upload_format(file: str) -> str:
    """Return the suffix of an uploaded file; refuse a format that cannot be read."""
    suffix = Path(file).suffix.lower()
    if suffix in UPLOAD_FORMATS:
        return suffix
    raise TextError(
        f"Cannot read {file[:80]!r}",
        f"{suffix or 'no suffix'!r} is not a known format",
        f"Upload one of {' '.join(UPLOAD_FORMATS)}; Python reads the others.",
    )


def preview_table(file: str, content: bytes) -> TableAnswer:
    """Read the columns and the first rows of a table; a file of lines has none."""
    suffix = upload_format(file)
    rows: list[dict[str, str]] = []
    if suffix in TABLES:
        # What is not UTF-8 is refused when the whole file is read.
        beginning = content[:MAX_BYTES].decode("utf-8-sig", "replace")
        rows = list(islice(_read_rows(suffix, beginning), FIRST_ROWS))
    columns = list(rows[0])[:MAX_COLUMNS] if rows else []
    cells = []
    for row in rows:
        cells.append([row.get(name, "")[:MAX_CELL_CHARACTERS] for name in columns])
    by_name = _guess_by_name(columns)
    likely = by_name
    if by_name.text is None:
        likely = _guess_by_length(columns, cells, by_name)
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
    parameter = Parameter(
        role,
        "choice",
        texts.COLUMNS[role],
        required=role == "text",
        choices=tuple(columns),
    )
    return form_field(parameter)


def _read_rows(suffix: str, beginning: str) -> Iterator[dict[str, str]]:
    if suffix == ".jsonl":
        yield from _read_records(beginning)
        return
    delimiter = "\t" if suffix == ".tsv" else ","
    reader = csv.reader(io.StringIO(beginning), delimiter=delimiter)
    try:
        header = next((cells for cells in reader if cells), [])
        for cells in filter(None, reader):
            yield dict(zip(header, cells, strict=False))
    # It is reported when the whole file is read.
    except csv.Error:
        return


def _read_records(beginning: str) -> Iterator[dict[str, str]]:
    for line in filter(str.strip, beginning.splitlines()):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                return
            row = {encodable(name): _cell(value) for name, value in record.items()}
        except (ValueError, RecursionError):
            return
        yield row


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return encodable(value)
    return json.dumps(value)


def _guess_by_name(columns: list[str]) -> ColumnChoice:
    """Return the columns that `hs.read` would take; groups are never guessed."""
    roles: dict[str, str] = {}
    for role, names in (("text", TEXT_NAMES), ("label", LABEL_NAMES)):
        matches = [column for column in columns if column.lower() in names]
        if len(matches) == 1:
            roles[role] = matches[0]
    return ColumnChoice(**roles)


def _guess_by_length(
    columns: list[str], cells: list[list[str]], by_name: ColumnChoice
) -> ColumnChoice:
    """Suggest the column with the longest cells as texts, a single other as labels."""
    lengths: dict[str, int] = {}
    for place, name in enumerate(columns):
        if name != by_name.label:
            lengths[name] = sum(len(row[place]) for row in cells)
    if not lengths:
        return by_name
    text = max(lengths, key=lengths.__getitem__)
    others = [name for name in columns if name != text]
    label = others[0] if len(others) == 1 else by_name.label
    return ColumnChoice(text=text, label=label)
