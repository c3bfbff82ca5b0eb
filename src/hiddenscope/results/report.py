"""Reports: what an analysis found, as a frozen dataclass whose fields have types.

`result.facts` is the plain form of a report, as JSON keeps it. A field with a default
is left out of the facts while it has that value, so that what does not apply is not
there.

>>> @frozen
... class Sizes(Report):
...     texts: int
...     largest: SiteValue | None = None
>>> read_report(Sizes, {"texts": 2, "largest": {"site": "final", "value": 1}})
Sizes(texts=2, largest=SiteValue(site='final', value=1))
>>> read_report(Sizes, {"texts": "two"})
Traceback (most recent call last):
hiddenscope.errors.StatesError: Cannot read the facts: texts is 'two', not int. Compute the result again.
"""  # noqa: E501

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from hiddenscope.arguments import fits, shown
from hiddenscope.errors import StatesError
from hiddenscope.texts.groups import NearDuplicates

Facts: TypeAlias = Mapping[str, Any]
"""The plain form of a report: snake_case keys that its page documents, and values as
JSON keeps them. A site is its name, a tuple a list.
"""

R = TypeVar("R")
# With fewer groups of texts an estimate has no interval: three that agree by chance
# look certain, and a kind that is a third of them is missing from more than 5% of
# samples, of which nothing in a sample tells.
FEWEST_GROUPS = 8

type_hints = cache(get_type_hints)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen(kind: type[R]) -> type[R]:
    """Make a class a frozen dataclass whose fields are given by name.

    Reports, and the parts of reports, are such classes.
    """
    return dataclass(frozen=True, kw_only=True)(kind)


def known(number: float) -> float | None:
    """Return None for NaN, which JSON does not have."""
    return number if number == number else None


class Absent(Enum):
    """The default of a field that may be None in the facts, and may not be there."""

    ABSENT = "absent"

    def __bool__(self) -> bool:
        return False


ABSENT = Absent.ABSENT


@frozen
class Report:
    """What an analysis found."""


@frozen
class Estimate:
    """A number of texts with its 95% interval; None where there is none."""

    value: float
    low: float | None
    high: float | None

    @property
    def side(self) -> int:
        """Return the side of zero on which the whole interval is; 0 if it holds it."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)


@frozen
class Grouped:
    """Which texts belong together, and what speaks against their independence."""

    texts: int = 0
    groups: int = 0
    groups_given: bool | None = None
    copies: int = 0
    near_duplicates: NearDuplicates | None = None
    serial_inflation: float | None = None


@frozen
class MostAt:
    """The largest of some numbers that are not zero, and the sites of them all."""

    most: float
    at: list[str]


@frozen
class Pooled:
    """What rules the vectors of texts, or was left out of them.

    `sinks` of `tokens` are in the vectors if they were `kept`; `massive` vectors are
    over 4 times as long as their median; the numbers of tokens account for
    `length_share` of the variance.
    """

    texts: int
    tokens: int
    kept: bool
    sinks: MostAt | None = None
    massive: MostAt | None = None
    length_share: MostAt | None = None


@frozen
class SiteValue:
    """A number and the site that has it."""

    site: str
    value: float


@frozen
class Extremes:
    """Where a number along the sites is lowest and highest."""

    lowest: SiteValue
    highest: SiteValue
    median: float | None = None


def plain_fields(report: Any) -> dict[str, Any]:
    """Return the fields of a report or of a part of one, without those that have their
    default.
    """
    values = {}
    for field in fields(report):
        value = getattr(report, field.name)
        if field.default is MISSING or value != field.default:
            values[_key(field.name)] = value
    return values


def read_report(kind: type[R], facts: Facts) -> R:
    """Return the report whose plain form these facts are.

    Facts come from files that anyone may have written: what a field cannot hold is
    refused. Facts that the report does not know are passed over.
    """
    report: R = _read(kind, facts, "")
    return report


def _read(kind: Any, value: Any, name: str) -> Any:
    """Return a fact as a field of this type holds it."""
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _read_fields(kind, value, name)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # Read a value as the first of several types that it fits.
        if value is None and NoneType in inner:
            return None
        refusal = None
        for kind in inner:
            try:
                return _read(kind, value, name)
            except StatesError as error:
                refusal = refusal or error
        assert refusal is not None, "a union has members"
        raise refusal
    if origin is list and isinstance(value, list):
        return [_read(inner[0], item, f"{name}[{k}]") for k, item in enumerate(value)]
    if origin is tuple and isinstance(value, list):
        if inner[1:] == (Ellipsis,):
            inner = inner[:1] * len(value)
        if len(value) == len(inner):
            return tuple(map(_read, inner, value, [name] * len(inner)))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {k: _read(inner[1], item, f"{name}.{k}") for k, item in value.items()}
    # A type that has parts was read above, unless the value is of another.
    if origin in (None, Literal) and not is_dataclass(kind) and fits(value, kind):
        return value
    where = name.lstrip(".") or "the whole"
    raise StatesError(
        "Cannot read the facts",
        f"{where} is {shown(value)}, not {getattr(kind, '__name__', kind)}",
        "Compute the result again.",
    )


def _read_fields(kind: Any, value: Facts, name: str) -> Any:
    hints = type_hints(kind)
    values = {}
    for field in fields(kind):
        key = _key(field.name)
        where = f"{name}.{key}"
        if key in value:
            values[field.name] = _read(hints[field.name], value[key], where)
        elif field.default is MISSING:
            raise StatesError(
                "Cannot read the facts",
                f"there is no {where.lstrip('.')}",
                "Compute the result again.",
            )
    return kind(**values)


def _key(name: str) -> str:
    """Return the fact that a field holds; `from_` is `from`, a keyword of Python."""
    return name.rstrip("_")
