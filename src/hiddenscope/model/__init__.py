"""Model: a loaded network with its tokenizer, whose states have been proved.

model       load a model; its states, its texts, its provenance and its lock
batching    whether texts may go through in padded batches
generation  the states of a text while it is generated
"""

from hiddenscope.model.model import Model, ModelLike, as_model, as_source, load

__all__ = ["Model", "ModelLike", "as_model", "as_source", "load"]
