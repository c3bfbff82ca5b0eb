"""Copies: texts that are the same text again, and must not count as further evidence.

>>> copy_groups(["The cat sat.", "A dog", "the cat sat", "A dog "])
[0, 1, 0, 1]
"""

import unicodedata
from collections.abc import Iterable
from typing import Any


def copy_key(text: Any) -> str:
    """The same string for texts that are copies of one another: equal up to case, white
    space and punctuation.

    A text and its copies must never be on both sides of a split, or what is learnt by
    heart counts as understood. Lists of ids are copies where they are equal. Where such
    texts have different labels, as the two of a minimal pair do, they are no copies but
    a group: whoever has labels looks at both.

    >>> copy_key("The cat sat.") == copy_key(" the  cat sat"), copy_key("A cat.") == copy_key("A hat.")
    (True, False)
    """
    if not isinstance(text, str):
        return str(list(text))
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = "".join(char for char in plain if char.isalnum())
    return words or "".join(plain.split())  # a text of punctuation alone is what it is


def copy_groups(texts: Iterable[Any]) -> list[int]:
    """The number of the group of copies that each text belongs to, in the order of
    their first text.

    >>> copy_groups(["The cat sat.", "A dog", "the cat sat", "A dog "])
    [0, 1, 0, 1]
    """
    numbers: dict[str, int] = {}
    return [numbers.setdefault(copy_key(text), len(numbers)) for text in texts]
