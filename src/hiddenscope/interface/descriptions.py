"""The descriptions of all analyses, found by their words.

>>> [parameter.name for parameter in describe("lens").parameters][:3]
['texts', 'k', 'target']
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import cast

from hiddenscope.catalog import ANALYSIS
from hiddenscope.interface import Description, Parameter


@cache
def describe(word: str) -> Description:
    """Return what an analysis says of its parameters; this imports no torch."""
    analysis = ANALYSIS[word]
    if analysis.module.endswith(f"{word}.{word}"):
        module = import_module(f"hiddenscope.analyses.{word}.parameters")
        description: Description = module.DESCRIPTION
        return description
    function = getattr(import_module(f"hiddenscope.{analysis.module}"), word)
    return cast(Description, function.description)


def flattened(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yield the parameters, with their fields in place of those that have fields."""
    for parameter in parameters:
        yield from parameter.fields or (parameter,)
