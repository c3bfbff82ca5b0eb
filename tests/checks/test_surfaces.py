"""Commands, requests, pages and docs say of every analysis what Python says."""

from collections.abc import Iterator
from typing import Any

import pytest

from hiddenscope.testing import SUBJECTS
from hiddenscope.testing.checks import NotApplicable
from tests.checks import surfaces
from tests.checks.desk import Desk
from tests.registry import ENTRIES

CHECKS = [name for name in vars(surfaces) if name.startswith("check_")]

# A question for every option.
SLOW = ("check_every_option_reaches_the_analysis",)


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    made = Desk(tmp_path_factory.mktemp("desk"))
    with made.closing:
        yield made


def cases() -> Iterator[Any]:
    for subject in ("llama", "bert", "t5"):
        for word in ENTRIES:
            for check in CHECKS:
                quick = subject == "llama" and check not in SLOW
                marks = () if quick else (pytest.mark.slow,)
                name = check.removeprefix("check_")
                id_ = f"{name}-{word}-{subject}"
                yield pytest.param(check, word, subject, id=id_, marks=marks)


@pytest.mark.parametrize(("check", "word", "subject"), list(cases()))
def test_check(
    check: str,
    word: str,
    subject: str,
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(desk.data)
    try:
        getattr(surfaces, check)(ENTRIES[word], SUBJECTS[subject], desk)
    except NotApplicable:
        pass
