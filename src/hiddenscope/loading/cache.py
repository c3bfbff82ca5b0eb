"""Folders in the user's cache that appear whole or not at all.

A folder is built under a temporary name beside its place and renamed when it is
complete. Two processes at once build two, and the second to finish takes the first
one's. What an exception or an interrupt leaves is removed on the way out; what a killed
process leaves is removed by the next one that builds.

A folder is kept with the SHA-256 of each of its files. They are read and compared when
their size, inode or times are not those of the last comparison. A bit that rots on the
disk changes none of these: `hiddenscope models --verify` reads everything.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from hiddenscope import progress
from hiddenscope.errors import Damaged, FileError
from hiddenscope.files import identity, replacing, temporary

MANIFEST = "hiddenscope.json"
PART = ".part"
_PARTS = re.compile(rf"\..*{re.escape(PART)}", re.DOTALL)


def cache_folder() -> Path:
    """Where converted models are kept: `HIDDENSCOPE_CACHE`, else the user's cache
    folder.

    >>> cache_folder().is_absolute()
    True
    """
    chosen = os.environ.get("HIDDENSCOPE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("hiddenscope"))


def is_complete(folder: Path) -> bool:
    """Whether a complete folder is there, with every file at its full length."""
    if not os.path.exists(folder):  # Path.exists() raises where a name is too long
        return False
    wrong = [
        name
        for name, size in _manifest(folder)["files"].items()
        if _size(folder / name) != size
    ]
    if wrong:
        raise _damaged(folder, f"{wrong[0]} has changed its length")
    return True


def verify(folder: Path, *, again: bool = False) -> None:
    """Raise Damaged unless every file of a folder in the cache holds the bytes that
    were put there.

    They are read if the files are not those that were last compared, or to compare them
    `again`. A folder outside the cache is the user's own to change.
    """
    if not is_cached(folder) or not is_complete(folder):
        return
    hashes = _manifest(folder).get("sha256")
    if hashes is None:  # it was put there by a version that kept none
        with suppress(OSError):
            _write_manifest(folder)
        return
    seen = identity(_files(folder))
    if not again and _last_verified(folder) == seen:
        return
    wrong = [
        name for name in _names(folder) if _sha256(folder / name) != hashes.get(name)
    ]
    if wrong:
        raise _damaged(
            folder, f"the bytes of {wrong[0]} are not those that were put there"
        )
    _note_verified(folder, seen)


def verify_all() -> int:
    """Read every file of every folder in the cache and compare it; how many folders
    there are, all of them sound.
    """
    folders = sorted(
        manifest.parent for manifest in cache_folder().glob(f"*/[!.]*/{MANIFEST}")
    )
    wrong: list[Damaged] = []
    with progress.track("Verifying", len(folders)) as advance:
        for folder in folders:
            try:
                verify(folder, again=True)
            except Damaged as error:
                wrong.append(error)
            advance(1)
    if wrong:
        others = (
            f", and {len(wrong) - 1} more folders are damaged too"
            if len(wrong) > 1
            else ""
        )
        raise Damaged(wrong[0].problem, f"{wrong[0].reason}{others}", wrong[0].remedy)
    return len(folders)


def is_cached(folder: Path) -> bool:
    """Whether a folder is one of those that `build_once` made."""
    return (
        folder.absolute().is_relative_to(cache_folder())
        and (folder / MANIFEST).is_file()
    )


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """The complete folder; if it is not there, the function given builds it first."""
    if is_complete(folder):
        return folder
    try:
        make_parent(folder)
        with working_folder(folder.parent, folder.name) as part:
            build(part)
            _write_manifest(part)
            _move(part, folder)
    except OSError as error:
        if isinstance(error, (FileError, ConnectionError)) or error.errno is None:
            raise
        raise _unwritable(folder, error) from error
    return folder


def make_parent(folder: Path) -> Path:
    """The folder that a folder of the cache lies in, made if it is not there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder.parent


def working_folder(parent: Path, name: str) -> AbstractContextManager[Path]:
    """A folder to work in, which is gone when the body ends; what killed processes left
    beside it is removed first.
    """
    return temporary(
        parent / f".{name}.{secrets.token_hex(4)}{PART}", _PARTS, folder=True
    )


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _files(folder: Path) -> list[Path]:
    """The files that a manifest lists: all but itself and hidden ones, which file
    managers leave.
    """
    return sorted(
        path
        for path in folder.rglob("[!.]*")
        if path.is_file() and path.name != MANIFEST
    )


def _names(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in _files(folder)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(
            (folder / MANIFEST).read_text(encoding="utf-8")
        )
        lists = [manifest["files"], manifest.get("sha256", {})]
        if not all(isinstance(entries, dict) for entries in lists):
            raise TypeError
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(
            folder, f"its {MANIFEST} cannot be read ({type(error).__name__})"
        ) from error
    return manifest


def _write_manifest(part: Path) -> None:
    for file in _files(part):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    sizes = {name: _size(part / name) for name in _names(part)}
    hashes = {name: _sha256(part / name) for name in sizes}
    # Not by `replacing`, which would wait for the lock on this folder that building it
    # holds.
    (part / MANIFEST).write_text(
        json.dumps({"files": sizes, "sha256": hashes}, indent=1), encoding="utf-8"
    )


def _record(folder: Path) -> Path:
    """Where it is noted which files of a folder were last compared; not in the folder,
    whose own times count.
    """
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:32]
    return cache_folder() / "verified" / f"{name}.txt"


def _last_verified(folder: Path) -> str:
    try:
        return _record(folder).read_text("utf-8")
    except (OSError, ValueError):
        return ""


def _note_verified(folder: Path, seen: str) -> None:
    if not is_cached(folder):
        return
    record = _record(folder)
    with suppress(OSError):  # without a note they are compared again
        record.parent.mkdir(parents=True, exist_ok=True)
        with replacing(record) as fresh:
            fresh.write_text(seen, "utf-8")


def _move(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:
        # A folder cannot be renamed onto another: another process finished first, and
        # its folder is as good.
        if not is_complete(folder):
            raise
    else:
        _note_verified(folder, identity(_files(folder)))


def _damaged(folder: Path, reason: str) -> Damaged:
    remedy = "Remove that folder; the model is then downloaded and converted again."
    return Damaged(f"Cannot use {folder}", reason, remedy)


def _unwritable(folder: Path, error: OSError) -> FileError:
    remedy = (
        "Make room there, or set HIDDENSCOPE_CACHE to a folder that can be written."
    )
    return FileError(f"Cannot write {str(folder)[:200]}", str(error)[:200], remedy)
