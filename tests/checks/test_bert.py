"""Every check that is not dear, of every analysis, on a tiny bert."""

import pytest

from tests.checks.cases import Case, every, run


@pytest.mark.parametrize("case", list(every("bert")), ids="-".join)
def test_check(case: Case) -> None:
    run(*case)
