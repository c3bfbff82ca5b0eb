"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hiddenscope.errors import FileError

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh path beside this one, which takes its place when the body succeeds and is gone when it fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "note.txt")) as fresh:
    ...         _ = fresh.write_text("whole")
    ...     Path(folder, "note.txt").read_text()
    'whole'
    """
    target = Path(path)
    fresh = target.with_name(f".{target.stem[:100]}.{secrets.token_hex(4)}{target.suffix}")
    try:
        fresh.touch()
        rights = fresh.stat().st_mode  # what the umask gives; a library that writes may leave it to its owner alone
        yield fresh
        fresh.chmod(rights)
        os.replace(fresh, target)
    except OSError as error:
        reason = _safe(error.strerror or str(error))  # the path in its text is not the one that was asked for
        remedy = "Choose a folder that is there and can be written."
        raise FileError(f"Cannot write {_safe(str(target))}", reason, remedy) from error
    finally:
        fresh.unlink(missing_ok=True)


def write_tensors(path: str | os.PathLike[str], tensors: "Mapping[str, Tensor]", header: Mapping[str, str]) -> None:
    """Write tensors as one safetensors file, with strings in its header."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as fresh:
        try:
            save_file(kept, fresh, dict(header))
        except SafetensorError as error:
            raise OSError(str(error)) from error


def read_tensors(path: str | os.PathLike[str], what: str, form: str) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The tensors and the header of a file that `write_tensors` wrote, when its header has this `format`."""
    from safetensors import SafetensorError, safe_open

    problem, remedy = f"Cannot read {what} from {_safe(os.fspath(path))}", "Give the path of a file that .save() wrote."
    if not os.path.isfile(path):
        raise FileError(problem, "there is no such file", remedy)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != form:
                raise FileError(problem, "it is a safetensors file of something else", remedy)
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118  # it is no mapping
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(problem, f"it is damaged or of another kind ({error})", "Save it again.") from error


def _safe(text: str) -> str:
    """Text that is safe on a terminal: what cannot be printed is escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
