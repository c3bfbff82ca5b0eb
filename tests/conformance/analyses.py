"""Every analysis on one model type: right, truly refused, or a fault.

It is right if it keeps the law that compares it with plain passes (`laws`), and the
cheap checks that every analysis inherits. A refusal is true if plain passes show that
its reason holds (`witnesses`). All else is a fault.
"""

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from laws import LAWS, NothingToCompare, Trial
from torch import nn
from witnesses import witnessed

import hiddenscope as hs
from hiddenscope.testing import CHECKS, Subject, build
from hiddenscope.testing.checks import NotApplicable
from hiddenscope.testing.entries import outcome
from tests.registry import ENTRIES

# Those that say the most for a pass.
CHEAP = (
    "gives_an_answer_or_our_error",
    "numbers_are_finite",
    "sentences_are_sound",
    "a_batch_is_its_texts",
    "float64_agrees",
    "nothing_is_changed",
)
# A type is tried as the first that it has.
TASKS = ("seq2seq-lm", "masked-lm", "causal-lm", "text-encoder", "base")
# The tokenizer of the tiny models has as many.
WORDS = 128


@dataclass(frozen=True)
class Came:
    """What came of one analysis on one type: right, refused or a fault; and why."""

    model_type: str
    name: str
    analysis: str
    verdict: str
    why: str = ""
    said: str = ""
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return it as it stands in a file."""
        return asdict(self)


def chosen(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the row that each type is tried as."""
    by_type: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_type.setdefault(row["model_type"], {})[row["task"]] = row
    first = {}
    for model_type, tasks in by_type.items():
        task = next(task for task in TASKS if task in tasks)
        first[model_type] = tasks[task]
    return first


def subject_of(row: Mapping[str, Any], most: int) -> Subject:
    """Return a type as a subject, with words enough for the texts of subjects."""
    config = dict(row["config"])
    words = config.get("vocab_size")
    if isinstance(words, int):
        config["vocab_size"] = max(words, WORDS)

    def make(seed: int) -> nn.Module:
        return build({**row, "config": config}, seed=seed, most=most)

    return Subject(row["model_type"], make)


def tried(row: Mapping[str, Any], most: int) -> list[Came]:
    """Run every analysis on a type, and say what came of each."""
    torch.manual_seed(0)
    subject, name = subject_of(row, most), row["model_class"]
    try:
        trial = Trial(subject)
        assert trial.model
    except hs.errors.UnknownModel as error:
        return [Came(subject.name, name, "load", "missing", str(error))]
    except hs.errors.AnatomyError as error:
        return [Came(subject.name, name, "load", "refused", error.reason)]
    except Exception as error:
        return [Came(subject.name, name, "load", "fault", _raised(error))]
    came = []
    for word in ENTRIES:
        start = monotonic()
        verdict, why, said = _tried(word, trial)
        seconds = round(monotonic() - start, 2)
        came.append(Came(subject.name, name, word, verdict, why, said, seconds))
    outcome.cache_clear()
    return came


def _tried(word: str, trial: Trial) -> tuple[str, str, str]:
    entry, subject = ENTRIES[word], trial.subject
    found = outcome(entry, subject)
    if isinstance(found.error, hs.errors.Error):
        kind, denied = _of_refusal(trial, found.error)
        said = str(found.error)
        return (
            ("fault", f"{kind}: {denied}", said) if denied else ("refused", kind, said)
        )
    faults = list(_broken(word, trial))
    return ("fault", "; ".join(faults), "") if faults else ("right", "", "")


def _of_refusal(trial: Trial, error: hs.errors.Error) -> tuple[str, str]:
    try:
        return witnessed(trial, error)
    except Exception as raised:
        return "other", f"its witness ends in {_raised(raised)}"


def _broken(word: str, trial: Trial) -> Iterator[str]:
    """Yield what the law of an analysis and the checks find wrong."""
    law = LAWS.get(word)
    if law is not None:
        try:
            wrong = law(trial)
        except NothingToCompare:
            wrong = ""
        except hs.errors.Error as error:
            wrong = f"refused, though the smallest question is answered: {error}"
        except Exception as error:
            wrong = _raised(error)
        if wrong:
            yield f"its law: {wrong}"
    for name in CHEAP:
        try:
            CHECKS[name](ENTRIES[word], trial.subject)
        except NotApplicable:
            continue
        except AssertionError as error:
            yield f"{name}: {str(error)[:300]}"
        except Exception as error:
            yield f"{name}: {_raised(error)}"


def _raised(error: Exception) -> str:
    places = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(place.filename).name}:{place.lineno}" for place in places[-3:]]
    return f"{type(error).__name__}: {str(error)[:200]} ({' '.join(where)})"
