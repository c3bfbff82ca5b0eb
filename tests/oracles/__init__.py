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

from hiddenscope.catalog import ANALYSIS
from tests.oracles.naive import Uncovered as Uncovered
from tests.oracles.plain import NoTable as NoTable

Oracle = Callable[[Any, Mapping[str, Any], Any], dict[str, Any]]

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
    word: str, model: Any, asked: Mapping[str, Any], result: Any
) -> list[str]:
    """Say where the numbers of a result are not those of its oracle.

    Each line names the variable, the place, what was found and what was expected. What
    has no oracle raises `NoTable` or `Uncovered`: a family that is not in the table, a
    dtype in which rounding decides what comes first, and what an oracle leaves out.
    """
    # Some are asked about stored vectors, which have no model.
    dtype = str(getattr(model, "dtype", "torch.float32")).removeprefix("torch.")
    if dtype not in TOLERANCE:
        raise NoTable(f"no oracle of models in {dtype}")
    lines = []
    for name, values in ORACLES[word](model, asked, result).items():
        expected = np.asarray(values, dtype=np.float64)
        found = np.asarray(found_in(result, name), dtype=np.float64)
        if found.shape != expected.shape:
            lines.append(f"{word} {name}: {found.shape}, and not {expected.shape}")
            continue
        finite = np.isfinite(expected)
        scale = np.abs(expected[finite]).max(initial=0)
        near = np.isclose(
            found,
            expected,
            rtol=TOLERANCE[dtype] / 2,
            atol=TOLERANCE[dtype] / 2 * scale + FLOOR[dtype],
            equal_nan=True,
        )
        for place in np.argwhere(~near)[:5]:
            here = tuple(map(int, place))
            lines.append(
                f"{word} {name} at {list(here)}: found {found[here]:.6g},"
                f" expected {expected[here]:.6g}"
            )
    return lines


def found_in(result: Any, name: str) -> Any:
    """Return a variable of a result, or the number at a path of its facts."""
    if not name:
        return result
    if not hasattr(result, "data"):
        # A store of extracted states.
        return np.concatenate([np.asarray(block) for block in result.blocks(name)])
    head, _, path = name.partition(".")
    if head != "facts":
        return result.data[name].to_numpy()
    value = result.facts
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return np.nan if value is None else value
