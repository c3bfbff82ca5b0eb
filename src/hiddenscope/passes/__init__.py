"""Passes: one run of a model: recorded, edited, or resumed in the middle.

inputs             texts as a model takes them, encoded once, and their batches; the
                   protocol of a model that passes run
text_encoder       texts made into ids by a tokenizer, within the limits of the model
buffers            the memory that holds the states of a pass
record             run a model and keep states; whether a module can be recorded
recording          keep the states of passes that the user runs, and score their tokens
changes            what can be done to a state, and at which tokens
edit               run a model while states change, or change them in the user's passes
resume             enter the pass at a layer and run only the rest
sweep              one text in many patched variants, each computed from its patch on
jacobian           products with the Jacobians between the states of one text
losses             how well runs predict the next tokens of texts
unembed            the logits that a model makes of any rows of its last layer
attention_weights  the weights of attention, computed beside the model's own kernel
"""

from hiddenscope.discovery import EVERYTHING
from hiddenscope.passes.buffers import (
    HostMemory,
    Keep,
    buffers_for,
    states_in,
)
from hiddenscope.passes.changes import Add, Change, Project, Replace, Scale
from hiddenscope.passes.edit import edit, editing
from hiddenscope.passes.inputs import (
    Batching,
    Inputs,
    PaddedBatch,
    PassModel,
    Texts,
    TokenColumns,
    in_columns,
)
from hiddenscope.passes.record import (
    Pass,
    check_targets,
    load_with_head,
    record,
    require_recordable,
    run_pass,
    token_logits,
)
from hiddenscope.passes.recording import Recording, recording
from hiddenscope.passes.resume import resume, try_skipping
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
