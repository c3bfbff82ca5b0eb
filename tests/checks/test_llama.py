"""Every check that is not dear, of every analysis, on a tiny llama."""

import pytest

from tests.checks.cases import Case, every, run


@pytest.mark.parametrize("case", every("llama"), ids="-".join)
def test_check(case: Case) -> None:
    run(*case)
