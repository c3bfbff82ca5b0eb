"""Groups: texts that belong together, because they are copies of one another or because
the data say so.

>>> merged_groups(["a", "b", "a", "c"], [1, 1, 2, 3])
['a', 'a', 'a', 'c']
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from hiddenscope.errors import TextError
from hiddenscope.texts.copies import copy_key

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The cosine of n-gram vectors from which on two texts nearly repeat one another.
ALIKE = 0.6
MOST_COMPARED = 2_000  # texts that are compared, each with each
# Lengths of character n-grams, which also catch inflections and scripts without spaces.
NGRAM = (
    3,
    4,
)


class Belonging(NamedTuple):
    """Say which texts belong together: for each text a name of its content and labels,
    and the name of its group.

    `first` is False for a copy with the same labels, which tells nothing new and is
    left out. `given` says whether the data have groups; without them only copies are
    together. `alike` are texts of different groups that nearly repeat one another.
    """

    texts: list[str]
    groups: list[str]
    first: list[bool]
    given: bool
    alike: "NearDuplicates | None"

    @property
    def copies(self) -> int:
        """Count the copies that are left out."""
        return self.first.count(False)

    @property
    def facts(self) -> dict[str, Any]:
        """Report what is taken as independent, and what speaks against it."""
        facts: dict[str, Any] = {
            "texts": len(set(self.texts)),
            "groups": len(set(self.groups)),
        }
        facts["groups_given"] = self.given
        if self.copies:
            facts["copies"] = self.copies
        if self.alike is not None:
            facts["near_duplicates"] = {
                **self.alike._asdict(),
                "example": list(self.alike.example),
            }
        return facts


def belonging(
    texts: Sequence[Any], labels: Sequence[Any], groups: Sequence[Any] | None
) -> Belonging:
    """Find which texts belong together; `labels` has the label of each text, or a list
    of them.

    Texts that differ in case, white space and punctuation alone are copies where their
    labels are the same. Where these differ, as in a minimal pair, they are two texts of
    one group.

    >>> found = belonging(["It rains.", "It rains?", "it rains"], ["said", "asked", "said"], None)
    >>> len(set(found.texts)), len(set(found.groups)), found.first
    (2, 1, [True, True, False])
    """
    if groups is not None and len(groups) != len(texts):
        reason = f"there are {len(texts):,} texts and {len(groups):,} groups"
        raise TextError(
            "Groups do not fit the texts", reason, "Give one for each text."
        )
    keys = [copy_key(text) for text in texts]
    names = [f"{key}\0{label}" for key, label in zip(keys, labels, strict=True)]
    representative: dict[str, int] = {}
    # Of near copies the first in the alphabet counts, wherever it stands.
    for text in sorted(range(len(texts)), key=lambda text: (str(texts[text]), text)):
        representative.setdefault(names[text], text)
    first = [representative[name] == text for text, name in enumerate(names)]
    merged = merged_groups(keys, groups)
    return Belonging(
        names, merged, first, groups is not None, near_duplicates(texts, merged)
    )


def merged_groups(keys: Sequence[str], groups: Sequence[Any] | None) -> list[str]:
    """Name the group of each text: copies are together, and so are texts with the same
    value in `groups`.

    A group is named by the first of its keys in the order of the alphabet, so that the
    order of texts means nothing.
    """
    if groups is None:
        return list(keys)
    parent = list(range(len(keys)))
    first_of: dict[tuple[str, Any], int] = {}
    for text, (key, group) in enumerate(zip(keys, groups, strict=True)):
        for name in (("copies", key), ("group", group)):
            other = first_of.setdefault(name, text)
            parent[_root(parent, other)] = _root(parent, text)
    roots = [_root(parent, text) for text in range(len(keys))]
    named: dict[int, str] = {}
    for root, key in zip(roots, keys, strict=True):
        named[root] = min(key, named.get(root, key))
    return [named[root] for root in roots]


def _root(parent: list[int], text: int) -> int:
    while parent[text] != text:
        parent[text] = parent[parent[text]]
        text = parent[text]
    return text


class NearDuplicates(NamedTuple):
    """How many texts nearly repeat a text of another group, of how many that were
    compared, and two that do.
    """

    texts: int
    of: int
    example: tuple[str, str]


def near_duplicates(
    texts: Sequence[Any], groups: Sequence[str]
) -> NearDuplicates | None:
    """Find texts that nearly repeat one of another group; None where none does.

    The measure is the cosine of their letter sequences, of which rare ones count for
    more (tf-idf): what all texts share, such as a template, counts for nothing. Of many
    texts a sample is compared.

    >>> some = ["The cat sat on the mat.", "A cat sat on the mat.", "Rain fell all night.", "We sold the old car."]
    >>> near_duplicates(some, some).texts
    2
    >>> near_duplicates(some, ["cat", "cat", "rain", "car"]) is None
    True
    """
    listed, numbers = _different(texts, groups)
    # What two texts share is what all texts share, and has no weight.
    if len(listed) < 3:
        return None
    # Here, since `hiddenscope --help` imports this module.
    import numpy as np

    names = np.array(numbers)
    cosines = _cosines(listed)
    cosines[names[:, None] == names] = 0
    nearest = cosines.max(1)
    alike = nearest >= ALIKE
    if not alike.any():
        return None
    closest = int(nearest.argmax())
    other = int(cosines[closest].argmax())
    return NearDuplicates(
        int(alike.sum()), len(listed), (listed[closest], listed[other])
    )


def _cosines(texts: Sequence[str]) -> "NDArray[np.float64]":
    """Return the cosines between the n-gram vectors of texts, with more weight on rare
    n-grams.

    scikit-learn's TfidfVectorizer gives some weight to what all texts share too, so
    that templates would count.
    """
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.preprocessing import normalize

    try:
        counts = CountVectorizer(
            analyzer="char_wb", ngram_range=NGRAM, dtype=np.float64
        ).fit_transform(texts)
    except ValueError:  # all texts are blank
        return np.zeros((len(texts), len(texts)))
    texts_with = np.bincount(counts.indices, minlength=counts.shape[1])
    rarity = np.log((1 + len(texts)) / (1 + texts_with))
    rows = normalize(counts.multiply(rarity).tocsr())
    cosines: NDArray[np.float64] = (rows @ rows.T).toarray()
    return cosines


def _different(
    texts: Sequence[Any], groups: Sequence[str]
) -> tuple[list[str], list[int]]:
    """Return the different texts that are strings, or a sample of many, and the number
    of the group of each.
    """
    numbers: dict[str, int] = {}
    by_text: dict[str, int] = {}
    for text, group in zip(texts, groups, strict=True):
        if isinstance(text, str):
            by_text.setdefault(text, numbers.setdefault(group, len(numbers)))
    listed = list(by_text)
    if len(listed) > MOST_COMPARED:
        # A sample that does not depend on the order of the texts, which may be sorted
        # by label.
        listed = sorted(
            listed, key=lambda text: crc32(text.encode("utf-8", "replace"))
        )[:MOST_COMPARED]
    return listed, [by_text[text] for text in listed]
