"""Align: which tokens of two texts stand in one column."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, TypeAlias

Columns: TypeAlias = list[tuple[int | None, int | None]]


def in_columns(a: Sequence[Any], b: Sequence[Any], *, pair: bool = True) -> Columns:
    """Columns by difflib, the same whichever side is first; None where one side has no
    token.

    Where some tokens take the place of others the last of each are paired: there a
    causal model has read all of them. Without `pair` only what is equal stands in one
    column.

    >>> in_columns([5, 6, 7], [5, 9, 10, 7])
    [(0, 0), (None, 1), (1, 2), (2, 3)]
    """
    if list(b) < list(a):
        return [(i, j) for j, i in in_columns(b, a, pair=pair)]
    columns: Columns = []
    for tag, start, end, begin, stop in SequenceMatcher(
        None, a, b, autojunk=False
    ).get_opcodes():
        both = min(end - start, stop - begin) if pair or tag == "equal" else 0
        columns += [(row, None) for row in range(start, end - both)]
        columns += [(None, row) for row in range(begin, stop - both)]
        columns += zip(range(end - both, end), range(stop - both, stop), strict=True)
    return columns
