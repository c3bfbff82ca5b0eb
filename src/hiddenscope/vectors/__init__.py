"""Vectors: one row for each text, or for each token, of every site that an analysis
reads, without holding all states.

pooling     one vector for each text, from a model's passes or from states
collection  what a caller may give as texts, as labelled texts, and as rows to search or cluster
nearest     the nearest of any number of rows, exactly

>>> from hiddenscope.model import load
>>> from hiddenscope.testing import tiny_model
>>> vectors(load((tiny_model("gpt2"), None)), [[5, 6, 7], [8, 9]], sites="layer.*").values.shape
torch.Size([4, 2, 64])
"""

from hiddenscope.vectors.vectors import Token as Token
from hiddenscope.vectors.vectors import Vectors as Vectors
from hiddenscope.vectors.vectors import blocks as blocks
from hiddenscope.vectors.vectors import default_token as default_token
from hiddenscope.vectors.vectors import vectors as vectors
