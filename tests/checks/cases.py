"""Which checks are run when: every check on three subjects, and each pair once.

`make test` runs every check that is not dear on the first three subjects, and on the
others as many as it takes that every entry meets every subject, and every check both.
`make test-all` runs every pair of a check and a subject, and of an entry and a check,
dear ones too; `make laws` runs the whole product.
"""

from collections.abc import Iterator, Sequence

import pytest

from hiddenscope.testing import CHECKS, SUBJECTS, Subject
from hiddenscope.testing.checks import NotApplicable
from hiddenscope.testing.subjects import Unavailable
from tests.registry import ENTRIES

# Next tokens, masked ones, and two stacks.
THREE = ("llama", "bert", "t5")
OTHERS = tuple(name for name in SUBJECTS if name not in THREE)
CHEAP = tuple(name for name, check in CHECKS.items() if not check.dear)
DEAR = tuple(name for name, check in CHECKS.items() if check.dear)

Case = tuple[str, str, str]


def every(subject: str) -> Iterator[Case]:
    """Yield every cheap check of every entry on one subject."""
    for word in ENTRIES:
        for check in CHEAP:
            yield check, word, subject


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
