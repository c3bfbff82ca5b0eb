"""Every check that is not slow, of every analysis, on a tiny llama."""

import pytest

from hiddenscope.testing import SUBJECTS
from hiddenscope.testing.entries import outcome
from tests.checks.cases import Case, every, run
from tests.registry import ENTRIES


@pytest.mark.parametrize("case", every("llama"))
def test_check(case: Case) -> None:
    run(*case)


@pytest.mark.parametrize("word", ENTRIES)
def test_it_is_answered(word: str) -> None:
    """Laws say nothing of what is refused: here nothing may be."""
    assert outcome(ENTRIES[word], SUBJECTS["llama"]).error is None
