"""Accepted errors, in a file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from hiddenscope.analyses.drift.errors import Errors
from hiddenscope.errors import FileError
from hiddenscope.files import replacing

FORMAT = "hiddenscope.drift-baseline/1"
MARGIN = 2  # how much over an accepted level an error may be: levels vary with the texts


def apply_baseline(name: str | os.PathLike[str], errors: Errors) -> dict[str, Any]:
    """Hold the errors against a file of accepted ones, or write it."""
    path = Path(name)
    if not path.exists():
        levels = {site: error for site, error in errors.error.items() if math.isfinite(error)}
        with replacing(path) as fresh:
            fresh.write_text(json.dumps({"format": FORMAT, "accepted": levels}, indent=1), "utf-8")
        return {"file": str(path), "written": True, "sites": len(levels)}
    try:
        stored = json.loads(path.read_text("utf-8"))
        levels = {str(site): float(level) for site, level in stored["accepted"].items()}
        if stored["format"] != FORMAT:
            raise ValueError(f"its format is {stored['format']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "Remove it to have it written anew."
        problem = f"Cannot use {path} as a baseline"
        raise FileError(problem, f"it is damaged or of another kind ({error})", remedy) from error
    for site, level in levels.items():
        allowed = MARGIN * level
        if site in errors.beyond and errors.error[site] <= allowed:
            accepted = errors.error[site] / allowed if allowed else 0.0
            errors.beyond[site] = min(errors.beyond[site], accepted)
            errors.envelope[site] = max(errors.envelope[site], allowed)
    return {"file": str(path), "written": False, "sites": len(levels)}
