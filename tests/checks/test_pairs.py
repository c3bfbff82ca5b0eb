"""Checks dealt out over all subjects and all analyses, pairwise."""

import pytest

from tests.checks.cases import CHEAP, DEAR, OTHERS, THREE, Case, pairwise, run


@pytest.mark.parametrize("case", list(pairwise(OTHERS, CHEAP)), ids="-".join)
def test_check(case: Case) -> None:
    run(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(pairwise(THREE, DEAR)), ids="-".join)
def test_dear_check(case: Case) -> None:
    run(*case)
