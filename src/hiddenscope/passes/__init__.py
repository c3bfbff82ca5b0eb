"""Passes: one run of a model, watched, changed, or entered in the middle.

condition  whether a module can be watched as it is now
encoder    texts made into ids, and what the model cannot take refused
batch      several texts filled up to one length
watcher    sees each wanted state of a pass once
buffer     the memory in which states land
landing    where the states of a stack come together
record     run a model and keep the states that are wanted
recording  keep the states of passes that somebody else runs
changes    what may be done to a state on its way, and at which tokens
edit       run a model while states change, or change them in passes that somebody else runs
resume     enter the pass at a layer and run only the rest
caches     the keys and values of tokens that are the same in every row of a batch
sweep      one text in many variants, each computed from its first exchanged state on
align      which tokens of two texts stand in one column
"""

from hiddenscope.anatomy import EVERYTHING
from hiddenscope.passes.align import Columns, in_columns
from hiddenscope.passes.batch import Batch
from hiddenscope.passes.changes import Add, Change, Project, Replace, Scale
from hiddenscope.passes.condition import watchable
from hiddenscope.passes.edit import edit, editing
from hiddenscope.passes.encoder import Encoded, Encoder, Texts
from hiddenscope.passes.landing import Landing, Subject, landings, together
from hiddenscope.passes.record import Pass, make_batch, prepare, record, run
from hiddenscope.passes.recording import Recording, recording
from hiddenscope.passes.resume import Skipping, resume, skipping

__all__ = [
    "EVERYTHING",
    "Add",
    "Batch",
    "Change",
    "Columns",
    "Encoded",
    "Encoder",
    "Landing",
    "Pass",
    "Project",
    "Recording",
    "Replace",
    "Scale",
    "Skipping",
    "Subject",
    "Texts",
    "edit",
    "editing",
    "in_columns",
    "landings",
    "make_batch",
    "prepare",
    "record",
    "recording",
    "resume",
    "run",
    "skipping",
    "together",
    "watchable",
]
