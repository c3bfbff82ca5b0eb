"""Every check that is not dear, of every analysis, on a tiny t5."""

import pytest

from tests.checks.cases import Case, every, run


@pytest.mark.parametrize("case", list(every("t5")), ids="-".join)
def test_check(case: Case) -> None:
    run(*case)
