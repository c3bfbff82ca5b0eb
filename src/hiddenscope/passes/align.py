"""Align: which tokens of two texts stand in one column."""

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any, TypeAlias

TokenColumns: TypeAlias = list[tuple[int | None, int | None]]


def in_columns(
    a: Sequence[Any], b: Sequence[Any], *, pair: bool = True
) -> TokenColumns:
    """Align two texts by difflib; a side without a token in a column has None there.

    The columns are the same whichever side comes first. Where some tokens take the
    place of others the last of each are paired: there a causal model has read all of
    them. Without `pair` only equal tokens stand in one column.

    >>> in_columns([5, 6, 7], [5, 9, 10, 7])
    [(0, 0), (None, 1), (1, 2), (2, 3)]

    Texts of one length stand token by token, unless that tears more equal tokens apart.

    >>> in_columns([5, 6, 7, 7], [5, 7, 7, 7])
    [(0, 0), (1, 1), (2, 2), (3, 3)]
    """
    if list(b) < list(a):
        return [(i, j) for j, i in in_columns(b, a, pair=pair)]
    columns: TokenColumns = []
    matcher: SequenceMatcher[Hashable] = SequenceMatcher(None, a, b, autojunk=False)
    if pair and len(a) == len(b) and not _is_torn(a, b, matcher):
        rows = range(len(a))
        return list(zip(rows, rows, strict=True))
    for tag, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        paired = 0
        if pair or tag == "equal":
            paired = min(a_end - a_start, b_end - b_start)
        columns += [(row, None) for row in range(a_start, a_end - paired)]
        columns += [(None, row) for row in range(b_start, b_end - paired)]
        in_both = zip(
            range(a_end - paired, a_end), range(b_end - paired, b_end), strict=True
        )
        columns += in_both
    return columns


def _is_torn(
    a: Sequence[Any], b: Sequence[Any], matcher: SequenceMatcher[Hashable]
) -> bool:
    """Tell whether fewer equal tokens meet token by token than in the best match."""
    in_place = 0
    for token, other in zip(a, b, strict=True):
        in_place += token == other
    matched = 0
    for match in matcher.get_matching_blocks():
        matched += match.size
    return in_place < matched
