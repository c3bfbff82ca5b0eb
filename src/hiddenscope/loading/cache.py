"""Folders in the user's cache that appear whole or not at all.

A folder is built under a temporary name beside its place and renamed when it is complete. Two processes at once build
two, and the second to finish takes the first one's. What an exception or an interrupt leaves is removed on the way out;
what a killed process leaves is removed by the next one that builds.
"""

import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hiddenscope.errors import Damaged, FileError
from hiddenscope.files import temporary

MANIFEST = "hiddenscope.json"
PART = ".part"
_PARTS = re.compile(rf"\..*{re.escape(PART)}", re.DOTALL)


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


def is_complete(folder: Path) -> bool:
    """Whether a complete folder is there, with every file at its full length."""
    if not folder.exists():
        return False
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        wrong = [name for name, size in sizes.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(folder, f"its {MANIFEST} cannot be read ({type(error).__name__})") from error
    if wrong:
        raise _damaged(folder, f"{wrong[0]} has changed its length")
    return True


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """The complete folder; if it is not there, the function given builds it first."""
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with working_folder(folder.parent, folder.name) as part:
            build(part)
            _write_manifest(part)
            _move(part, folder)
    except OSError as error:
        if isinstance(error, (FileError, ConnectionError)) or error.errno is None:
            raise
        raise _unwritable(folder, error) from error
    return folder


def working_folder(parent: Path, name: str) -> AbstractContextManager[Path]:
    """A folder to work in, which is gone when the body ends; what killed processes left beside it is removed first."""
    return temporary(parent / f".{name}.{secrets.token_hex(4)}{PART}", _PARTS, folder=True)


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _write_manifest(part: Path) -> None:
    sizes = {str(file.relative_to(part)): file.stat().st_size for file in part.rglob("*") if file.is_file()}
    for name in sizes:
        with (part / name).open("rb") as file:
            os.fsync(file.fileno())
    (part / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1), encoding="utf-8")


def _move(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:
        # A folder cannot be renamed onto another: another process finished first, and its folder is as good.
        if not is_complete(folder):
            raise


def _damaged(folder: Path, reason: str) -> Damaged:
    remedy = "Remove that folder; the model is then downloaded and converted again."
    return Damaged(f"Cannot use {folder}", reason, remedy)


def _unwritable(folder: Path, error: OSError) -> FileError:
    remedy = "Make room there, or set HIDDENSCOPE_CACHE to a folder that can be written."
    return FileError(f"Cannot write {folder}", str(error)[:200], remedy)
