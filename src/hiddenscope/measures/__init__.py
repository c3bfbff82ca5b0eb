"""Measures: numbers that sum up many states. Tensors in, numbers out; they know no sites, no tokens and no words.

reading     rows regrouped and widened, however a source cuts them
cloud       mean, spread and direction of any number of states, which are seen once
dimension   in how many directions states spread, by their spectrum and by their neighbours
likeness    how alike two sets of states of the same tokens are: linear CKA
"""

from hiddenscope.measures.cloud import Cloud
from hiddenscope.measures.dimension import effective_rank, two_nn
from hiddenscope.measures.likeness import FEWEST, WORTH_READING, linear_cka
from hiddenscope.measures.reading import chunks, widened

__all__ = ["FEWEST", "WORTH_READING", "Cloud", "chunks", "effective_rank", "linear_cka", "two_nn", "widened"]
