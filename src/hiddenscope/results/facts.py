"""Facts that several kinds of results share."""

from typing import NotRequired, TypedDict


class SiteValueFacts(TypedDict):
    """A number and the site that has it."""

    site: str
    value: float


class ExtremesFacts(TypedDict):
    """Where a number along the sites is lowest and highest."""

    lowest: SiteValueFacts
    highest: SiteValueFacts
    median: NotRequired[float]
