"""Find the hidden states of a module by its behaviour, and prove them.

taps        where a hidden state can be read: a module, one of its calls, a side of it
trace       one pass with every call of every submodule recorded, and its arguments
vocabulary  the ids that a module takes and how many, and trial texts of them
proof       chains of blocks, compared with Hugging Face's own `hidden_states`
cuts        the proof without such a report: the output follows from each state alone
blocks      what attention, cross-attention and the MLP add inside a block
find        the search: trial passes, chains that can be proved, causality, the head
stacks      Anatomy: the stacks that were proved, in one value
inside      where heads, neurons and routers are inside the blocks
find_inside the search for them, when a site inside a block is first asked for
writes      what a head or a neuron adds to the residual stream
"""

from hiddenscope.discovery.blocks import state_at
from hiddenscope.discovery.find import find, still_holds
from hiddenscope.discovery.find_inside import find_inside
from hiddenscope.discovery.inside import (
    AttentionHeads,
    HeadLayout,
    Inside,
    OperationTap,
    Projection,
)
from hiddenscope.discovery.stacks import EVERYTHING, Anatomy, Head, Stack
from hiddenscope.discovery.taps import Tap
from hiddenscope.discovery.trace import arguments
from hiddenscope.discovery.vocabulary import trial_ids, vocabulary, window
from hiddenscope.discovery.writes import Write, bias_of, effects_along
from hiddenscope.modules.calls import accepts

__all__ = [
    "EVERYTHING",
    "Anatomy",
    "AttentionHeads",
    "Head",
    "HeadLayout",
    "Inside",
    "OperationTap",
    "Projection",
    "Stack",
    "Tap",
    "Write",
    "accepts",
    "arguments",
    "bias_of",
    "effects_along",
    "find",
    "find_inside",
    "state_at",
    "still_holds",
    "trial_ids",
    "vocabulary",
    "window",
]
