"""Checks dealt out over all subjects and all analyses, pairwise."""

import pytest

from tests.checks.cases import CHEAP, OTHERS, SLOW, THREE, Case, pairwise, run


@pytest.mark.parametrize("case", list(pairwise(OTHERS, CHEAP)), ids="-".join)
def test_check(case: Case) -> None:
    run(*case)


# An interrupt inside a `__del__` is ignored, as Python does.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("case", list(pairwise(THREE, SLOW)), ids="-".join)
def test_slow_check(case: Case) -> None:
    run(*case)
