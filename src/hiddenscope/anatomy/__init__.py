"""Find the states of a module by its behaviour, and prove them.

inputs    what a module's forward is called with
trace     one pass with every call written down
chains    runs of calls, each fed by the one before: the blocks
proof     a chain held against Hugging Face's own report, bit for bit
branches  what attention and the MLP add inside a block
taps      the place where one state passes
findings  Anatomy: all of it in one value
"""

from hiddenscope.anatomy.branches import shown
from hiddenscope.anatomy.find import find, still_holds
from hiddenscope.anatomy.findings import EVERYTHING, Anatomy, Head, Stack
from hiddenscope.anatomy.inputs import accepts, arguments, probe, vocabulary
from hiddenscope.anatomy.taps import Tap

__all__ = [
    "EVERYTHING",
    "Anatomy",
    "Head",
    "Stack",
    "Tap",
    "accepts",
    "arguments",
    "find",
    "probe",
    "shown",
    "still_holds",
    "vocabulary",
]
