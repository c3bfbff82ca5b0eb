"""Model: a loaded network with its tokenizer, whose states have been proved.

model       load a model; its states, its texts, its provenance and its lock
batching    whether texts may go through in padded batches
generation  the states of a text while it is generated
"""

from hiddenscope.model.model import Model as Model
from hiddenscope.model.model import ModelLike as ModelLike
from hiddenscope.model.model import as_model as as_model
from hiddenscope.model.model import as_source as as_source
from hiddenscope.model.model import load as load
