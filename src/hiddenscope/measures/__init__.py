"""Measures: numbers that summarise many states. Tensors in, numbers out; they know no
sites, no tokens and no models.

running       running statistics of states that are seen once: mean, spread, direction, dimension
cka           how similar two sets of states of the same tokens are: linear CKA
distances     Euclidean distances of every row to every other, and whether a picture keeps neighbours
separation    how far apart classes are, beside permuted labels
permutations  labels in another order, as the design of the data allows
grouped       averages over texts that belong together, and how uncertain they are
"""

from hiddenscope.measures.cka import FEWEST, WORTH_READING, linear_cka
from hiddenscope.measures.running import (
    RunningStatistics,
    chunks,
    effective_rank,
    two_nn,
    widened,
)

__all__ = [
    "FEWEST",
    "WORTH_READING",
    "RunningStatistics",
    "chunks",
    "effective_rank",
    "linear_cka",
    "two_nn",
    "widened",
]
