"""Passes: one run of a model: recorded, edited, or resumed in the middle.

inputs        texts as a model takes them, encoded once, and their batches
text_encoder  texts made into ids by a tokenizer, within the limits of the model
encodings     the output of a tokenizer as ids, and chats as text
protocol      the protocol of a model that passes run, and the checks of its module
buffers       the memory that holds the states of a pass
record        run a model and keep states
recording     keep the states of passes that the user runs
probe_scores  what probes say of each token while these passes run
cache_mark    whether such a pass goes on with the texts of the one before
changes       what can be done to a state, and at which tokens
edit          run a model while states change, or change them in the user's passes
resume        enter the pass at a layer and run only the rest
clean_run     unpatched passes, with all that a sweep starts from
sweep         one text in many patched variants, each computed from its first patch on
key_values    the key-value cache of a pass, and its first tokens
jacobian      products with the Jacobians between the states of one text
unembed       the logits that a model makes of any rows of its last layer
align         which tokens of two texts stand in one column
answers       the single token that an answer is where it is read

attention_weights computes the weights of attention beside the model's own kernel.
"""

from hiddenscope.discovery import EVERYTHING
from hiddenscope.passes.align import TokenColumns, in_columns
from hiddenscope.passes.buffers import (
    HostMemory,
    Keep,
    StackBuffer,
    buffers_for,
    states_in,
)
from hiddenscope.passes.changes import Add, Change, Project, Replace, Scale
from hiddenscope.passes.edit import edit, editing
from hiddenscope.passes.inputs import Batching, Inputs, PaddedBatch, Texts
from hiddenscope.passes.protocol import PassModel, require_recordable
from hiddenscope.passes.record import (
    Pass,
    check_targets,
    load_with_head,
    record,
    run_pass,
    token_logits,
)
from hiddenscope.passes.recording import Recording, recording
from hiddenscope.passes.resume import SkipTrial, resume, try_skipping
from hiddenscope.passes.text_encoder import TextEncoder

__all__ = [
    "EVERYTHING",
    "Add",
    "Batching",
    "Change",
    "HostMemory",
    "Inputs",
    "Keep",
    "PaddedBatch",
    "Pass",
    "PassModel",
    "Project",
    "Recording",
    "Replace",
    "Scale",
    "SkipTrial",
    "StackBuffer",
    "TextEncoder",
    "Texts",
    "TokenColumns",
    "buffers_for",
    "check_targets",
    "edit",
    "editing",
    "in_columns",
    "load_with_head",
    "record",
    "recording",
    "require_recordable",
    "resume",
    "run_pass",
    "states_in",
    "token_logits",
    "try_skipping",
]
