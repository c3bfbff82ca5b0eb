"""Alignment: which tokens of two texts stand in one column, and which are gaps."""

from collections import Counter

import numpy as np

from hiddenscope.errors import StatesError, TextError
from hiddenscope.passes import Columns, in_columns
from hiddenscope.states import Tokens


def aligned(a: Tokens, b: Tokens, *, spans: bool) -> Columns:
    """Which tokens stand in one column: by their ids, or for two tokenizers by where in the text they end."""
    same = np.array_equal(a.ids, b.ids) and a.strings == b.strings
    if same or not spans or a.texts is None or a.texts != b.texts:
        _one_vocabulary(a, b)
        return in_columns(a.ids.tolist(), b.ids.tolist(), pair=True)
    ends = [_ends(tokens) for tokens in (a, b)]
    if any(all(end < 0 for end, _ in side) for side in ends):
        reason = "the tokenizers differ and one does not say which characters its tokens stand for"
        raise TextError("One text in two models", reason, "Use a fast tokenizer, or give ids.")
    return in_columns(*ends, pair=False)


def _one_vocabulary(a: Tokens, b: Tokens) -> None:
    """Ids can be held against each other only if they mean the same."""
    known = dict(zip(a.ids.tolist(), a.strings, strict=True))
    wrong = [
        (known[i], string)
        for i, string in zip(b.ids.tolist(), b.strings, strict=True)
        if known.get(i, string) != string
    ]
    if wrong and a.texts is not None and b.texts is not None:
        reason = f"one id means {wrong[0][0]!r} in one and {wrong[0][1]!r} in the other"
        raise StatesError("Different texts of two tokenizers", reason, "Compare one text, or give states of one model.")


def _ends(tokens: Tokens) -> list[tuple[int, int]]:
    """The character after each token, and how many more tokens end there; -1 for one that stands for none."""
    seen: Counter[int] = Counter()
    ends = []
    for end in reversed(tokens.spans[:, 1].tolist()):
        ends.append((end, seen[end] if end >= 0 else 0))
        seen[end] += 1
    return ends[::-1]
