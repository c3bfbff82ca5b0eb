"""The folder of a store: its files, its locks, and how a file comes to be there.

    plan.json                    what the store will hold
    plan/<unit>.jsonl            the texts of a unit
    plan/duplicates.jsonl        texts that are copies of others
    plan/strings.jsonl           the strings of token ids
    data/<sha256>.safetensors    the states of a unit
    commits/<unit>.json          the record of a unit, which makes it visible
    complete.json                the record of all records
    tmp/                         files that are being written, each held by a lock

No file of a store is opened through a link, and no name comes from a record unless it
is a number or a hash. Files are never changed: each is written under a temporary name,
brought to the disk, and given its name in one step. Locks are those of `flock`, which
end with the process that holds them, so that what a killed process left can be told
from what a process at work, or one that was stopped, still needs.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hiddenscope.errors import Damaged, FileError, StoreError
from hiddenscope.files import (
    PathLike,
    locked,
    printable,
    remove_leftovers,
    temporary,
    to_disk,
)

FOLDERS = ("plan", "data", "commits", "tmp")
VERIFY = "Run `hiddenscope store verify`."
AGAIN = "Run the `hiddenscope extract` that made it again: what is lost is made anew."
# Bytes that a plan, or the texts of a unit, may have.
LARGEST_FILE = 2**31

_UNIT = re.compile(r"[0-9]{6,12}")
_RECORD = re.compile(r"([0-9]{6,12})\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DATA = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"[0-9a-f]{16}\.tmp")
# A link is not followed, a pipe does not block, a child process inherits nothing.
_READ = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


class StoreFolder:
    """The folder of a store."""

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.shown = printable(self.path)
        self.plan = self.path / "plan.json"
        self.complete = self.path / "complete.json"

    def texts(self, name: str) -> Path:
        """Return the path of a unit's texts, or of "duplicates" or "strings"."""
        assert _UNIT.fullmatch(name) or name in ("duplicates", "strings"), name
        return self.path / "plan" / f"{name}.jsonl"

    def record(self, unit: str) -> Path:
        """Return the path of the record of a unit, which makes it committed."""
        assert _UNIT.fullmatch(unit), unit
        return self.path / "commits" / f"{unit}.json"

    def data(self, digest: str) -> Path:
        """Return the path of the states with this hash."""
        assert is_digest(digest), digest
        return self.path / "data" / f"{digest}.safetensors"

    def recorded(self) -> set[str]:
        """Return the units that have a record."""
        return self._names("commits", _RECORD)

    def stored(self) -> set[str]:
        """Return the hashes of the files of states."""
        return self._names("data", _DATA)

    def _names(self, folder: str, pattern: re.Pattern[str]) -> set[str]:
        """List the files of a folder that match, by the group of the pattern."""
        try:
            listed = os.listdir(self.path / folder)
        except OSError as error:
            raise self._unreadable(folder, error) from error
        matches = map(pattern.fullmatch, listed)
        return {match[1] for match in matches if match}

    def check(self) -> None:
        """Refuse what is not a store, and folders inside a store that are links."""
        problem = f"Cannot open {self.shown} as a store"
        remedy = "Give the folder that hs.extract wrote."
        # Unlike Path's, this one never raises, however long the name is.
        if not os.path.isdir(self.path):
            reason = "there is no such folder"
            if os.path.lexists(self.path):
                reason = "it is not a folder"
            raise StoreError(problem, reason, remedy)
        if not os.path.lexists(self.plan):
            if (self.path / "commits").is_dir():
                reason = "it has no plan.json, but it has units"
                raise StoreError(problem, reason, AGAIN)
            raise StoreError(problem, "it has no plan.json", remedy)
        for name in FOLDERS:
            self._check_folder(name, problem)

    def _check_folder(self, name: str, problem: str) -> None:
        try:
            mode = os.lstat(self.path / name).st_mode
        except OSError as error:
            # A copy of a store need not have it.
            if name == "tmp":
                return
            reason = f"its folder {name}/ is missing"
            raise Damaged(problem, reason, AGAIN) from error
        if not stat.S_ISDIR(mode):
            what = "a link" if stat.S_ISLNK(mode) else "not a folder"
            raise StoreError(
                problem,
                f"{name} is {what}, and nothing in a store may lead elsewhere",
                "Copy the files themselves into the folder.",
            )

    def opened(self, path: Path) -> int:
        """Open a plain file of the store, never through a link; return a descriptor."""
        name = path.relative_to(self.path)
        try:
            descriptor = os.open(path, _READ)
        except OSError as error:
            # What O_NOFOLLOW says of a link, on Linux and on FreeBSD.
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise StoreError(
                    f"Cannot read {self.shown}",
                    f"{name} is a link, and nothing in a store may lead elsewhere",
                    "Put the file itself in its place.",
                ) from error
            raise self._unreadable(name, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            irregular = OSError(errno.EINVAL, "it is not a regular file")
            raise self._unreadable(name, irregular)
        return descriptor

    def read(self, path: Path) -> bytes:
        """Read all bytes of a small file of the store."""
        name = path.relative_to(self.path)
        with os.fdopen(self.opened(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise self.damaged(f"{name} has {size:,} bytes, more than such a file")
            try:
                return file.read()
            except OSError as error:
                raise self._unreadable(name, error) from error

    def damaged(self, reason: str) -> Damaged:
        """Return the error of a store that is not as it was written."""
        return Damaged(f"Cannot read {self.shown}", reason, VERIFY)

    def _unreadable(self, name: object, error: OSError) -> FileError:
        if isinstance(error, FileNotFoundError):
            return self.damaged(f"{name} is missing")
        reason = f"{name}: {error.strerror or error}"
        return FileError(f"Cannot read {self.shown}", reason, VERIFY)

    def make(self) -> None:
        """Make the folders of a store that are missing."""
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        # Another job may be replacing plan/, which is missing meanwhile.
        with self.locked():
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)
                self._check_folder(name, f"Cannot write {self.shown}")
        to_disk(self.path)
        if is_new:
            to_disk(self.path.parent)

    def writing(self, *, folder: bool = False) -> AbstractContextManager[Path]:
        """Make a temporary file or folder, locked while the body runs.

        It is removed in the end unless it was moved, and what killed processes left in
        tmp/ is removed first.
        """
        path = self.path / "tmp" / f"{secrets.token_hex(8)}.tmp"
        return temporary(path, _TEMPORARY, folder=folder)

    def remove_leftovers(self) -> dict[str, int]:
        """Remove what killed processes left in tmp/; return the size of each."""
        return remove_leftovers(self.path / "tmp", _TEMPORARY)

    def publish(self, path: Path, content: bytes) -> bool:
        """Write a record whole; return False if there is one of this name already."""
        with self.writing() as fresh:
            fresh.write_bytes(content)
            to_disk(fresh)
            try:
                # Unlike a rename, a link never replaces an existing file.
                os.link(fresh, path, follow_symlinks=False)
                first = True
            except FileExistsError:
                first = False
            # Also if another was first: its record must be on disk before anybody
            # builds on it.
            to_disk(path.parent)
            return first

    @contextmanager
    def locked(
        self, name: str = ".", *, shared: bool = False, wait: bool = True
    ) -> Iterator[bool]:
        """Hold the lock of a folder; yield False if that would mean to wait."""
        # The store itself may be reached through a link.
        path = (self.path / name).resolve()
        with locked(path, wait=wait, shared=shared) as is_held:
            if wait and not is_held:
                # Stores can be read on Windows, but not written.
                raise OSError(errno.ENOTSUP, "this system has no locks on files")
            yield is_held


def is_digest(value: object) -> bool:
    """Tell whether a field is 64 hex digits, and so may be part of a file's name."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
