"""Files that are written whole or not at all, with a checksum over all their bytes.

The checksum is a seal inside the file: `hiddenscope-sha256:` and 64 hex digits, the
SHA-256 of the file with zeros in the place of the digits. It lies where the format has
room for a string, so that other programs read the file as ever. It is checked before
anything else of the file is read.

Files that come from outside pass one door: `check_file` lets through regular files of a
size, `open_tensors` and `read_arrays` those whose tensors are no larger than their
bytes can make them, `check_archive` those that do not grow without end when they are
unpacked.
"""

import errno
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import shutil
import stat
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hiddenscope.errors import Damaged, Error, FileError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

try:
    import fcntl
except ImportError:
    # Windows has no such locks.
    fcntl = None  # type: ignore[assignment]

PathLike: TypeAlias = str | os.PathLike[str]
"""A path, as a string or an object."""

A_DAY = 24 * 3600.0
UNSUSPECTED = 2**22
MOST_GROWTH = 250
# numpy has no more, and torch takes minutes with thousands.
MOST_AXES = 64
# What is unpacked is held this many times while a library makes tensors of it.
COPIES = 4
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

_MARK = b"hiddenscope-sha256:"
_DIGITS = 64
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
DISK_REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space on it, or choose another one.",
    errno.EDQUOT: "Your share of the disk is used up: remove some files of yours.",
    errno.EFBIG: "Files may not be as large here: raise `ulimit -f`, or choose another"
    " disk.",
    errno.EIO: "The disk fails: choose another one.",
    errno.EROFS: "The disk can only be read: choose another one.",
}
UNSEALED = f"{_MARK.decode()}{'0' * _DIGITS}"
"""The place of a seal in a file that is being written."""


def believable(size: int) -> int:
    """Return how many bytes we accept from a compressed file of this size.

    Texts shrink to a third or a tenth, and states hardly, so the margin is wide.

    >>> believable(10), believable(10**6)
    (4194304, 250000000)
    """
    return max(UNSUSPECTED, MOST_GROWTH * size)


def check_file(path: PathLike, problem: str, most: float = math.inf) -> int:
    """Return the size of a file that may be opened; refuse what is no regular file.

    Reading a pipe waits forever, and reading a device never ends. Links are followed.

    >>> check_file(os.devnull, "Cannot read it")
    Traceback (most recent call last):
    hiddenscope.errors.Damaged: Cannot read it: null is a device and not a file. Put the file itself there.
    """  # noqa: E501
    name = printable(os.path.basename(path))
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = "there is no such file"
        remedy = "Give the path of a file."
        if os.path.lexists(path):
            reason = f"{name} cannot be opened ({getattr(error, 'strerror', error)})"
            raise Damaged(problem, reason, remedy) from error
        raise FileError(problem, reason, remedy) from error
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        reason = f"{name} is {_KINDS.get(kind, 'something else')} and not a file"
        raise Damaged(problem, reason, "Put the file itself there.")
    if status.st_size > most:
        reason = f"{name} has {status.st_size:,} bytes, more than {most:,}"
        raise Damaged(problem, reason, "Save or download it again.")
    return status.st_size


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn whatever a library raises of a damaged file into an error of ours."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        reason = f"it is damaged, cut short, or not such a file ({str(error)[:120]})"
        raise Damaged(problem, reason, "Save or download it again.") from error


def check_archive(path: PathLike, problem: str) -> int:
    """Return the bytes that a zip file unpacks to; refuse one that grows too much."""
    size = check_file(path, problem)
    with reading(problem), zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    check_growth(unpacked, size, problem)
    return unpacked


