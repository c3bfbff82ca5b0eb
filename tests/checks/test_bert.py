"""Every check that is not slow, of every analysis, on a tiny bert."""

import pytest

from tests.checks.cases import Case, every, run


@pytest.mark.parametrize("case", every("bert"))
def test_check(case: Case) -> None:
    run(*case)
