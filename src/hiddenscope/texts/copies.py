"""Copies: texts that are the same text again, and must not count as further evidence.

>>> copy_groups(["The cat sat.", "A dog", "the cat sat", "A dog "])
[0, 1, 0, 1]
"""

import unicodedata
from collections.abc import Iterable
from typing import Any


def copy_key(text: Any) -> str:
    """Return the same string for texts that are copies of one another.

    Copies are equal up to case, white space and punctuation; lists of ids are copies if
    they are equal. A text and its copies must never be on both sides of a split, or
    what is learnt by heart counts as understood. Such texts with different labels, as
    in a minimal pair, are a group and not copies: whoever has labels looks at both.

    >>> copy_key("The cat sat.") == copy_key(" the  cat sat")
    True
    >>> copy_key("A cat.") == copy_key("A hat.")
    False
    """
    if not isinstance(text, str):
        return str(list(text))
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = "".join(char for char in plain if char.isalnum())
    # A text of punctuation alone has no words to compare.
    return words or "".join(plain.split())


def copy_groups(texts: Iterable[Any]) -> list[int]:
    """Number the groups of copies, in the order of their first text, for each text."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(copy_key(text), len(numbers)) for text in texts]
