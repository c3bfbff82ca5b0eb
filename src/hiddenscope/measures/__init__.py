"""Numbers that summarise many states: tensors in, numbers out.

They know nothing of sites, tokens and models.

running       running statistics: mean, scatter, direction, dimension
cka           how similar two sets of states of the same tokens are: linear CKA
distances     distances between all rows, and whether a picture keeps neighbours
principal     rows along the directions in which they vary most
separation    how far apart classes are, compared with permuted labels
permutations  labels in other orders, as the design of the data allows; sign flips
activity      the strongest rows of many directions, and how many are active
massive       states that are so long that they outweigh all others
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
