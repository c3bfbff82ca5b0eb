"""What a check is: a function of an entry and a subject that raises if its law is
broken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import hiddenscope as hs
from hiddenscope.testing.entries import Entry, Outcome, outcome, outcome_of
from hiddenscope.testing.subjects import Subject

Function = Callable[[Entry, Subject], None]


class NotApplicable(Exception):
    """A law that says nothing of this analysis or of this subject, and why."""


@dataclass(frozen=True)
class Check:
    """A law. A `dear` one takes seconds."""

    function: Function
    dear: bool = False

    @property
    def name(self) -> str:
        """The name of the law: that of its function without `check_`."""
        return self.function.__name__.removeprefix("check_")

    def __call__(self, entry: Entry, subject: Subject) -> None:
        """Try the law, and raise if it is broken."""
        self.function(entry, subject)


CHECKS: dict[str, Check] = {}


def law(*, dear: bool = False) -> Callable[[Function], Function]:
    """Put a function among the checks."""

    def register(function: Function) -> Function:
        check = Check(function, dear)
        CHECKS[check.name] = check
        return function

    return register


def only_if(condition: object, why_not: str) -> None:
    """Stop where the law says nothing."""
    if not condition:
        raise NotApplicable(why_not)


def hold(condition: object, otherwise: str) -> None:
    """Fail where the law is broken."""
    if not condition:
        raise AssertionError(otherwise)


def fail(problem: str) -> NoReturn:
    """Say what is broken."""
    raise AssertionError(problem)


def none_of(problems: list[str], what: str) -> None:
    """Fail with the first problems of a list."""
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        fail(f"{what}: {'; '.join(problems[:4])}{more}")


def answered(entry: Entry, subject: Subject) -> Any:
    """Return the answer to the smallest question, where there is one."""
    return ours(outcome(entry, subject))


def asked(entry: Entry, subject: Subject, **changes: Any) -> Any:
    """Return the answer to the smallest question with other arguments."""
    return ours(outcome_of(lambda: entry.run(subject, **changes)))


def asked_again(entry: Entry, subject: Subject, **changes: Any) -> Any:
    """Return the answer to a question that was answered before, in the same words or in
    others: here a refusal is no excuse.
    """
    came = outcome_of(lambda: entry.run(subject, **changes))
    if came.refused:
        fail(f"it was answered before, and is refused: {came.error}")
    return ours(came)


def ours(came: Outcome) -> Any:
    """Return the answer; what was refused is left to the laws of refusals."""
    if came.refused:
        raise NotApplicable(f"it is refused: {came.error}")
    if came.error is not None:
        raise came.error
    return came.answer


def result_of(entry: Entry, subject: Subject) -> hs.Result:
    """Return the result of the smallest question, where there is one."""
    answer = answered(entry, subject)
    only_if(isinstance(answer, hs.Result), "it gives no Result")
    result: hs.Result = answer
    return result
