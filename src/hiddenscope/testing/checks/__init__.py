"""The checks: laws that every analysis must pass on every subject.

>>> sorted(CHECKS)[:2]
['a_batch_is_its_texts', 'a_chat_is_its_text']
"""

from hiddenscope.testing.checks import claims as claims
from hiddenscope.testing.checks import inputs as inputs
from hiddenscope.testing.checks import numbers as numbers
from hiddenscope.testing.checks import outcomes as outcomes
from hiddenscope.testing.checks import refusals as refusals
from hiddenscope.testing.checks import results as results
from hiddenscope.testing.checks import safety as safety
from hiddenscope.testing.checks.law import CHECKS as CHECKS
from hiddenscope.testing.checks.law import Check as Check
from hiddenscope.testing.checks.law import NotApplicable as NotApplicable