def check_growth(unpacked: int, size: int, problem: str) -> None:
    """Refuse a file that unpacks to far more than real tensors do.

    Zeros may be packed as tightly, and are refused as well.
    """
    most = believable(size // COPIES)
    if unpacked > most:
        reason = f"it unpacks to more than {most:,} bytes, too many for its size"
        raise Damaged(problem, reason, "Save it without compression.")


def check_shape(name: str, shape: Sequence[int], size: int, problem: str) -> None:
    """Refuse a tensor with axes that a file of this size cannot fill, in float32.

    An axis of 0 would make every product 0, and whoever makes tensors for the other
    axes would fill the memory: it counts as 1.

    >>> check_shape("bias", [10**9, 0], 100, "Cannot read it")
    Traceback (most recent call last):
    hiddenscope.errors.Damaged: Cannot read it: bias is [1000000000, 0], and the file has 100 bytes. Save or download it again.
    """  # noqa: E501
    if len(shape) > MOST_AXES:
        reason = f"{printable(name)} has {len(shape):,} axes"
        raise Damaged(problem, reason, "Save or download it again.")
    if 4 * math.prod(max(1, axis) for axis in shape) > believable(size):
        reason = f"{printable(name)} is {list(shape)}, and the file has {size:,} bytes"
        raise Damaged(problem, reason, "Save or download it again.")


@contextmanager
def open_tensors(path: PathLike, problem: str, framework: str = "pt") -> Iterator[Any]:
    """Open a safetensors file whose shapes are plausible for its size.

    safetensors checks that every byte belongs to exactly one tensor. What is left to
    refuse is a huge axis beside an axis of 0.
    """
    from safetensors import safe_open

    size = check_file(path, problem)
    with reading(problem), safe_open(path, framework=framework) as file:
        # The file is not a mapping, and cannot be iterated itself.
        for name in file.keys():  # noqa: SIM118
            check_shape(name, file.get_slice(name).get_shape(), size, problem)
        yield file


def read_arrays(path: PathLike, problem: str) -> "dict[str, NDArray[Any]]":
    """Read all arrays of a .npz file by name, or that of a .npy file under "".

    Arrays of objects, which would be unpickled, are refused. Shapes are checked last:
    numpy fails by itself where bytes are missing, but allows any axis beside one of 0.
    """
    import numpy as np

    size = check_file(path, problem)
    if zipfile.is_zipfile(path):
        check_archive(path, problem)
    with reading(problem):
        loaded = np.load(path, allow_pickle=False)
        arrays = {"": loaded}
        if not isinstance(loaded, np.ndarray):
            with loaded:
                arrays = {name: loaded[name] for name in loaded.files}
        for name, array in arrays.items():
            check_shape(name or "the array", array.shape, size, problem)
        return arrays


def seal(path: Path) -> None:
    """Put the checksum of a file in the place of UNSEALED, which it must hold once."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        mark = content.find(UNSEALED.encode())
        if mark < 0:
            raise ValueError(f"{path.name} has no place for a seal")
        start = mark + len(_MARK)
        content[start : start + _DIGITS] = _digest(content, start)


def check_seal(path: PathLike, problem: str) -> None:
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
    """  # noqa: E501
    starts: list[int] = []
    check_file(path, problem)
    with open(path, "rb") as file:
        # An empty file cannot be mapped.
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                marks = re.finditer(re.escape(_MARK) + rb"(?=[0-9a-f]{64})", content)
                starts = [mark.end() for mark in marks]
                for start in starts[-4:]:
                    if content[start : start + _DIGITS] == _digest(content, start):
                        return
    reason = "it has no checksum, or one that is damaged"
    if starts:
        reason = "its bytes are not those that were written"
    raise Damaged(problem, reason, "Save it again.")


def _digest(content: mmap.mmap, start: int) -> bytes:
    """Return the checksum of a file, with zeros in the place of its digits."""
    view = memoryview(content)
    try:
        digest = hashlib.sha256(view[:start])
        digest.update(b"0" * _DIGITS)
        digest.update(view[start + _DIGITS :])
    finally:
        view.release()
    return digest.hexdigest().encode()


@contextmanager
def replacing(path: PathLike, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty, locked file beside the path, and rename it to it if the body
    succeeds; otherwise remove it.

    The body writes into that very file: another one renamed over it would not be
    locked. With `durable=False` nobody waits until the disk has it: for files whose
    reader checks that they are whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "note.txt")) as fresh:
    ...         _ = fresh.write_text("whole")
    ...     Path(folder, "note.txt").read_text()
    'whole'
    """
    target = Path(path)
    problem = f"Cannot write {printable(target)}"
    if "\0" in str(target):
        raise FileError(problem, "its name holds a null character", "Rename it.")
    if not target.name:
        raise FileError(problem, "it is a folder", "Give the path of a file.")
    remedy = "Choose a folder that exists and can be written."
    with explained(problem, remedy), temporary_beside(target) as fresh:
        locked_file = fresh.stat()
        yield fresh
        # Another file in its place would not be locked.
        assert os.path.samestat(locked_file, fresh.stat()), fresh
        if durable:
            # Or a power cut could leave an empty file under the final name.
            to_disk(fresh)
        os.replace(fresh, target)
        if durable:
            to_disk(target.parent)


@contextmanager
def explained(problem: str, remedy: str) -> Iterator[None]:
    """Turn an error of the system, such as a full disk, into one of ours.

    What helps against some of them is said in the place of the remedy.
    """
    try:
        yield
    except Error:
        raise
    except OSError as error:
        # Its text may name a temporary path, which the caller does not know.
        reason = printable(error.strerror or str(error))
        raise FileError(problem, reason, disk_remedy(error) or remedy) from error


def disk_remedy(error: OSError) -> str:
    """Return what helps where the disk, and not the path, is at fault, or nothing."""
    number = error.errno
    # Of a full disk, numpy says only how many items were written.
    if number is None and " requested and " in str(error):
        number = errno.ENOSPC
    return DISK_REMEDIES.get(number or 0, "")


def temporary_beside(
    target: Path, mark: str = "", *, folder: bool = False
) -> AbstractContextManager[Path]:
    """Make a temporary file or folder that can be renamed to a target."""
    start = f".{target.stem[:60]}.{mark}"
    end = target.suffix[:60]
    pattern = rf"{re.escape(start)}[0-9a-f]{{8}}{re.escape(end)}"
    path = target.with_name(f"{start}{secrets.token_hex(4)}{end}")
    return temporary(path, re.compile(pattern, re.DOTALL), folder=folder)


@contextmanager
def temporary(
    path: Path, leftovers: re.Pattern[str], *, folder: bool = False
) -> Iterator[Path]:
    """Make an empty file or folder, which is removed when the body ends.

    It is locked while the body runs, so that a process that was killed can be told from
    one that is at work: whatever lies beside it under a name like `leftovers` and is
    not locked is removed first.
    """
    remove_leftovers(path.parent, leftovers)
    # The folder is locked too, or another process could take the file for a leftover
    # before it is locked.
    with locked(path.parent, wait=True):
        if folder:
            path.mkdir()
        else:
            path.touch()
        lock = locked(path)
        lock.__enter__()
    try:
        yield path
    finally:
        lock.__exit__(None, None, None)
        with suppress(OSError):
            _remove(path)


def remove_leftovers(folder: Path, leftovers: re.Pattern[str]) -> dict[str, int]:
    """Remove what killed processes left in a folder; return the size of each."""
    removed = {}
    with suppress(OSError), locked(folder, wait=True), os.scandir(folder) as entries:
        for entry in entries:
            if leftovers.fullmatch(entry.name) is None:
                continue
            path = Path(entry.path)
            with suppress(OSError), locked(path) as is_free:
                stat = entry.stat(follow_symlinks=False)
                # Without locks, only the age tells a leftover.
                if is_free or time.time() - stat.st_mtime > A_DAY:
                    _remove(path)
                    removed[entry.name] = stat.st_size
    return removed


@contextmanager
def locked(path: Path, *, wait: bool = False, shared: bool = False) -> Iterator[bool]:
    """Hold a lock on a file or folder; yield False if it could not be had."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        yield False
        return
    try:
        is_held = False
        if fcntl is not None:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            if not wait:
                kind |= fcntl.LOCK_NB
            # Another process has it, or the file system has no locks.
            with suppress(OSError):
                fcntl.flock(descriptor, kind)
                is_held = True
        yield is_held
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def save_tensors(
    path: PathLike, tensors: "Mapping[str, Tensor]", header: Mapping[str, str]
) -> None:
    """Write tensors as `write_tensors` does, by a name that says what the file is."""
    if Path(path).suffix.lower() != ".safetensors":
        raise FileError(
            f"Cannot save tensors as {printable(path)}",
            "its name is not that of a .safetensors file",
            "Give the path that suffix.",
        )
    write_tensors(path, tensors, header)


