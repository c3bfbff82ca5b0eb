"""Vectors: one row for each text, or for each token, of every site that an analysis
reads, without holding all states.

vectors     the vectors of a model's texts or of states, and what their rows are
pooled      one vector for each text or token, pooled as states are computed or read
dataset     what a caller may give as texts, or as labelled texts
collection  rows to search or cluster
nearest     the nearest of any number of rows, exactly

>>> from hiddenscope.model import load
>>> from hiddenscope.testing import tiny_model
>>> model = load((tiny_model("gpt2"), None))
>>> vectors(model, [[5, 6, 7], [8, 9]], sites="layer.*").values.shape
torch.Size([4, 2, 64])
"""

from hiddenscope.vectors.vectors import EachToken as EachToken
from hiddenscope.vectors.vectors import Vectors as Vectors
from hiddenscope.vectors.vectors import default_pool as default_pool
from hiddenscope.vectors.vectors import each_token as each_token
from hiddenscope.vectors.vectors import rows_of as rows_of
from hiddenscope.vectors.vectors import vectors as vectors
