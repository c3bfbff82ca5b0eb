"""Vectors: one row for each text, or for each token, of every site that an analysis
reads, without holding all states.

vectors     the vectors of a model's texts, or of states
computed    one vector for each text, pooled as a model's passes go
stored      one vector for each text or token of states, read block by block
rows        what the rows of an analysis are: pooled texts, or tokens
dataset     what a caller may give as texts, or as labelled texts
collection  rows to search or cluster
nearest     the nearest of any number of rows, exactly

>>> from hiddenscope.model import load
>>> from hiddenscope.testing import tiny_model
>>> model = load((tiny_model("gpt2"), None))
>>> vectors(model, [[5, 6, 7], [8, 9]], sites="layer.*").values.shape
torch.Size([4, 2, 64])
"""

from hiddenscope.vectors.rows import EachToken as EachToken
from hiddenscope.vectors.rows import each_token as each_token
from hiddenscope.vectors.rows import rows_of as rows_of
from hiddenscope.vectors.vectors import Vectors as Vectors
from hiddenscope.vectors.vectors import blocks as blocks
from hiddenscope.vectors.vectors import default_pool as default_pool
from hiddenscope.vectors.vectors import vectors as vectors
