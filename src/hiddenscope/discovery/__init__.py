"""Find the hidden states of a module by its behaviour, and prove them.

trace       one pass with every call of every submodule recorded, and where states are
vocabulary  the ids that a module takes and how many, and trial texts of them
proof       chains of blocks, compared with Hugging Face's own `hidden_states`, or where
            there is no such report, with the output that each state leads to
blocks      what attention, cross-attention and the MLP add inside a block
find        the search: trial passes, chains that can be proved, causality, the head;
            and what is inside a block, when a site there is first asked for
anatomy     the stacks that were proved, and where heads, neurons and routers are inside
            their blocks, in one value
"""

from hiddenscope.discovery.anatomy import (
    EVERYTHING,
    Anatomy,
    Inside,
    OperationTap,
    Stack,
    Write,
    effects_along,
)
from hiddenscope.discovery.blocks import state_at
from hiddenscope.discovery.find import find, find_inside, still_holds
from hiddenscope.discovery.trace import Tap, arguments
from hiddenscope.discovery.vocabulary import (
    target_window,
    text_config,
    trial_ids,
    vocabulary,
    window,
)
from hiddenscope.modules.calls import accepts

__all__ = [
    "EVERYTHING",
    "Anatomy",
    "Inside",
    "OperationTap",
    "Stack",
    "Tap",
    "Write",
    "accepts",
    "arguments",
    "effects_along",
    "find",
    "find_inside",
    "state_at",
    "still_holds",
    "target_window",
    "text_config",
    "trial_ids",
    "vocabulary",
    "window",
]
