"""Hold one analysis to all laws, and say everything that it breaks at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hiddenscope.testing.checks import CHECKS, Check, NotApplicable
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
    slow: bool = False,
) -> None:
    """Hold an analysis to the checks on some subjects, and say all that it breaks.

    `ask` gives the arguments, by name, that the analysis is asked with about a subject,
    where its required ones do not follow from their kinds. Without `subjects` these are
    seven; `SUBJECTS` has all. `slow` adds the checks that take seconds each, such as an
    interrupt at every call.

    >>> import hiddenscope as hs
    >>> check_analysis(hs.embed, subjects=[SUBJECTS["gpt2"]])
    """
    entry = Entry(analysis, ask)
    subjects = list(subjects) or [SUBJECTS[name] for name in FIRST]
    failures = []
    for check in CHECKS.values():
        if check.slow and not slow:
            continue
        broken = [*_broken(check, entry, subjects)]
        if broken:
            law = " ".join((check.function.__doc__ or "").split())
            failures.append("\n    ".join([f"{check.name}: {law}", *broken]))
    if failures:
        listed = "\n  ".join(failures)
        raise AssertionError(f"{entry.word} breaks {len(failures)} laws:\n  {listed}")


def _broken(check: Check, entry: Entry, subjects: Iterable[Subject]) -> Iterator[str]:
    """Yield what is wrong by a law, with the subjects that show it."""
    by_problem: dict[str, list[str]] = {}
    for subject in subjects:
        try:
            check(entry, subject)
        except (NotApplicable, Unavailable):
            continue
        except Exception as error:
            problem = str(error) or type(error).__name__
            by_problem.setdefault(problem, []).append(subject.name)
    for problem, names in by_problem.items():
        yield f"on {', '.join(names)}: {problem}"
