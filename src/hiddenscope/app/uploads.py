"""Uploads: labelled texts that a page has sent, parsed under limits, as plain JSON.

Before a file is uploaded, the page shows its columns and first rows, so that a reader
can say what each column is. Only the beginning is looked at then, and faults in it are
passed over: `Uploads.add` reads the whole file, strictly.

>>> table = preview_table("reviews.csv", b"review,sentiment\\nFine.,good\\n")
>>> table.columns, table.certain, table.likely.text, table.likely.label
(['review', 'sentiment'], False, 'review', 'sentiment')
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path, PureWindowsPath

from hiddenscope import texts
from hiddenscope.app.schemas import (
    MOST_CHARACTERS,
    ColumnChoice,
    TableAnswer,
    encodable,
    form_field,
)
from hiddenscope.errors import TextError
from hiddenscope.files import identity, printable, replacing
from hiddenscope.interface import Parameter
from hiddenscope.texts import LABEL_NAMES, TEXT_NAMES
from hiddenscope.workers import Header

UPLOAD_FORMATS = (".txt", ".csv", ".tsv", ".jsonl")
FIRST_ROWS = 5
MAX_COLUMNS = 200
MAX_CELL_CHARACTERS = 200
# The beginning of a file that is looked at.
PREVIEW_BYTES = 2**20
MAX_ROWS = 20_000
MAX_UPLOADS = 50
UPLOAD_NAME = re.compile(r"upload:[0-9a-f]{16}")


@dataclass(frozen=True)
class Upload:
    """Texts under the name of their file, and the columns that were taken."""

    data: texts.Labelled
    columns: ColumnChoice

    def as_argument(self) -> Header:
        """Return the texts as the worker takes them; see `labelled_from`."""
        return {
            "file": self.data.name,
            "texts": self.data.texts,
            "labels": self.data.labels,
            "groups": self.data.groups,
        }

    def to_json(self) -> str:
        """Return the upload as JSON."""
        return json.dumps({**self.as_argument(), "columns": self.columns.model_dump()})

    @classmethod
    def from_json(cls, content: str) -> "Upload":
        """Read what `to_json` returned."""
        parts = json.loads(content)
        return cls(labelled_from(parts), ColumnChoice(**parts["columns"]))


def labelled_from(argument: Header) -> texts.Labelled:
    """Return the texts of an upload that travelled as JSON."""
    labels, groups = argument["labels"], argument["groups"]
    return texts.Labelled(
        tuple(argument["texts"]),
        labels and tuple(labels),
        argument["file"],
        groups and tuple(groups),
    )


class Uploads:
    """The last uploads, in a folder, or in memory where it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unwritten: dict[str, Upload] = {}

    def add(
        self, file: str, content: bytes, columns: ColumnChoice
    ) -> tuple[str, Upload]:
        """Parse a file and keep its texts; return their name, which says nothing."""
        upload_format(file)
        label = printable(PureWindowsPath(file).name, None)
        # The rows of a file; a TextError says what is wrong with it.
        stream = io.BytesIO(content)
        # The reader goes by the suffix and opens nothing of that name.
        stream.name = label
        rows: list[texts.Row] = []
        for row in texts.rows(stream, **columns.model_dump()):
            if len(rows) == MAX_ROWS or len(row.text) > MOST_CHARACTERS:
                raise TextError(
                    f"{file[:80]!r} is too large",
                    f"line {row.line:,} is row {len(rows) + 1:,} and has"
                    f" {len(row.text):,} characters",
                    f"Upload at most {MAX_ROWS:,} rows of {MOST_CHARACTERS:,}"
                    " characters; Python takes more.",
                )
            for name, value in (("label", row.label), ("group", row.group)):
                if isinstance(value, list | dict):
                    raise TextError(
                        f"Cannot read {file[:80]!r}",
                        f"line {row.line:,} has a {name} with parts",
                        f"Give every text one word or number as its {name}.",
                    )
            rows.append(row)
        row_texts = [row.text for row in rows]
        labels = [row.label for row in rows]
        groups = [row.group for row in rows] if columns.group else None
        if any(label is not None for label in labels):
            data = texts.read((row_texts, labels), group=groups)
        else:
            data = texts.read(row_texts, group=groups)
        upload = Upload(replace(data, name=label), columns)
        digest = hashlib.sha256(upload.to_json().encode()).hexdigest()
        name = f"upload:{digest[:16]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(name)) as fresh:
                fresh.write_text(upload.to_json(), "utf-8")
            files = list(self.folder.glob("*.json"))
            files.sort(key=lambda path: path.stat().st_mtime_ns)
            for path in files[:-MAX_UPLOADS]:
                path.unlink(missing_ok=True)
        # The disk is full. The upload is in memory until the server stops.
        except OSError:
            self._unwritten[name] = upload
            for dropped in list(self._unwritten)[:-MAX_UPLOADS]:
                self._unwritten.pop(dropped, None)
        return name, upload

    def get(self, name: str) -> Upload | None:
        """Return an upload by its name, or None where it is not known any more."""
        if name in self._unwritten:
            return self._unwritten[name]
        path = self._path(name)
        try:
            return _read_upload(path, identity([path]))
        # The file is missing, or somebody has changed it.
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def names(self) -> list[str]:
        """Return the names of all uploads, those in memory first."""
        names = list(self._unwritten)
        for path in sorted(self.folder.glob("*.json")):
            name = f"upload:{path.stem}"
            if UPLOAD_NAME.fullmatch(name) and name not in names:
                names.append(name)
        return names

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.removeprefix('upload:')}.json"


