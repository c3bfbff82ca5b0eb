"""Folders in the user's cache that appear whole or not at all.

A folder is built under a temporary name beside its place and renamed when it is finished. Two processes at once build
two, and the second to finish takes the first one's. What an exception or an interrupt leaves is removed on the way out;
what a kill leaves is removed a day later.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hiddenscope.errors import Damaged, FileError

MANIFEST = "hiddenscope.json"
PART = ".part"
_A_DAY = 24 * 3600.0


def cache_folder() -> Path:
    """Where converted models are kept: `HIDDENSCOPE_CACHE`, else the user's cache folder.

    >>> cache_folder().is_absolute()
    True
    """
    chosen = os.environ.get("HIDDENSCOPE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("hiddenscope"))


def finished(place: Path) -> bool:
    """Whether a finished folder is there, with every file at its full length."""
    if not place.exists():
        return False
    try:
        files: dict[str, int] = json.loads((place / MANIFEST).read_text(encoding="utf-8"))["files"]
        wrong = [name for name, size in files.items() if (place / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(place, f"its {MANIFEST} cannot be believed ({type(error).__name__})") from error
    if wrong:
        raise _damaged(place, f"{wrong[0]} is not as long as it was")
    return True


def settle(place: Path, build: Callable[[Path], None]) -> Path:
    """The finished folder at this place; it is built first, by the function given, if it is not there."""
    if finished(place):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _sweep(place.parent)
        part = place.parent / f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}{PART}"
        part.mkdir()
    except OSError as error:
        raise _unwritable(place, error) from error
    try:
        build(part)
        _seal(part)
        _move(part, place)
    except OSError as error:
        if isinstance(error, (FileError, ConnectionError)) or error.errno is None:
            raise
        raise _unwritable(place, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def size_of(place: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def _seal(part: Path) -> None:
    files = {str(file.relative_to(part)): file.stat().st_size for file in part.rglob("*") if file.is_file()}
    for name in files:
        with (part / name).open("rb") as file:
            os.fsync(file.fileno())
    (part / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def _move(part: Path, place: Path) -> None:
    try:
        part.rename(place)
    except OSError:
        # A folder cannot be renamed onto another: somebody else finished first, and theirs is as good.
        if not finished(place):
            raise


def _sweep(parent: Path) -> None:
    for part in parent.glob(f".*{PART}"):
        if time.time() - part.stat().st_mtime > _A_DAY:
            shutil.rmtree(part, ignore_errors=True)


def _damaged(place: Path, found: str) -> Damaged:
    return Damaged(f"Cannot use {place}", found, "Remove that folder; the model is then fetched and converted again.")


def _unwritable(place: Path, error: OSError) -> FileError:
    remedy = "Make room there, or set HIDDENSCOPE_CACHE to a folder that can be written."
    return FileError(f"Cannot write {place}", str(error)[:200], remedy)
