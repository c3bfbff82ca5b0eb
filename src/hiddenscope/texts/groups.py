"""Groups: texts that belong together, because they are copies of one another or because
the data say so.

>>> merged_groups(["a", "b", "a", "c"], [1, 1, 2, 3])
['a', 'a', 'a', 'c']
"""

import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from hiddenscope.errors import TextError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# From this cosine of n-gram vectors, two texts nearly repeat one another.
ALIKE = 0.6
# Texts of which each is compared with each.
MOST_COMPARED = 2_000
# Lengths of character n-grams, which also catch inflections and scripts without spaces.
NGRAM = (3, 4)


def copy_key(text: Any) -> str:
    """Return the same string for texts that are copies of one another.

    Copies are equal up to case, white space and punctuation; lists of ids are copies if
    they are equal. A text and its copies must never be on both sides of a split, or
    what is learnt by heart counts as understood. Such texts with different labels, as
    in a minimal pair, are a group and not copies, so labels must be looked at too.

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


class Belonging(NamedTuple):
    """The texts that belong together.

    Each text has a name, which stands for its content and labels, and the name of its
    group. `first` is False for a copy with the same labels, which tells nothing new and
    is left out. `grouped` says whether the data name groups; without them only copies
    are together. `alike` are texts of different groups that nearly repeat one another.
    """

    texts: list[str]
    groups: list[str]
    first: list[bool]
    grouped: bool
    alike: "NearDuplicates | None"

    @property
    def copies(self) -> int:
        """Count the copies that are left out."""
        return self.first.count(False)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of a report that say what is taken as independent."""
        return {
            "texts": len(set(self.texts)),
            "groups": len(set(self.groups)),
            "groups_given": self.grouped,
            "copies": self.copies,
            "near_duplicates": self.alike,
        }


def belonging(
    texts: Sequence[Any], labels: Sequence[Any], groups: Sequence[Any] | None
) -> Belonging:
    """Find which texts belong together.

    `labels` has the label of each text, or a list of them.

    Texts that differ in case, white space and punctuation alone are copies where their
    labels are the same. Where these differ, as in a minimal pair, they are two texts of
    one group.

    >>> texts = ["It rains.", "It rains?", "it rains"]
    >>> together = belonging(texts, ["said", "asked", "said"], None)
    >>> len(set(together.texts)), len(set(together.groups)), together.first
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
    alphabetical = sorted(range(len(texts)), key=lambda text: (str(texts[text]), text))
    for text in alphabetical:
        representative.setdefault(names[text], text)
    first = [representative[name] == text for text, name in enumerate(names)]
    merged = merged_groups(keys, groups)
    alike = near_duplicates(texts, merged)
    return Belonging(names, merged, first, groups is not None, alike)


def merged_groups(keys: Sequence[str], groups: Sequence[Any] | None) -> list[str]:
    """Name the group of each text, where copies are in one group too.

    A group is named by the first of its keys in the order of the alphabet, so that the
    order of texts means nothing.
    """
    if groups is None:
        return list(keys)
    numbers = number_groups(keys, groups).tolist()
    named: dict[int, str] = {}
    for number, key in zip(numbers, keys, strict=True):
        named[number] = min(key, named.get(number, key))
    return [named[number] for number in numbers]


def number_groups(*keys: Sequence[Hashable] | None) -> "NDArray[np.int64]":
    """Number the groups of rows that share any key, in the order of their first row.

    >>> number_groups(["a", "b", "a", "c"], [1, 2, 3, 3]).tolist()
    [0, 1, 0, 0]
    """
    # Imported here because `hiddenscope --help` imports this module.
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    present = [key for key in keys if key is not None]
    count = len(present[0])
    # Each row is joined with the first one that shares a key.
    firsts = []
    for key in present:
        first_of: dict[Hashable, int] = {}
        for row, value in enumerate(key):
            firsts.append(first_of.setdefault(value, row))
    rows = [*range(count)] * len(present)
    edges = coo_array((np.ones(len(rows)), (rows, firsts)), shape=(count, count))
    _, components = connected_components(edges, directed=False)
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(part, len(numbers)) for part in components])


@dataclass(frozen=True)
class NearDuplicates:
    """The number of texts that nearly repeat one of another group, and two of them."""

    texts: int
    of: int
    example: list[str]


def near_duplicates(
    texts: Sequence[Any], groups: Sequence[str]
) -> NearDuplicates | None:
    """Find texts that nearly repeat one of another group; None where none does.

    The measure is the cosine of their letter sequences, of which rare ones count for
    more (tf-idf): what all texts share, such as a template, counts for nothing. Of many
    texts a sample is compared.

    >>> some = ["The cat sat on the mat.", "A cat sat on the mat."]
    >>> some += ["Rain fell all night.", "We sold the old car."]
    >>> near_duplicates(some, some).texts
    2
    >>> near_duplicates(some, ["cat", "cat", "rain", "car"]) is None
    True
    """
    numbers: dict[str, int] = {}
    by_text: dict[str, int] = {}
    for text, group in zip(texts, groups, strict=True):
        if isinstance(text, str):
            by_text.setdefault(text, numbers.setdefault(group, len(numbers)))
    sample = list(by_text)
    if len(sample) > MOST_COMPARED:
        # The sample must not depend on the order of the texts, which may be sorted by
        # label.
        sample.sort(key=lambda text: crc32(text.encode("utf-8", "replace")))
        del sample[MOST_COMPARED:]
    # What two texts share is what all texts share, and has no weight.
    if len(sample) < 3:
        return None
    import numpy as np

    names = np.array([by_text[text] for text in sample])
    cosines = _cosines(sample)
    cosines[names[:, None] == names] = 0
    nearest = cosines.max(1)
    alike = nearest >= ALIKE
    if not alike.any():
        return None
    closest = int(nearest.argmax())
    other = int(cosines[closest].argmax())
    example = [sample[closest], sample[other]]
    return NearDuplicates(int(alike.sum()), len(sample), example)


def _cosines(texts: Sequence[str]) -> "NDArray[np.float64]":
    """Return the cosines of n-gram vectors, in which rare n-grams have more weight.

    scikit-learn's TfidfVectorizer gives some weight to what all texts share too, so
    that templates would count.
    """
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.preprocessing import normalize

    vectorizer = CountVectorizer(
        analyzer="char_wb", ngram_range=NGRAM, dtype=np.float64
    )
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError:
        # All texts are blank.
        return np.zeros((len(texts), len(texts)))
    texts_with = np.bincount(counts.indices, minlength=counts.shape[1])
    rarity = np.log((1 + len(texts)) / (1 + texts_with))
    rows = normalize(counts.multiply(rarity).tocsr())
    cosines: NDArray[np.float64] = (rows @ rows.T).toarray()
    return cosines
