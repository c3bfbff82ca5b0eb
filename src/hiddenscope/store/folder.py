"""StoreFolder: the files of a store, the locks on them, and the steps by which a file
comes to be there.

    plan.json                    what the store is to hold
    plan/<unit>.jsonl            the texts of a unit
    plan/duplicates.jsonl        texts that are copies of others
    plan/strings.jsonl           how token ids read
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
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from hiddenscope.errors import Damaged, FileError, StoreError
from hiddenscope.files import to_disk
from hiddenscope.store import records

PLAN = "plan.json"
COMPLETE = "complete.json"
FOLDERS = ("plan", "data", "commits", "tmp")
SMALL = 2**20  # bytes that a commit record may have
LARGE = 2**31  # bytes that a plan, or the texts of a unit, may have

_UNIT = re.compile(r"[0-9]{6,12}")
_RECORD = re.compile(r"([0-9]{6,12})\.json")
_DATA = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"[0-9a-f]{16}\.tmp")
_READ = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


class StoreFolder:
    """The folder of a store."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.shown = shown(self.path)

    def __repr__(self) -> str:
        return f"StoreFolder({self.shown})"

    @property
    def plan(self) -> Path:
        """Where the plan is."""
        return self.path / PLAN

    @property
    def complete(self) -> Path:
        """Where the record of all records is."""
        return self.path / COMPLETE

    def texts(self, name: str) -> Path:
        """Where the texts of a unit are, or "duplicates" or "strings"."""
        assert _UNIT.fullmatch(name) or name in ("duplicates", "strings"), name
        return self.path / "plan" / f"{name}.jsonl"

    def record(self, unit: str) -> Path:
        """Where the record of a unit is, when it is committed."""
        assert _UNIT.fullmatch(unit), unit
        return self.path / "commits" / f"{unit}.json"

    def data(self, digest: str) -> Path:
        """Where the states with this hash are."""
        assert records.is_digest(digest), digest
        return self.path / "data" / f"{digest}.safetensors"

    def recorded(self) -> set[str]:
        """The units that have a record."""
        return set(self._names("commits", _RECORD))

    def stored(self) -> set[str]:
        """The hashes of the files of states."""
        return set(self._names("data", _DATA))

    def temporaries(self) -> list[Path]:
        """What lies in tmp/ under a name of ours."""
        return [self.path / "tmp" / name for name in self._names("tmp", _TEMPORARY)]

    def _names(self, folder: str, pattern: re.Pattern[str]) -> list[str]:
        try:
            found = [pattern.fullmatch(name) for name in os.listdir(self.path / folder)]
        except OSError as error:
            raise self._unreadable(folder, error) from error
        return sorted(
            match[1] if pattern.groups else match[0] for match in found if match
        )

    def check(self) -> None:
        """Refuse what is not a store, and folders inside a store that are links."""
        problem = f"Cannot open {self.shown} as a store"
        # Unlike Path's, this one never raises, however long the name is.
        if not os.path.isdir(self.path):
            reason = (
                "it is not a folder"
                if os.path.lexists(self.path)
                else "there is no such folder"
            )
            raise StoreError(problem, reason, "Give the folder that hs.extract wrote.")
        if not os.path.lexists(self.plan):
            if (self.path / "commits").is_dir():
                raise StoreError(
                    problem, "it has no plan.json, but it has units", records.AGAIN
                )
            raise StoreError(
                problem, "it has no plan.json", "Give the folder that hs.extract wrote."
            )
        for name in FOLDERS:
            self._check_folder(name, problem)

    def _check_folder(self, name: str, problem: str) -> None:
        try:
            mode = os.lstat(self.path / name).st_mode
        except OSError as error:
            if name == "tmp":  # a copy of a store need not have it
                return
            raise Damaged(
                problem, f"its folder {name}/ is missing", records.AGAIN
            ) from error
        if not stat.S_ISDIR(mode):
            what = "a link" if stat.S_ISLNK(mode) else "no folder"
            reason = f"{name} is {what}, and nothing in a store may lead elsewhere"
            raise StoreError(
                problem, reason, "Copy the files themselves into the folder."
            )

    def opened(self, path: Path) -> int:
        """A descriptor of a plain file of the store; it is never reached through a
        link.
        """
        try:
            descriptor = os.open(path, _READ)
        except OSError as error:
            name = path.relative_to(self.path)
            if error.errno in (errno.ELOOP, errno.EMLINK):
                reason = f"{name} is a link, and nothing in a store may lead elsewhere"
                raise StoreError(
                    f"Cannot read {self.shown}",
                    reason,
                    "Put the file itself in its place.",
                ) from error
            raise self._unreadable(name, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._unreadable(
                path.relative_to(self.path),
                OSError(errno.EINVAL, "it is not a regular file"),
            )
        return descriptor

    def read(self, path: Path, most: int = LARGE) -> bytes:
        """All bytes of a small file of the store."""
        descriptor = self.opened(path)
        try:
            size = os.fstat(descriptor).st_size
            if size > most:
                reason = (
                    f"{path.relative_to(self.path)} has {size:,} bytes, more than any"
                    " such file"
                )
                raise Damaged(f"Cannot read {self.shown}", reason, records.VERIFY)
            with os.fdopen(os.dup(descriptor), "rb") as file:
                return file.read(most + 1)
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise self._unreadable(path.relative_to(self.path), error) from error
        finally:
            os.close(descriptor)

    def _unreadable(self, name: object, error: OSError) -> FileError:
        problem = f"Cannot read {self.shown}"
        if isinstance(error, FileNotFoundError):
            return Damaged(problem, f"{name} is missing", records.VERIFY)
        return FileError(problem, f"{name}: {error.strerror or error}", records.VERIFY)

    def make(self) -> None:
        """Make the folders of a store, where they are not.

        Another job may hold the lock, because it is putting a new plan/ in the place of
        the one that is there.
        """
        made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)
                self._check_folder(name, f"Cannot write {self.shown}")
        to_disk(self.path)
        if made:
            to_disk(self.path.parent)

    @contextmanager
    def writing(self, *, folder: bool = False) -> Iterator[Path]:
        """A temporary file or folder, locked while the body runs, and removed at its
        end if it is still there.
        """
        descriptor, path = _held(self.path / "tmp", folder=folder)
        try:
            yield path
        finally:
            try:
                with suppress(OSError):
                    _remove(path)
            finally:
                os.close(descriptor)

    def publish(self, path: Path, content: bytes) -> bool:
        """Write a record whole, only if there is none under this name: False if there
        is one.
        """
        with self.writing() as fresh:
            with fresh.open("r+b") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(fresh, path, follow_symlinks=False)
                first = True
            except FileExistsError:
                first = False
            # Also where another was first: what it wrote must last before anybody
            # builds on it.
            to_disk(path.parent)
            return first

    @contextmanager
    def locked(
        self, name: str = ".", *, shared: bool = False, wait: bool = True
    ) -> Iterator[bool]:
        """Hold the lock of a folder of the store; False where it cannot be had without
        waiting.
        """
        descriptor = os.open(
            self.path / name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        )
        try:
            kind = (_locks().LOCK_SH if shared else _locks().LOCK_EX) | (
                0 if wait else _locks().LOCK_NB
            )
            try:
                _locks().flock(descriptor, kind)
                held = True
            except BlockingIOError:
                held = False
            yield held
        finally:
            os.close(descriptor)

    def remove_leftovers(self) -> list[str]:
        """Remove what killed processes left in tmp/; what a process holds stays."""
        return [path.name for path in self.temporaries() if remove_unheld(path)]


def shown(path: os.PathLike[str]) -> str:
    """A path that is safe on a terminal."""
    text = os.fspath(path)[:200]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _locks() -> ModuleType:
    """The module of locks; Windows has none, so that stores can be read there and not
    written.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOTSUP, "this system has no locks on files") from error
    return fcntl


def _held(parent: Path, *, folder: bool) -> tuple[int, Path]:
    """A fresh file or folder with a lock on it.

    Between the making and the locking another process may take it for a leftover: then
    it is gone, or locked, and another one is made.
    """
    while True:
        path = parent / f"{secrets.token_hex(8)}.tmp"
        if folder:
            path.mkdir()
        else:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if _lock_at_once(descriptor) and _same(descriptor, path):
            return descriptor, path
        os.close(descriptor)


def remove_unheld(path: Path) -> bool:
    """Remove a temporary file or folder, unless a process holds it; whether it was
    removed.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return False
    try:
        free = _lock_at_once(descriptor) and _same(descriptor, path)
        if free:
            _remove(path)
        return free
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _lock_at_once(descriptor: int) -> bool:
    try:
        _locks().flock(descriptor, _locks().LOCK_EX | _locks().LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(descriptor: int, path: Path) -> bool:
    """Whether the name still means the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
