"""For our tests and for yours: tiny real models of every shape, a store, and the checks
that every analysis must pass.

>>> module = tiny_model("gpt2")
>>> type(module).__name__, module.num_parameters() < 200_000
('GPT2LMHeadModel', True)
"""

from hiddenscope.testing.checks import CHECKS as CHECKS
from hiddenscope.testing.checks.suite import check_analysis as check_analysis
from hiddenscope.testing.entries import Entry as Entry
from hiddenscope.testing.models import build as build
from hiddenscope.testing.models import families as families
from hiddenscope.testing.models import identity_block as identity_block
from hiddenscope.testing.models import misreport as misreport
from hiddenscope.testing.models import nan_weight as nan_weight
from hiddenscope.testing.models import tiny_model as tiny_model
from hiddenscope.testing.models import tiny_tokenizer as tiny_tokenizer
from hiddenscope.testing.stores import tiny_store as tiny_store
from hiddenscope.testing.subjects import SUBJECTS as SUBJECTS
from hiddenscope.testing.subjects import Subject as Subject
