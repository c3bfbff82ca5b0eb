"""Folds: which rows are tested together, so that classes are spread and what belongs together is never parted."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def deal(classes: Ints, groups: Sequence[str], folds: int, seed: int = 0) -> Ints:
    """The fold of every row: groups stay whole, and every class is spread as evenly as they allow.

    Groups are named by what they are, and dealt in an order that their names and the seed decide: so a row goes to the
    same fold wherever it stands.

    >>> deal(np.array([0, 0, 1, 1]), ["a", "b", "c", "d"], 2).reshape(2, 2).sum(1).tolist()
    [1, 1]
    """
    names, group_of = np.unique(np.array(groups, dtype=object), return_inverse=True)
    counts = np.zeros((len(names), int(classes.max()) + 1))
    np.add.at(counts, (group_of, classes), 1)
    shares = counts / np.maximum(counts.sum(0), 1)
    order = sorted(range(len(names)), key=lambda group: (-counts[group].sum(), drawn(str(names[group]), seed)))
    held, sizes = np.zeros((folds, counts.shape[1])), np.zeros(folds)
    fold_of = np.zeros(len(names), dtype=np.int64)
    for group in order:
        own = shares[group]
        # What the squared shares of the classes grow by: least where there is least of the classes that it brings.
        rise = np.round(held @ own, 12)
        fold = int(np.lexsort((sizes, rise))[0])
        held[fold] += own
        sizes[fold] += counts[group].sum()
        fold_of[group] = fold
    return fold_of[group_of]


def drawn(name: str, seed: int) -> int:
    """A number below 2**64 that the name and the seed alone decide."""
    made = hashlib.blake2b(f"{seed}:".encode() + name.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(made.digest(), "big")