@lru_cache(maxsize=MAX_UPLOADS)
def _read_upload(path: Path, file_identity: str) -> Upload:
    """Read an upload; its identity makes the cache forget a file that has changed."""
    return Upload.from_json(path.read_text("utf-8"))


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
    # What is not UTF-8 is refused when the whole file is read.
    beginning = content[:PREVIEW_BYTES].decode("utf-8-sig", "replace")
    rows = list(islice(_first_rows(suffix, beginning), FIRST_ROWS))
    columns = list(rows[0])[:MAX_COLUMNS] if rows else []
    cells = [
        [row.get(name, "")[:MAX_CELL_CHARACTERS] for name in columns] for row in rows
    ]
    # The columns that `hs.read` would take; groups are never guessed.
    roles = {}
    for role, names in (("text", TEXT_NAMES), ("label", LABEL_NAMES)):
        matches = [column for column in columns if column.lower() in names]
        if len(matches) == 1:
            roles[role] = matches[0]
    certain = "text" in roles
    # Otherwise the column with the longest cells is likely the texts, and a single
    # other one the labels.
    lengths = {}
    for place, name in enumerate(columns):
        if name != roles.get("label"):
            lengths[name] = sum(len(row[place]) for row in cells)
    if lengths and not certain:
        roles["text"] = max(lengths, key=lengths.__getitem__)
        others = [name for name in columns if name != roles["text"]]
        if len(others) == 1:
            roles["label"] = others[0]
    parameters = []
    for role, description in texts.COLUMNS.items():
        parameter = Parameter(
            role,
            "choice",
            description,
            required=role == "text",
            choices=tuple(columns),
        )
        parameters.append(form_field(parameter))
    return TableAnswer(
        file=Path(file).name,
        columns=columns,
        rows=cells,
        likely=ColumnChoice(**roles),
        certain=certain,
        parameters=parameters,
    )


def _first_rows(suffix: str, beginning: str) -> Iterator[dict[str, str]]:
    """Yield rows up to the first fault, which is reported when all is read."""
    if suffix == ".jsonl":
        for line in filter(str.strip, beginning.splitlines()):
            try:
                record = json.loads(line)
                row = {}
                for name, value in record.items():
                    cell = value if isinstance(value, str) else json.dumps(value)
                    row[encodable(name)] = "" if value is None else encodable(cell)
                yield row
            except (ValueError, AttributeError, RecursionError):
                return
    elif suffix != ".txt":
        delimiter = "\t" if suffix == ".tsv" else ","
        reader = csv.reader(io.StringIO(beginning), delimiter=delimiter)
        with suppress(csv.Error):
            header = next((cells for cells in reader if cells), [])
            for cells in filter(None, reader):
                yield dict(zip(header, cells, strict=False))
