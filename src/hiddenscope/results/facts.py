"""Facts: what an analysis found, for programs.

`analyses/<word>/facts.py` lists the facts of one kind of result. Here is what several
kinds share. Values are as a result keeps them: a site is its name, a tuple a list.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypeAlias, TypedDict

Facts: TypeAlias = Mapping[str, Any]
"""The facts of any kind: snake_case keys that its page documents, and values as JSON
keeps them.
"""


class NearDuplicateFacts(TypedDict):
    """Texts of different groups that nearly repeat one another."""

    texts: int
    of: int
    example: list[str]


class GroupFacts(TypedDict, total=False):
    """Which texts belong together, and what speaks against their independence."""

    texts: int
    groups: int
    groups_given: bool
    copies: int
    near_duplicates: NearDuplicateFacts
    serial_inflation: float


class SiteValueFacts(TypedDict):
    """A number and the site that has it."""

    site: str
    value: float


class ExtremesFacts(TypedDict):
    """Where a number along the sites is lowest and highest."""

    lowest: SiteValueFacts
    highest: SiteValueFacts
    median: NotRequired[float]
