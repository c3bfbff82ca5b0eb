"""Every check that is not slow, of every analysis, on a tiny t5."""

import pytest

from tests.checks.cases import Case, every, run


@pytest.mark.parametrize("case", every("t5"))
def test_check(case: Case) -> None:
    run(*case)
