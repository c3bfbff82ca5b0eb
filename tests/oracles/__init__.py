"""One naive implementation of the numbers of every analysis, to compare with.

A file whose stem is the word of an analysis holds a function of that name, which
takes the model, what was asked and the result. Of the result it takes coordinates
alone, and returns what the numeric variables must be.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import hiddenscope as hs
from hiddenscope.catalog import ANALYSIS
from tests.oracles.plain import NoTable as NoTable

Oracle = Callable[[hs.Model, Mapping[str, Any], hs.Result], dict[str, Any]]

# Shares of a variable's scale, by the dtype of the model, and what is rounding anyway.
TOLERANCE = {"float64": 1e-6, "float32": 2e-3}
FLOOR = {"float64": 1e-9, "float32": 1e-5}


def _gather() -> dict[str, Oracle]:
    oracles = {}
    for word in ANALYSIS:
        if Path(__file__).with_name(f"{word}.py").exists():
            room = importlib.import_module(f"tests.oracles.{word}")
            oracles[word] = getattr(room, word)
    return oracles


ORACLES: dict[str, Oracle] = _gather()


def disagreements(
    word: str, model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> list[str]:
    """Say where the numbers of a result are not those of its oracle.

    Each line names the variable, the place, what was found and what was expected. What
    has no oracle raises `NoTable`: a family that is not in the table, a dtype in which
    rounding decides what comes first, and what an oracle says that it leaves out.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in TOLERANCE:
        raise NoTable(f"no oracle of models in {dtype}")
    expected = ORACLES[word](model, asked, result)
    lines = []
    for name, values in expected.items():
        variable = result.data[name]
        found = np.asarray(variable.values, dtype=np.float64)
        values = np.asarray(values, dtype=np.float64)
        if found.shape != values.shape:
            lines.append(f"{word} {name}: {found.shape}, and not {values.shape}")
            continue
        finite = np.isfinite(values)
        scale = np.abs(values[finite]).max(initial=0)
        far = np.abs(found - values) > TOLERANCE[dtype] * scale + FLOOR[dtype]
        unlike = np.isnan(found) != np.isnan(values)
        unlike |= ~finite & ~np.isnan(values) & (found != values)
        for place in np.argwhere(np.where(finite, far, False) | unlike)[:5]:
            where = []
            for dim, index in zip(variable.dims, place, strict=True):
                label = index
                if dim in variable.coords:
                    label = variable.coords[dim].values[index]
                where.append(f"{dim}={label}")
            here = tuple(place)
            lines.append(
                f"{word} {name} at {', '.join(where)}: found {found[here]:.6g},"
                f" expected {values[here]:.6g}"
            )
    return lines
