"""What a check is: a function of an entry and a subject that raises if its law is
broken.

An entry is an analysis with the arguments that it is asked with. Its usual question
has only those that it requires. A question is refused where it ends in an error of
hiddenscope's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import hiddenscope as hs
from hiddenscope.testing.entries import Entry, Outcome, outcome, outcome_of
from hiddenscope.testing.subjects import Subject

Function = Callable[[Entry, Subject], None]


class NotApplicable(Exception):
    """Raised where a law says nothing of this analysis or of this subject, with why."""


@dataclass(frozen=True)
class Check:
    """A registered law. Each `slow` one takes seconds."""

    function: Function
    slow: bool = False

    @property
    def name(self) -> str:
        """The name of the law: that of its function without `check_`."""
        return self.function.__name__.removeprefix("check_")

    def __call__(self, entry: Entry, subject: Subject) -> None:
        """Try the law, and raise if it is broken."""
        self.function(entry, subject)


CHECKS: dict[str, Check] = {}


def law(*, slow: bool = False) -> Callable[[Function], Function]:
    """Put a function among the checks."""

    def register(function: Function) -> Function:
        check = Check(function, slow)
        CHECKS[check.name] = check
        return function

    return register


def only_if(condition: object, why_not: str) -> None:
    """Stop where the law says nothing."""
    if not condition:
        raise NotApplicable(why_not)


def hold(condition: object, otherwise: str) -> None:
    """Fail unless a condition holds."""
    if not condition:
        raise AssertionError(otherwise)


def fail(problem: str) -> NoReturn:
    """Raise AssertionError, saying what is broken."""
    raise AssertionError(problem)


def none_of(problems: list[str], what: str) -> None:
    """Fail if there are problems, with the first four."""
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        fail(f"{what}: {'; '.join(problems[:4])}{more}")


def usual_answer(entry: Entry, subject: Subject) -> Any:
    """Return the answer to the usual question; stop where that is refused."""
    return answer_of(outcome(entry, subject))


def answer_to(entry: Entry, subject: Subject, **changes: Any) -> Any:
    """Return the answer to a changed question; stop where it is refused."""
    return answer_of(outcome_of(lambda: entry.run(subject, **changes)))


def required_answer(entry: Entry, subject: Subject, **changes: Any) -> Any:
    """Return the answer to a question that was answered before, perhaps in another
    form; fail where it is refused.
    """
    came = outcome_of(lambda: entry.run(subject, **changes))
    if came.refused:
        fail(f"it was answered before, and is refused: {came.error}")
    return answer_of(came)


def answer_of(came: Outcome) -> Any:
    """Return the answer of an outcome; what was refused is left to other laws."""
    if came.refused:
        raise NotApplicable(f"it is refused: {came.error}")
    if came.error is not None:
        raise came.error
    return came.answer


def result_of(entry: Entry, subject: Subject) -> hs.Result:
    """Return the result of the usual question, where there is one."""
    answer = usual_answer(entry, subject)
    only_if(isinstance(answer, hs.Result), "it gives no Result")
    result: hs.Result = answer
    return result
