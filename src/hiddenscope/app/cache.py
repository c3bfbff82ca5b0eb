"""Results once computed, on disk: each under the hash of what was asked, whole or not
at all, the oldest dropped first.

A key is the SHA-256 of the canonical JSON of the question, the identity of its models
and the version. An entry that is damaged counts as missing. Where the disk is full or
cannot be written, the last results are kept in memory alone.

>>> key_of({"analysis": "lens"}, ["a"]) == key_of({"analysis": "lens"}, ["a"]) != key_of({"analysis": "lens"}, ["b"])
True
"""

import hashlib
import io
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiddenscope as hs
from hiddenscope.app.frames import Header, frame, read_frame
from hiddenscope.errors import Error
from hiddenscope.files import replacing

KEY = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".result"
MEMORY_BYTES = 64 * 2**20
FORMAT = "hiddenscope.app/1"


def key_of(request: Any, identities: Sequence[str]) -> str:
    """The key of a question asked of models with these identities."""
    asked = [FORMAT, hs.__version__, request, list(identities)]
    return hashlib.sha256(
        json.dumps(asked, sort_keys=True, separators=(",", ":")).encode("utf-8")
    ).hexdigest()


@dataclass(frozen=True)
class StoredResult:
    """A result as it is kept: what the page reads of it, its views' payload, and its
    data as a .json or .nc file.
    """

    header: Header
    payload: bytes
    data: bytes

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        return len(self.payload) + len(self.data) + 10_000

    @property
    def suffix(self) -> str:
        """The format of its data."""
        return ".json" if self.data.startswith(b"{") else ".nc"

    def packed(self) -> bytes:
        """Its bytes, which end with their checksum."""
        content = frame(
            {**self.header, "payload_bytes": len(self.payload)},
            self.payload + self.data,
        )
        return content + hashlib.sha256(content).digest()

    @classmethod
    def unpacked(cls, path: Path) -> "StoredResult | None":
        """What a file holds; None where it is missing or damaged."""
        try:
            content = path.read_bytes()
            if hashlib.sha256(content[:-32]).digest() != content[-32:]:
                return None
            read = read_frame(io.BytesIO(content[:-32]))
        except (OSError, ValueError):
            return None
        if read is None:
            return None
        header, body = read
        middle = header.pop("payload_bytes")
        return cls(header, body[:middle], body[middle:])


class ResultCache:
    """Results by key, in a folder of at most so many bytes, with the last ones in
    memory too.

    `shipped` is a folder of results that came with the package; they are read and never
    written.
    """

    def __init__(
        self, folder: Path, most_bytes: int, shipped: Path | None = None
    ) -> None:
        self.folder, self.most_bytes, self.shipped = folder, most_bytes, shipped
        self._memory: OrderedDict[str, StoredResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> StoredResult | None:
        """The result of a key; None where there is none."""
        if not KEY.fullmatch(key):
            return None
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
        found = StoredResult.unpacked(self._path(key))
        if found is None and self.shipped is not None:
            found = StoredResult.unpacked(self.shipped / f"{key}{SUFFIX}")
        elif found is not None:
            with suppress(OSError):
                os.utime(self._path(key))  # it was used last now
        if found is not None:
            self._remember(key, found)
        return found

    def put(self, key: str, result: StoredResult) -> str:
        """Keep a result; a sentence where it could only be kept in memory, else
        nothing.
        """
        self._remember(key, result)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Somebody waits for the answer, and an entry that a power cut damages
            # counts as missing.
            with replacing(self._path(key), durable=False) as fresh:
                fresh.write_bytes(result.packed())
            self._drop_oldest(keep=self._path(key))
        except (OSError, Error) as error:
            reason = (
                getattr(error, "reason", None)
                or getattr(error, "strerror", None)
                or str(error)
            )
            return (
                f"The result could not be kept on disk ({reason}); it is gone when the"
                " server stops."
            )
        return ""

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _remember(self, key: str, result: StoredResult) -> None:
        with self._lock:
            self._memory[key] = result
            self._memory.move_to_end(key)
            while (
                len(self._memory) > 1
                and sum(one.size for one in self._memory.values()) > MEMORY_BYTES
            ):
                self._memory.popitem(last=False)

    def _drop_oldest(self, keep: Path) -> None:
        entries = [(path, path.stat()) for path in self.folder.glob(f"*{SUFFIX}")]
        total = sum(stat.st_size for _, stat in entries)
        for path, stat in sorted(entries, key=lambda entry: entry[1].st_mtime_ns):
            if total <= self.most_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= stat.st_size
