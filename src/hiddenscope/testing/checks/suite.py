"""Hold one analysis to all laws, and say everything that it breaks at once."""

from collections.abc import Callable, Iterable
from typing import Any

from hiddenscope.testing.checks import CHECKS, NotApplicable
from hiddenscope.testing.entries import Ask, Entry, nothing
from hiddenscope.testing.subjects import SUBJECTS, Subject, Unavailable

# One of each kind: next tokens, masked ones, two stacks, one shared norm, scaled
# embeddings, no config, and no attention.
FIRST = ("llama", "bert", "t5", "phi", "gemma3", "plain", "mamba")


def check_analysis(
    analysis: Callable[..., Any],
    ask: Ask = nothing,
    *,
    subjects: Iterable[Subject] = (),
    dear: bool = False,
) -> None:
    """Hold an analysis to every check on some subjects, and say all that it breaks.

    `ask` gives the arguments, by name, that the analysis is asked with about a subject,
    where its required ones do not follow from their kinds. Without `subjects` these are
    seven; `SUBJECTS` has all. `dear` checks interrupt it at every call, and take
    seconds each.

    >>> import hiddenscope as hs
    >>> check_analysis(hs.embed, subjects=[SUBJECTS["gpt2"]])
    """
    entry = Entry(analysis, ask)
    failures = []
    for subject in subjects or [SUBJECTS[name] for name in FIRST]:
        for check in CHECKS.values():
            if check.dear and not dear:
                continue
            try:
                check(entry, subject)
            except (NotApplicable, Unavailable):
                continue
            except Exception as error:
                what = str(error) or type(error).__name__
                failures.append(f"{check.name} on {subject.name}: {what}")
    if failures:
        listed = "\n  ".join(failures)
        raise AssertionError(f"{entry.word} breaks {len(failures)} laws:\n  {listed}")
