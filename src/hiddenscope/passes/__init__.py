"""Passes: one run of a model, watched.

condition  whether a module can be watched as it is now
encoder    texts made into ids, and what the model cannot take refused
batch      several texts filled up to one length
watcher    sees each wanted state of a pass once
buffer     the memory in which states land
landing    where the states of a stack come together
record     run a model and keep the states that are wanted
recording  keep the states of passes that somebody else runs
"""

from hiddenscope.passes.batch import Batch
from hiddenscope.passes.condition import watchable
from hiddenscope.passes.encoder import Encoded, Encoder, Texts
from hiddenscope.passes.landing import Landing, Subject, landings, together
from hiddenscope.passes.record import EVERYTHING, Pass, make_batch, prepare, record, run
from hiddenscope.passes.recording import Recording, recording

__all__ = [
    "EVERYTHING",
    "Batch",
    "Encoded",
    "Encoder",
    "Landing",
    "Pass",
    "Recording",
    "Subject",
    "Texts",
    "landings",
    "make_batch",
    "prepare",
    "record",
    "recording",
    "run",
    "together",
    "watchable",
]
