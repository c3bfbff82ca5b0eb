"""Baseline: a file of accepted errors by site."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hiddenscope.errors import FileError
from hiddenscope.files import replacing

FORMAT = "hiddenscope.drift-baseline/1"
# A model of a thousand layers takes about a hundred thousand bytes.
MOST_BYTES = 2**24


def read_baseline(path: str | os.PathLike[str]) -> dict[str, float] | None:
    """Read the accepted error of each site; None if there is no file.

    >>> read_baseline("no/such/file.json") is None
    True
    """
    problem = f"Cannot use {str(Path(path))[:200]!r} as a baseline"
    try:
        content = _content(Path(path))
        if content is None:
            return None
        return _levels(json.loads(content))
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(problem, reason, "Give the path of a plain file.") from error
    except (ValueError, RecursionError) as error:
        reason = f"it is damaged or of another kind ({error})"
        raise FileError(
            problem, reason, "Remove it to have it written anew."
        ) from error


def write_baseline(path: str | os.PathLike[str], levels: Mapping[str, float]) -> int:
    """Write the finite errors of sites, and return their number."""
    accepted = {site: level for site, level in levels.items() if math.isfinite(level)}
    with replacing(path) as fresh:
        fresh.write_text(
            json.dumps({"format": FORMAT, "accepted": accepted}, indent=1), "utf-8"
        )
    return len(accepted)


def _content(path: Path) -> bytes | None:
    """Read a plain file of a sensible size; anything else raises an OSError."""
    try:
        # Before opening it: opening a pipe waits for a writer.
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is a folder, a device or a pipe")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES // 2**20} MiB")
    return content


def _levels(stored: object) -> dict[str, float]:
    """Check the content of a file; anything wrong raises a ValueError."""
    if not isinstance(stored, dict) or not isinstance(stored.get("accepted"), dict):
        raise ValueError("it has no table `accepted`")
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"its format is {str(stored.get('format'))[:100]}, not {FORMAT}"
        )
    levels = {}
    for site, level in stored["accepted"].items():
        is_number = isinstance(level, int | float) and not isinstance(level, bool)
        if not is_number or not 0 <= level < math.inf:
            raise ValueError(f"the level of {site[:100]} is {str(level)[:100]}")
        levels[site] = float(level)
    return levels
