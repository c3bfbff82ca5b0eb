"""Entries: an analysis, and how it is asked about a subject.

What an analysis is follows from its declaration: what it takes, whether it takes
stored states, whether it is random, what its model must have. The checks read that,
and so no list says which analysis has which law.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import xarray

import hiddenscope as hs
from hiddenscope.interface import Description
from hiddenscope.testing.subjects import Subject, Unavailable

Ask = Callable[[Subject], Mapping[str, Any]]

# Of the largest number of a variable: two ways to round in float32 differ by less.
ROUNDING = 2e-3

# What is asked of a subject where an analysis requires a parameter of this kind.
_BY_KIND: dict[str, Ask] = {
    "text": lambda subject: {"": subject.texts[0]},
    "texts": lambda subject: {"": subject.texts},
    "contrast": lambda subject: {"": subject.contrasts[0]},
    "pairs": lambda subject: {"": subject.pairs},
    "data": lambda subject: {"": subject.labelled},
    "direction": lambda subject: {"": subject.direction},
    "dictionary": lambda subject: {"": "random"},
    "model": lambda subject: {"": subject.donor},
    "word": lambda subject: {"": "cat"},
}


def nothing(subject: Subject) -> Mapping[str, Any]:
    """Ask for nothing beyond what is required."""
    return {}


@dataclass(frozen=True, eq=False)
class Entry:
    """An analysis under trial.

    `ask` gives the arguments, by name, that differ from what the kinds of the required
    parameters say. `function` is called with them alone. `measures_rounding` are the
    variables that are rounding errors: they are not the same in another dtype.
    `of_all_texts` are those of a token that the other texts have a part in, such as a
    share of the variance of all. `of_copies_too` are numbers of pictures, in which
    copies are drawn though they count once. `up_to_sign` has the variables that are
    directions, or coordinates along them, each with the dimension that one sign holds
    for: which of two opposite directions is given, rounding may decide. `fitted` are
    those of a fit that noise turns as it likes, which bfloat16 is. `seeded` are the
    arguments with which its seed decides, where it does not in the usual question.
    `tolerance` is how near float32 is to float64, as the analysis states: fits that
    stop early are less near than sums.
    """

    function: Callable[..., Any]
    ask: Ask = nothing
    measures_rounding: tuple[str, ...] = ()
    of_all_texts: tuple[str, ...] = ()
    of_copies_too: tuple[str, ...] = ()
    up_to_sign: Mapping[str, str] = field(default_factory=dict)
    fitted: tuple[str, ...] = ()
    seeded: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = ROUNDING

    @property
    def word(self) -> str:
        """The word of the analysis."""
        return self.function.__name__

    @property
    def description(self) -> Description:
        """What it declares."""
        found: Description = getattr(self.function, "description", Description())
        return found

    @property
    def needs(self) -> tuple[Any, ...]:
        """What its model must have, as it declares."""
        return tuple(getattr(self.description, "needs", ()))

    @cached_property
    def model_name(self) -> str:
        """The name of its first parameter: the model, or what stands for it."""
        return next(iter(inspect.signature(self.function).parameters))

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """The kind of each parameter."""
        declared = self.description.parameters
        return {parameter.name: parameter.kind for parameter in declared}

    def takes(self, name: str) -> bool:
        """Tell whether it has a parameter of this name."""
        return name in self.kinds

    @property
    def is_random(self) -> bool:
        """Whether a seed decides some of its numbers."""
        return self.takes("seed")

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """Return the arguments of the usual question about a subject."""
        arguments: dict[str, Any] = {self.model_name: subject.model}
        for parameter in self.description.parameters:
            needed = parameter.required or parameter.kind in ("text", "texts")
            if needed and parameter.positional and parameter.kind in _BY_KIND:
                arguments[parameter.name] = _BY_KIND[parameter.kind](subject)[""]
        arguments |= self.ask(subject)
        texts = arguments.get("texts")
        if self.takes("targets") and "targets" not in arguments:
            count = len(texts) if isinstance(texts, list) else 1
            arguments |= subject.targets(count)
        return arguments

    def run(self, subject: Subject, **changes: Any) -> Any:
        """Ask the usual question, with some arguments changed."""
        return self.function(**{**self.arguments(subject), **changes})


@dataclass(frozen=True)
class Outcome:
    """What a question came to: an answer, or the error in which it ended."""

    answer: Any = None
    error: Exception | None = None

    @property
    def refused(self) -> bool:
        """Whether it ended in an error of ours."""
        return isinstance(self.error, hs.errors.Error)


@cache
def outcome(entry: Entry, subject: Subject) -> Outcome:
    """Ask the usual question once in a process, and keep what it came to."""
    return outcome_of(lambda: entry.run(subject))


def outcome_of(ask: Callable[[], Any]) -> Outcome:
    """Ask, and return the answer or the error."""
    try:
        return Outcome(ask())
    except Unavailable:
        raise
    except Exception as error:  # an analysis may raise anything: that is what is tried
        return Outcome(error=error)


def data_of(answer: Any) -> xarray.Dataset:
    """Return the numbers of an answer as labelled arrays."""
    if isinstance(answer, hs.Result):
        return answer.data
    if isinstance(answer, xarray.Dataset):
        return answer
    array = np.asarray(answer)
    dims = [f"dim_{axis}" for axis in range(array.ndim)]
    return xarray.Dataset({"value": (dims, array)})
