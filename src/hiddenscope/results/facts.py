"""Facts that several kinds of results share."""

from typing import NotRequired, TypedDict


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
