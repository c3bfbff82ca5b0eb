"""Files that are written whole or not at all, and carry a checksum over all their
bytes.

The checksum is a seal inside the file: `hiddenscope-sha256:` and 64 hex digits, the
SHA-256 of the file with zeros in the place of the digits. It lies where the format has
room for a string, so that other programs read the file as ever. It is checked before
anything else of the file is read.
"""

import hashlib
import mmap
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hiddenscope.errors import Damaged, FileError

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

A_DAY = 24 * 3600.0

_MARK = b"hiddenscope-sha256:"
_DIGITS = 64
UNSEALED = f"{_MARK.decode()}{'0' * _DIGITS}"
"""What a writer puts into a file where its seal will be."""


def seal(path: Path) -> None:
    """Put the checksum of a file in the place of UNSEALED, of which it must hold one."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        at = content.find(UNSEALED.encode()) + len(_MARK)
        if at < len(_MARK):
            raise ValueError(f"{path.name} has no place for a seal")
        content[at : at + _DIGITS] = _digest(content, at)


def check_seal(path: str | os.PathLike[str], problem: str) -> None:
    """Raise Damaged unless the file holds a seal that is the checksum of all its bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "note.txt")
    ...     _ = path.write_text(f"A note. {UNSEALED}")
    ...     seal(path)
    ...     check_seal(path, "Cannot read the note")
    ...     _ = path.write_text(path.read_text().replace("note", "vote"))
    ...     check_seal(path, "Cannot read the note")
    Traceback (most recent call last):
    hiddenscope.errors.Damaged: Cannot read the note: its bytes are not those that were written. Save it again.
    """
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            places = [
                match.end()
                for match in re.finditer(
                    re.escape(_MARK) + rb"(?=[0-9a-f]{64})", content
                )
            ]
            intact = any(
                content[at : at + _DIGITS] == _digest(content, at) for at in places[-4:]
            )
    except ValueError:  # an empty file cannot be mapped
        places, intact = [], False
    if not intact:
        reason = (
            "its bytes are not those that were written"
            if places
            else "it has no checksum, or one that is damaged"
        )
        raise Damaged(problem, reason, "Save it again.")


def _digest(content: mmap.mmap, at: int) -> bytes:
    """The checksum of a file, with zeros in the place of the digits."""
    view = memoryview(content)
    try:
        digest = hashlib.sha256(view[:at])
        digest.update(b"0" * _DIGITS)
        digest.update(view[at + _DIGITS :])
    finally:
        view.release()
    return digest.hexdigest().encode()


@contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """A fresh path beside this one, which replaces it when the body succeeds and is
    removed when it fails.

    With `durable=False` it is not waited for until the disk has it: for files whose
    reader checks that they are whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "note.txt")) as fresh:
    ...         _ = fresh.write_text("whole")
    ...     Path(folder, "note.txt").read_text()
    'whole'
    """
    target = Path(path)
    if "\0" in str(target):
        raise FileError(
            f"Cannot write {_safe(str(target)[:200])}",
            "its name holds a null character",
            "Rename it.",
        )
    start, end = f".{target.stem[:60]}.", target.suffix[:60]
    leftovers = re.compile(
        rf"{re.escape(start)}[0-9a-f]{{8}}{re.escape(end)}", re.DOTALL
    )
    try:
        with temporary(
            target.with_name(f"{start}{secrets.token_hex(4)}{end}"), leftovers
        ) as fresh:
            # As the umask has it; a library may give its file to the owner alone.
            mode = fresh.stat().st_mode
            yield fresh
            fresh.chmod(mode)
            if durable:
                # Or a power cut could leave an empty file under the final name.
                to_disk(fresh)
            os.replace(fresh, target)
            if durable:
                to_disk(target.parent)
    except OSError as error:
        # Its text may name the fresh path, which nobody asked for.
        reason = _safe(error.strerror or str(error))
        remedy = "Choose a folder that exists and can be written."
        raise FileError(
            f"Cannot write {_safe(str(target)[:200])}", reason, remedy
        ) from error


@contextmanager
def temporary(
    path: Path, leftovers: re.Pattern[str], *, folder: bool = False
) -> Iterator[Path]:
    """An empty file or folder that is removed when the body ends, if it is still there.

    It is locked while the body runs, so that a process that was killed can be told from
    one that is at work: whatever lies beside it under a name like `leftovers` and is
    not locked is removed first.
    """
    # Or another process could take it for a leftover before it is locked.
    with _locked(path.parent, wait=True):
        _remove_leftovers(path.parent, leftovers)
        if folder:
            path.mkdir()
        else:
            path.touch()
        lock = _locked(path)
        lock.__enter__()
    try:
        yield path
    finally:
        lock.__exit__(None, None, None)
        with suppress(OSError):
            _remove(path)


@contextmanager
def _locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a lock on a file or folder, and say whether it could be had; where there are
    no such locks, it cannot.
    """
    try:
        descriptor = os.open(
            path,
            os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0),
        )
    except OSError:
        yield False
        return
    try:
        held = fcntl is not None
        if fcntl is not None:
            try:
                fcntl.flock(
                    descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
                )
            except OSError:  # somebody has it, or the file system has no locks
                held = False
        yield held
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path, leftovers: re.Pattern[str]) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if leftovers.fullmatch(entry.name) is None:
                continue
            path = Path(entry.path)
            with suppress(OSError), _locked(path) as free:
                if (
                    free
                    or time.time() - entry.stat(follow_symlinks=False).st_mtime > A_DAY
                ):
                    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_tensors(
    path: str | os.PathLike[str],
    tensors: "Mapping[str, Tensor]",
    header: Mapping[str, str],
) -> None:
    """Write tensors as one safetensors file, with strings in its header."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = _unshared(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    )
    with replacing(path) as fresh:
        try:
            save_file(plain, fresh, {**header, "seal": UNSEALED})
            seal(fresh)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _unshared(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """The same tensors, none of which lies in the memory of another: safetensors
    refuses those that do.
    """
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return own


def read_tensors(
    path: str | os.PathLike[str], what: str, form: str
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The tensors and the header of a file that `write_tensors` wrote, when its header
    has this `format`.
    """
    from safetensors import SafetensorError, safe_open

    problem, remedy = (
        f"Cannot read {what} from {_safe(os.fspath(path))}",
        "Give the path of a file that .save() wrote.",
    )
    if not os.path.isfile(path):
        raise FileError(problem, "there is no such file", remedy)
    try:
        check_seal(path, problem)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != form:
                raise FileError(
                    problem, "it is a safetensors file with other content", remedy
                )
            return {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
            }, header  # it is no mapping
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            problem, f"it is damaged, or not such a file ({error})", "Save it again."
        ) from error


def identity(paths: Iterable[Path]) -> str:
    """What tells files from others without reading them: each one's name, size, inode
    and times.

    A file that was written to, replaced or copied has another identity. One whose bytes
    changed on the disk by themselves has not: only a checksum finds that.
    """
    stats = [(path.name, path.stat()) for path in paths]
    return repr(
        [
            (name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
            for name, stat in stats
        ]
    )


def to_disk(path: Path) -> None:
    """Have what was written of a file, or of a folder's names, kept by the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safe(text: str) -> str:
    """Text that is safe on a terminal: what cannot be printed is escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
