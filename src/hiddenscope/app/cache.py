"""Cache: results on disk, each under the hash of its question.

A key is the SHA-256 of the canonical JSON of the question, the identity of its models
and the version. An entry is written as a whole or not at all, and one that is damaged
counts as missing. The entries that were not used for longest are dropped first. Where
the disk is full or cannot be written, the last results are held in memory alone.

>>> key_of({"analysis": "lens"}, ["a"]) == key_of({"analysis": "lens"}, ["a"])
True
>>> key_of({"analysis": "lens"}, ["a"]) == key_of({"analysis": "lens"}, ["b"])
False
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
from typing import Self

import hiddenscope as hs
from hiddenscope.errors import Error
from hiddenscope.files import replacing
from hiddenscope.workers import Frame, Header, pack_frame, read_frame

KEY = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".result"
MEMORY_BYTES = 64 * 2**20
# Added to the size of each result in memory, for its header.
HEADER_BYTES = 10_000
CHECKSUM_BYTES = 32
FORMAT = "hiddenscope.app/1"


def key_of(request: object, identities: Sequence[str]) -> str:
    """Return the key of a question that is asked of models with these identities."""
    content = [FORMAT, hs.__version__, request, list(identities)]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class StoredResult:
    """A result: what the page reads of it, the payload of its views, and its data as a
    .json or .nc file.
    """

    header: Header
    payload: bytes = b""
    data: bytes = b""

    @classmethod
    def split(cls, header: Header, body: bytes) -> Self:
        """Split the body of a frame; the header says where the payload ends."""
        rest = dict(header)
        payload_bytes = rest.pop("payload_bytes")
        return cls(rest, body[:payload_bytes], body[payload_bytes:])

    @property
    def size(self) -> int:
        """Return about how many bytes of memory the result takes."""
        return len(self.payload) + len(self.data) + HEADER_BYTES

    @property
    def suffix(self) -> str:
        """Return the suffix of the data's format."""
        return ".json" if self.data.startswith(b"{") else ".nc"

    def joined(self) -> Frame:
        """Return the header and the body of a frame, which `split` takes apart."""
        header = {**self.header, "payload_bytes": len(self.payload)}
        return Frame(header, self.payload + self.data)

    def to_bytes(self) -> bytes:
        """Return the content of a file, which ends with its checksum."""
        content = pack_frame(*self.joined())
        return content + hashlib.sha256(content).digest()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a file; return None where it is missing or damaged."""
        try:
            stored = path.read_bytes()
            content = stored[:-CHECKSUM_BYTES]
            if hashlib.sha256(content).digest() != stored[-CHECKSUM_BYTES:]:
                return None
            frame = read_frame(io.BytesIO(content))
        except (OSError, ValueError):
            return None
        return None if frame is None else cls.split(*frame)


class ResultCache:
    """Results by key, in a folder of bounded size, the last ones in memory too.

    `shipped` is a folder of results that come with the package. It is never written.
    """

    def __init__(
        self, folder: Path, max_bytes: int, shipped: Path | None = None
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.shipped = shipped
        self._memory: OrderedDict[str, StoredResult] = OrderedDict()
        # Requests are answered in threads.
        self._lock = threading.Lock()

    def get(self, key: str) -> StoredResult | None:
        """Return the result of a key, or None."""
        if not KEY.fullmatch(key):
            return None
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
        path = self._path(key)
        result = StoredResult.read(path)
        if result is not None:
            # The oldest entry is the one that was not used for longest.
            with suppress(OSError):
                os.utime(path)
        elif self.shipped is not None:
            result = StoredResult.read(self.shipped / path.name)
        if result is not None:
            self._remember(key, result)
        return result

    def put(self, key: str, result: StoredResult) -> str:
        """Keep a result; return a warning where it could only be held in memory."""
        self._remember(key, result)
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Waiting for the disk would delay the answer, and an entry that a power cut
            # damages counts as missing.
            with replacing(path, durable=False) as fresh:
                fresh.write_bytes(result.to_bytes())
            entries = [(file, file.stat()) for file in self.folder.glob(f"*{SUFFIX}")]
            entries.sort(key=lambda entry: entry[1].st_mtime_ns)
            total = sum(stat.st_size for _, stat in entries)
            for file, stat in entries:
                if total > self.max_bytes and file != path:
                    file.unlink(missing_ok=True)
                    total -= stat.st_size
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
            total = sum(stored.size for stored in self._memory.values())
            while len(self._memory) > 1 and total > MEMORY_BYTES:
                _, dropped = self._memory.popitem(last=False)
                total -= dropped.size
