"""Refusals: what is wrong with a request, in sentences for whoever wrote it.

>>> explain([{"type": "missing", "loc": ("body", "lens", "model"), "input": {}}])
'“model” is missing.'
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hiddenscope.app.schemas import MODEL_NAME, SITES
from hiddenscope.arguments import shown
from hiddenscope.errors import Error

# Of a request that cannot be understood, this many problems are listed.
MAX_PROBLEMS = 5
TYPE = re.compile(r"\]$|^constrained-|^[0-9]+$")
ONLY_LOADING = re.compile("Load it with task=.*")
# What the page calls these fields.
LABELS = {"a": "Text A", "b": "Text B", "name": "model"}
PREDICATES = {
    "string_too_short": "is empty",
    "too_short": "is empty",
    "string_too_long": "has more than {max_length:,} characters",
    "too_long": "has more than {max_length:,} entries",
    "greater_than_equal": "must be at least {ge:,.0f}, got {input}",
    "less_than_equal": "must be at most {le:,.0f}, got {input}",
    "finite_number": "must be a finite number, got {input}",
    "string_pattern_mismatch": "cannot be {input}",
    "literal_error": "must be {expected}, got {input}",
    "string_type": "must be text, got {input}",
    "int_type": "must be a whole number, got {input}",
    "int_parsing": "must be a whole number, got {input}",
    "float_type": "must be a number, got {input}",
    "bool_type": "must be true or false, got {input}",
    "missing": "is missing",
    "extra_forbidden": "is not asked for here",
    "value_error": "cannot be answered: {error}",
    "union_tag_invalid": "names an analysis that there is not",
}
PATTERNS = {
    MODEL_NAME: (
        "cannot be {input}: no model has such a name. Choose one of the list, or give a"
        " Hugging Face id such as org/name"
    ),
    SITES: "cannot be {input}: name sites such as layer.3, layer.* or final",
}


def in_page(error: Error) -> str:
    """Return what an error says, with a remedy that the page has.

    >>> in_page(Error("No logits", "it has no head", "Load it with task='causal-lm'."))
    'No logits: it has no head. Choose a model that predicts tokens.'
    """
    return ONLY_LOADING.sub("Choose a model that predicts tokens.", str(error))


def explain(problems: Iterable[Mapping[str, Any]]) -> str:
    """Return the problems that pydantic found, a sentence for each place."""
    by_place: dict[str, Mapping[str, Any]] = {}
    # A value that may be of several types has a problem with each of them. A limit that
    # it exceeds says more than a type that it has not.
    for problem in sorted(
        problems, key=lambda problem: problem["type"].endswith("_type")
    ):
        by_place.setdefault(_place(problem["loc"]), problem)
    sentences = []
    for place, problem in list(by_place.items())[:MAX_PROBLEMS]:
        subject = f"“{place}”" if place else "The request"
        sentences.append(f"{subject} {_predicate(problem)}.")
    return " ".join(sentences)


def _place(location: Iterable[str | int]) -> str:
    """Return the field that a problem is in, as the page calls it."""
    # Types, such as list[constrained-str], say which of several was tried.
    names = [str(part) for part in location if not TYPE.search(str(part))]
    # The first part says where in the request, the second which analysis.
    place = names[-1] if len(names) > 1 else ""
    return LABELS.get(place, place)[:60]


def _predicate(problem: Mapping[str, Any]) -> str:
    details = {**problem.get("ctx", {}), "input": shown(problem.get("input"))}
    words = PREDICATES.get(problem["type"], "cannot be understood")
    words = PATTERNS.get(details.get("pattern", ""), words)
    return words.format(**details)
