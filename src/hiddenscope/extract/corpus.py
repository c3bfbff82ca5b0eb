"""Corpus: the texts of a job, read one after another and never all in memory, each
identified by its content.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from hiddenscope.arguments import checked
from hiddenscope.errors import TextError
from hiddenscope.texts import rows

LISTED = 1000  # skipped lines that are named in the plan; all are counted
_KEY = 16  # bytes of SHA-256 by which texts are told apart


@checked
@dataclass(frozen=True)
class Corpus:
    """The texts of a job, and how they are read.

    `source` is whatever `hs.read` takes. `text` names the column. A text of more tokens
    than `window` (the model's own, if not given) is cut into windows, each beginning
    `stride` tokens after the one before. With `skip_bad` a broken line is left out, and
    counted. With `every` only the states of the tokens at positions 0, n, 2n and so on
    of a text are kept; all are computed.

    >>> [text for text in Corpus(["a cat", "a dog"]).read()]
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
            if isinstance(value, int) and value < 1:
                raise TextError(
                    f"{name} must be at least 1, got {value}",
                    "a text has at least one token",
                    "Give a larger number.",
                )

    def read(self, skipped: "list[str] | Skips | None" = None) -> Iterator[str]:
        """The texts one after another; the lines that were left out are named in
        `skipped`.
        """
        named: Any = [] if skipped is None else skipped
        sink = (
            (lambda error: named.append(f"{error.problem}: {error.reason}"))
            if self.skip_bad
            else None
        )
        for row in rows(self.source, text=self.text, skipped=sink):
            yield row.text


class Skips:
    """The lines that were left out: their number, and the names of the first."""

    def __init__(self) -> None:
        self.count = 0
        self.named: list[str] = []

    def append(self, name: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.named) < LISTED:
            self.named.append(name)


@dataclass
class Identity:
    """What tells one sequence of texts from another: a hash over all of them in order,
    and their number.

    >>> one, other = Identity(), Identity()
    >>> one.add("ab"), one.add("c"), other.add("a"), other.add("bc")
    (None, None, None, None)
    >>> one.digest == other.digest, one.count
    (False, 2)
    """

    count: int = 0
    _hash: Any = field(default_factory=hashlib.sha256, repr=False)

    def add(self, text: str) -> None:
        """Take one more text in."""
        content = text.encode("utf-8")
        self._hash.update(len(content).to_bytes(8, "little"))
        self._hash.update(content)
        self.count += 1

    @property
    def digest(self) -> str:
        """The hash, in hex digits."""
        return str(self._hash.hexdigest())


class SeenTexts:
    """An index on disk of the texts that have been seen, by the hash of each.

    >>> with SeenTexts() as seen:
    ...     [seen.first("a", 0), seen.first("b", 1), seen.first("a", 2)], list(seen.duplicates())
    ([0, 1, 0], [(2, 0)])
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        # What cannot be removed where descriptors have run out is left, so that the
        # error which matters is raised.
        self._folder = TemporaryDirectory(
            prefix="hiddenscope-", dir=folder, ignore_cleanup_errors=True
        )
        self.new = 0
        self._index = sqlite3.connect(
            Path(self._folder.name, "texts.sqlite"), isolation_level=None
        )
        # It is made anew for every job, so nothing of it needs to survive a crash.
        for line in ("journal_mode=OFF", "synchronous=OFF"):
            self._index.execute(f"PRAGMA {line}")
        self._index.execute(
            "CREATE TABLE seen (key BLOB PRIMARY KEY, text INTEGER) WITHOUT ROWID"
        )
        self._index.execute(
            "CREATE TABLE duplicate (text INTEGER PRIMARY KEY, same_as INTEGER)"
        )
        self._index.execute("BEGIN")  # one transaction for all: none is ever undone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._index.close()
        self._folder.cleanup()

    def first(self, text: str, number: int) -> int:
        """The number of the first text that equals this one: its own if it is new."""
        key = hashlib.sha256(text.encode("utf-8")).digest()[:_KEY]
        if self._index.execute(
            "INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, number)
        ).rowcount:
            self.new += 1
            return number
        (same_as,) = self._index.execute(
            "SELECT text FROM seen WHERE key = ?", (key,)
        ).fetchone()
        self._index.execute("INSERT INTO duplicate VALUES (?, ?)", (number, same_as))
        return int(same_as)

    def duplicates(self) -> Iterable[tuple[int, int]]:
        """Every text that was there before, with the first that it equals."""
        with closing(
            self._index.execute("SELECT text, same_as FROM duplicate ORDER BY text")
        ) as found:
            yield from found
