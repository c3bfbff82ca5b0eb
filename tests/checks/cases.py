"""Which checks are run when, so that pairs meet soon and triples in the end.

`make test` deals every pair of a check and an analysis out to one of the first three
subjects, and every pair of an analysis and any other subject to one check. `make
test-all` runs every check that is not slow of every analysis on all three, and slow
ones pairwise. `make laws` runs the whole product.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hiddenscope.testing import CHECKS, SUBJECTS, Subject
from hiddenscope.testing.checks import NotApplicable
from hiddenscope.testing.subjects import Unavailable
from tests.checks import oracle as oracle
from tests.registry import ENTRIES

# Next tokens, masked ones, and two stacks.
THREE = ("llama", "bert", "t5")
OTHERS = tuple(name for name in SUBJECTS if name not in THREE)
CHEAP = tuple(name for name, check in CHECKS.items() if not check.slow)
SLOW = tuple(name for name, check in CHECKS.items() if check.slow)

Case = tuple[str, str, str]


def every(subject: str) -> list[Any]:
    """Return every cheap check of every entry on one of the three subjects.

    Two thirds are slow: each pair of a check and an entry is fast on one subject.
    """
    turn = THREE.index(subject)
    cases = []
    for row, word in enumerate(ENTRIES):
        for column, check in enumerate(CHEAP):
            is_turn = (row + column) % len(THREE) == turn
            marks = () if is_turn else pytest.mark.slow
            case = check, word, subject
            cases.append(pytest.param(case, id="-".join(case), marks=marks))
    return cases


def pairwise(subjects: Sequence[str], checks: Sequence[str]) -> Iterator[Case]:
    """Yield as few cases as hold each pair of an entry and a subject.

    Checks are dealt out in turn, so that each meets every subject and every entry.
    """
    for row, subject in enumerate(subjects):
        for column, word in enumerate(ENTRIES):
            yield checks[(7 * row + column) % len(checks)], word, subject


def run(check: str, word: str, subject: str | Subject) -> None:
    """Run a case; what says nothing of an analysis is passed over."""
    chosen = SUBJECTS[subject] if isinstance(subject, str) else subject
    try:
        CHECKS[check](ENTRIES[word], chosen)
    except NotApplicable:
        pass
    except Unavailable as reason:
        pytest.skip(str(reason))
