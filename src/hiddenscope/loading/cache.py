"""Cache folders that appear whole or not at all.

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
    """Return the folder of converted models.

    It is `HIDDENSCOPE_CACHE` if that is set, else the user's cache folder.

    >>> cache_folder().is_absolute()
    True
    """
    from_environment = os.environ.get("HIDDENSCOPE_CACHE")
    if from_environment:
        return Path(from_environment).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("hiddenscope"))


def is_complete(folder: Path) -> bool:
    """Tell whether the folder exists, and check that every file has its full length."""
    # Path.exists() raises where a name is too long; os.path.exists() returns False.
    if not os.path.exists(folder):
        return False
    for name, size in _manifest(folder)["files"].items():
        if _size(folder / name) != size:
            raise _damaged(folder, f"{name} has changed its length")
    return True


def verify_folder(folder: Path, *, again: bool = False) -> None:
    """Raise Damaged unless every file of a cached folder holds its original bytes.

    The bytes are read if the files are not those that were last compared, or if
    `again` is set. A folder outside the cache is the user's to change.
    """
    if not is_cached(folder) or not is_complete(folder):
        return
    hashes = _manifest(folder)["sha256"]
    files = identity(_files(folder))
    with suppress(OSError, ValueError):
        if not again and _record(folder).read_text("utf-8") == files:
            return
    for file in _files(folder):
        name = str(file.relative_to(folder))
        if _sha256(file) != hashes.get(name):
            reason = f"the bytes of {name} are not those that were put there"
            raise _damaged(folder, reason)
    _note_verified(folder, files)


def verify_all() -> int:
    """Compare every byte of every cached folder; return the number of folders."""
    manifests = cache_folder().glob(f"*/[!.]*/{MANIFEST}")
    folders = sorted(manifest.parent for manifest in manifests)
    wrong = []
    with progress.track("Verifying", len(folders)) as advance:
        for folder in folders:
            try:
                verify_folder(folder, again=True)
            except Damaged as error:
                wrong.append(error)
            advance(1)
    if wrong:
        first, reason = wrong[0], wrong[0].reason
        if len(wrong) > 1:
            reason += f", and {len(wrong) - 1} more folders are damaged too"
        raise Damaged(first.problem, reason, first.remedy)
    return len(folders)


def is_cached(folder: Path) -> bool:
    """Tell whether `build_once` built this folder."""
    inside = folder.absolute().is_relative_to(cache_folder())
    return inside and (folder / MANIFEST).is_file()


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return the complete folder, after building it if it is absent."""
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with working_folder(folder.parent, folder.name) as part:
            build(part)
            files = _files(part)
            for file in files:
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
            names = {str(file.relative_to(part)): file for file in files}
            content = {
                "files": {name: _size(file) for name, file in names.items()},
                "sha256": {name: _sha256(file) for name, file in names.items()},
            }
            # Not with `replacing`: it would wait for the lock that the builder of this
            # folder holds.
            (part / MANIFEST).write_text(json.dumps(content, indent=1), "utf-8")
            try:
                part.rename(folder)
            except OSError:
                # A folder cannot be renamed onto another. Another process finished
                # first, and its folder serves as well.
                if not is_complete(folder):
                    raise
            else:
                _note_verified(folder, identity(_files(folder)))
    except OSError as error:
        if isinstance(error, (FileError, ConnectionError)) or error.errno is None:
            raise
        problem = f"Cannot write {str(folder)[:200]}"
        remedy = (
            "Make room there, or set HIDDENSCOPE_CACHE to a folder that can be written."
        )
        raise FileError(problem, str(error)[:200], remedy) from error
    return folder


def working_folder(parent: Path, name: str) -> AbstractContextManager[Path]:
    """Open a folder to work in that is removed when the body ends.

    What killed processes left beside it is removed first.
    """
    return temporary(
        parent / f".{name}.{secrets.token_hex(4)}{PART}", _PARTS, folder=True
    )


def size_of(folder: Path) -> int:
    """Return the size of all files in a folder, which may vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            total += max(0, _size(Path(root) / name))
    return total


def _files(folder: Path) -> list[Path]:
    """Return the files that a manifest lists: all but itself and hidden ones."""
    # File managers leave hidden files, such as .DS_Store.
    files = [path for path in folder.rglob("[!.]*") if path.is_file()]
    return sorted(path for path in files if path.name != MANIFEST)


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
        lists = [manifest["files"], manifest["sha256"]]
        if not all(isinstance(entries, dict) for entries in lists):
            raise TypeError
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(
            folder, f"its {MANIFEST} cannot be read ({type(error).__name__})"
        ) from error
    return manifest


def _record(folder: Path) -> Path:
    """Return the file that remembers which files of a folder were last compared."""
    # It lies outside the folder, because writing there would change the folder's times.
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:32]
    return cache_folder() / "verified" / f"{name}.txt"


def _note_verified(folder: Path, files: str) -> None:
    if not is_cached(folder):
        return
    record = _record(folder)
    # Without a record the files are compared again, which does no harm.
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with replacing(record) as fresh:
            fresh.write_text(files, "utf-8")


def _damaged(folder: Path, reason: str) -> Damaged:
    remedy = "Remove that folder; the model is then downloaded and converted again."
    return Damaged(f"Cannot use {folder}", reason, remedy)