def write_tensors(
    path: PathLike, tensors: "Mapping[str, Tensor]", header: Mapping[str, str]
) -> None:
    """Write tensors as one sealed safetensors file, with strings in its header."""
    with replacing(path) as fresh:
        write_safetensors(fresh, tensors, {**header, "seal": UNSEALED})
        seal(fresh)


def write_safetensors(
    path: PathLike,
    tensors: "Mapping[str, Tensor]",
    header: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as safetensors into a path, in place, the same to the same bytes.

    The file is neither sealed nor replaced as a whole: call it inside `replacing`. The
    library's own writer renames a second file over ours. So the lock would be lost, a
    killed process would leave that file behind, and the header has another order each
    time.
    """
    from torch import uint8

    entries: dict[str, Any] = {}
    if header:
        entries["__metadata__"] = dict(header)
    end = 0
    # So that each begins at a multiple of its items.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            dense = tensors[name].detach().cpu().contiguous()
            file.write(dense.view(-1).view(dtype=uint8).numpy().data)


def read_tensors(
    path: PathLike, what: str, *formats: str
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Read the tensors and the header of a file that `write_tensors` wrote.

    Its header must have one of these formats; `what` names the content in errors.
    """
    problem = f"Cannot read {what} from {printable(path)}"
    remedy = "Give the path of a file that .save() wrote."
    check_seal(path, problem)
    with open_tensors(path, problem) as file:
        header = file.metadata() or {}
        if header.get("format") not in formats:
            reason = "it is a safetensors file with other content"
            raise FileError(problem, reason, remedy)
        # The file is not a mapping, and cannot be iterated itself.
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, header


def identity(paths: Iterable[Path]) -> str:
    """Return what tells files from others unread: their names, sizes, inodes and times.

    A file that was written to, replaced or copied has another identity. One whose bytes
    changed on the disk by themselves has not: only a checksum finds that.
    """
    files = []
    for path in paths:
        # A link to nothing has a time too.
        stat = path.stat(follow_symlinks=path.exists())
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        files.append((path.name, stat.st_size, stat.st_ino, *times))
    return repr(files)


def to_disk(path: Path) -> None:
    """Wait until the disk has what was written of a file, or of a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def printable(text: PathLike, most: int | None = 200) -> str:
    """Return a path or another text as it is safe on a terminal, cut at `most`."""
    parts = []
    for char in os.fspath(text)[:most]:
        parts.append(char if char.isprintable() else ascii(char)[1:-1])
    return "".join(parts)
