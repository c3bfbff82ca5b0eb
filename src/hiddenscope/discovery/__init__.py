"""Find the hidden states of a module by its behaviour, and prove them.

taps        where a hidden state can be read: a module's path, one of its calls, its input or its output
trace       the arguments of a forward, and one pass with every call of every submodule recorded
vocabulary  how many ids a module takes
proof       chains of blocks, compared with Hugging Face's own `hidden_states`, bit for bit
blocks      what attention, cross-attention and the MLP add inside a block
find        the search: trial passes, the chains that can be proved, causality, the head
stacks      Anatomy: what was found, in one value
"""

from hiddenscope.discovery.blocks import state_at
from hiddenscope.discovery.find import find, still_holds
from hiddenscope.discovery.stacks import EVERYTHING, Anatomy, Head, Stack
from hiddenscope.discovery.taps import Tap
from hiddenscope.discovery.trace import accepts, arguments, trial_ids
from hiddenscope.discovery.vocabulary import vocabulary

__all__ = [
    "EVERYTHING",
    "Anatomy",
    "Head",
    "Stack",
    "Tap",
    "accepts",
    "arguments",
    "find",
    "state_at",
    "still_holds",
    "trial_ids",
    "vocabulary",
]
