"""Target: a file or folder that appears whole under its name, or not at all."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hiddenscope.errors import FileError
from hiddenscope.files import temporary, to_disk


def check_target(target: Path) -> None:
    """Refuse a path that exists, or whose folder does not."""
    problem = f"Cannot export to {ascii(str(target))[1:-1]}"
    if os.path.lexists(target):
        raise FileError(problem, "it exists already", "Choose a new path.")
    if not target.absolute().parent.is_dir():
        raise FileError(
            problem, "its folder does not exist", "Make the folder, or choose another."
        )


@contextmanager
def creating(target: Path, *, folder: bool) -> Iterator[Path]:
    """Yield a fresh path beside the target, which becomes it if the body succeeds.

    Whatever ends the body before, nothing is left. What a killed process left behind
    is removed by the next export to the same place.
    """
    check_target(target)
    start = f".{target.stem[:60]}.export."
    end = target.suffix[:60]
    leftovers = re.compile(
        rf"{re.escape(start)}[0-9a-f]{{8}}{re.escape(end)}", re.DOTALL
    )
    name = f"{start}{secrets.token_hex(4)}{end}"
    try:
        with temporary(target.with_name(name), leftovers, folder=folder) as fresh:
            yield fresh
            for path in _files(fresh):
                to_disk(path)
            # Another process may have written it meanwhile.
            check_target(target)
            os.rename(fresh, target)
            to_disk(target.absolute().parent)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"Cannot export to {ascii(str(target))[1:-1]}",
            error.strerror or str(error)[:150],
            "Choose a folder that can be written and has room.",
        ) from error


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file()]
