"""Corpus: the texts of a job, read one after another and never all in memory."""

import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

from hiddenscope.arguments import checked, integer
from hiddenscope.errors import Error
from hiddenscope.texts import rows

# Skipped lines that are named in the plan. All are counted.
MAX_NAMED = 100
# Bytes of SHA-256 by which texts are told apart.
KEY_BYTES = 16


@checked
@dataclass(frozen=True)
class Corpus:
    """The texts of a job, and how they are read.

    `source` is whatever `hs.read` takes. `text` names the column. A text of more tokens
    than `window` (by default the model's) is cut into windows, each beginning `stride`
    tokens after the one before. With `skip_bad` a broken line is left out, and counted.
    With `every=n` only the states of the tokens at positions 0, n, 2n and so on of a
    text are kept. All are computed.

    >>> list(Corpus(["a cat", "a dog"]).read())
    ['a cat', 'a dog']
    """

    source: Any
    text: str | None = None
    window: int | None = None
    stride: int | None = None
    skip_bad: bool = False
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "stride", "every"):
            value = getattr(self, name)
            if value is not None:
                integer(value, name, 1)

    def read(
        self, skipped: Callable[[Error], None] = lambda error: None
    ) -> Iterator[str]:
        """Yield the texts; `skipped` gets what is wrong with each line left out."""
        on_skip = skipped if self.skip_bad else None
        for row in rows(self.source, text=self.text, skipped=on_skip):
            yield row.text


class Skips:
    """The lines that were left out: their number, and what is wrong with the first."""

    def __init__(self) -> None:
        self.count = 0
        self.named: list[str] = []

    def add(self, error: Error) -> None:
        """Count one more."""
        self.count += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(f"{error.problem}: {error.reason}")


class SeenTexts:
    """An index on disk of the texts that have been read, by the hash of each.

    >>> with SeenTexts() as index:
    ...     [index.first("a", 0), index.first("b", 1), index.first("a", 2)]
    ...     list(index.duplicates())
    [0, 1, 0]
    [(2, 0)]
    """

    def __init__(self) -> None:
        self.new = 0
        # Without a name it is a temporary file, which sqlite removes.
        self._index = sqlite3.connect("", isolation_level=None)
        # Every job has its own index, so nothing of it needs to survive a crash.
        self._index.execute("PRAGMA journal_mode=OFF")
        self._index.execute("PRAGMA synchronous=OFF")
        self._index.execute(
            "CREATE TABLE seen (key BLOB PRIMARY KEY, text INTEGER) WITHOUT ROWID"
        )
        self._index.execute(
            "CREATE TABLE duplicate (text INTEGER PRIMARY KEY, same_as INTEGER)"
        )
        # One transaction for all of it, since none is ever undone.
        self._index.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._index.close()

    def first(self, text: str, number: int) -> int:
        """Return the number of the first text that equals this one, or `number`."""
        key = hashlib.sha256(text.encode("utf-8")).digest()[:KEY_BYTES]
        insert = "INSERT OR IGNORE INTO seen VALUES (?, ?)"
        inserted = self._index.execute(insert, (key, number)).rowcount
        if inserted:
            self.new += 1
            return number
        select = "SELECT text FROM seen WHERE key = ?"
        (same_as,) = self._index.execute(select, (key,)).fetchone()
        self._index.execute("INSERT INTO duplicate VALUES (?, ?)", (number, same_as))
        return int(same_as)

    def duplicates(self) -> Iterable[tuple[int, int]]:
        """Yield every copy, with the number of the first text that it equals."""
        select = "SELECT text, same_as FROM duplicate ORDER BY text"
        with closing(self._index.execute(select)) as pairs:
            yield from pairs
