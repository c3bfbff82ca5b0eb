"""StorePlan: what a store is to hold, decided before the first pass and never changed.

The plan names everything that decides a number in the store: the model with the hash of
its weights, the tokenizer, the sites, the dtype, the environment, the corpus, and for
every unit the hash of its texts. A unit is computed anew from the plan alone, and on
like hardware its bytes are the same.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, SiteError, StoreError
from hiddenscope.sites import Site
from hiddenscope.store import records

VERSION = 2  # of a plan that keeps some of the tokens; all others are of version 1
FORMAT = "hiddenscope.store"
DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
"""The dtypes that states may have in a store, and how numpy holds each: bfloat16 as the
bits that it is.
"""

LARGEST = 2**62  # above any number of a text, a token or a batch
_NO_DIGEST = ""


@checked
@dataclass(frozen=True)
class StoreSequence:
    """What the model is given at once: the tokens of one text, or of one window of a
    long document.

    `text` is the number of the text in the corpus, `start` the position of the first
    token in its document, `spans` the characters of each token in the text, and
    `string` the whole text (where start is 0 alone). Sequences with the same `batch`
    run together.

    >>> StoreSequence(0, 0, (5, 6), ((0, 2), (2, 4)), 0, "abcd").to_json()["ids"]
    [5, 6]
    """

    text: int
    start: int
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    batch: int
    string: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can hold."""
        given = {
            "text": self.text,
            "start": self.start,
            "ids": list(self.ids),
            "batch": self.batch,
        }
        given["spans"] = [list(span) for span in self.spans]
        return given if self.string is None else given | {"string": self.string}

    def kept(self, every: int) -> range:
        """The indices of the tokens that are kept where only those at positions 0, n,
        2n of a document are.

        >>> list(StoreSequence(0, 3, (5, 6, 7, 8, 9), ((-1, -1),) * 5, 0).kept(2))
        [1, 3]
        """
        return range(-self.start % every, len(self.ids), every)

    @property
    def string_bytes(self) -> bytes:
        """The text in UTF-8; half of a surrogate pair as its three bytes."""
        return (self.string or "").encode("utf-8", "surrogatepass")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StoreSequence":
        """What `to_json` was made from; ValueError for anything else."""
        spans = tuple((start, end) for start, end in data["spans"])
        ids, string = tuple(data["ids"]), data.get("string")
        numbers, ends = (
            (data["text"], data["start"], data["batch"]),
            [end for span in spans for end in span],
        )
        whole = {type(number) for some in (numbers, ids, ends) for number in some} <= {
            int
        }
        if (
            not whole
            or not all(0 <= number < LARGEST for number in numbers)
            or len(ids) != len(spans)
            or not ids
        ):
            raise ValueError(
                "a sequence needs a text, a start, a batch, and ids with a span for"
                " each"
            )
        if max(*ids, *ends) >= LARGEST or min(*ids, *ends) <= -LARGEST:
            raise ValueError(
                f"an id or a span of text {data['text']} is too large a number"
            )
        if string is not None and not isinstance(string, str):
            raise ValueError(f"the string of text {data['text']} is no string")
        return cls(data["text"], data["start"], ids, spans, data["batch"], string)


@dataclass(frozen=True)
class UnitDigest:
    """One unit in the plan: its number of sequences, tokens and bytes of text, and the
    hash of `plan/<name>.jsonl`.

    plan.json has `rows` for the number of sequences. `kept` is the number of tokens
    that are kept, if not all are.
    """

    name: str
    sequences: int
    tokens: int
    text_bytes: int
    sha256: str
    kept: int | None = None


@checked
@dataclass(frozen=True)
class StorePlan:
    """What a store is to hold.

    `model` has the fields of a `Source` and perhaps more; `corpus` says which texts,
    and `count` in it how many. `pool` is None for a row of states for each token.
    `units`, `duplicates` and `strings` (hashes of the files beside the plan) are filled
    in by `create`. With `every` only the tokens at positions 0, n, 2n of a text are
    kept.

    >>> plan = StorePlan({"model": "toy"}, {}, ("layer.0", "final"), {"layer.0": 4, "final": 4}, "bfloat16")
    >>> StorePlan.decode(plan.encode(), "Cannot read it") == plan, len(plan.digest)
    (True, 64)
    """

    model: dict[str, Any]
    tokenizer: dict[str, Any]
    sites: tuple[str, ...]
    widths: dict[str, int]
    dtype: str
    pool: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    corpus: dict[str, Any] = field(default_factory=dict)
    units: tuple[UnitDigest, ...] = ()
    duplicates: str = _NO_DIGEST
    strings: str = _NO_DIGEST
    every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(map(str, self.sites)))
        problem, remedy = (
            "Cannot make this plan of a store",
            "Give a plan as docs/store-format.md says.",
        )
        described = (self.model, self.tokenizer, self.environment, self.corpus)
        if not all(isinstance(one, dict) for one in described) or not isinstance(
            self.pool, str | None
        ):
            raise StoreError(
                problem,
                "its model, tokenizer, environment and corpus must be objects",
                remedy,
            )
        if self.dtype not in DTYPES:
            raise StoreError(
                problem,
                f"the dtype is {str(self.dtype)[:40]!r}",
                f"It must be {', '.join(DTYPES)}.",
            )
        try:
            parsed = [Site.parse(site) for site in self.sites]
        except SiteError as error:
            raise StoreError(problem, str(error), remedy) from error
        if (
            not parsed
            or parsed != sorted(set(parsed))
            or len({site.stack for site in parsed}) > 1
        ):
            reason = (
                "its sites must be of one stack, each once, in the order of the forward"
                " pass"
            )
            raise StoreError(problem, reason, remedy)
        if set(self.widths) != set(self.sites) or not all(
            _whole(width, 1) for width in self.widths.values()
        ):
            raise StoreError(problem, "it must have a width for each site", remedy)
        if not _whole(self.every, 1) or (self.every > 1 and self.pool is not None):
            raise StoreError(
                problem, "it keeps every n-th token, n from 1 on, or pools them", remedy
            )
        if [unit.name for unit in self.units] != [
            unit_name(number) for number in range(len(self.units))
        ]:
            raise StoreError(
                problem, "its units must be 000000, 000001 and so on", remedy
            )

    @property
    def rows(self) -> int:
        """The number of rows of states: of tokens, or where states are pooled of texts."""
        return sum(self.rows_of(unit) for unit in self.units)

    def rows_of(self, unit: UnitDigest) -> int:
        """The number of rows of states in a unit."""
        return self.tokens_of(unit) if self.pool is None else unit.sequences

    def tokens_of(self, unit: UnitDigest) -> int:
        """The number of tokens that the shard of a unit lists."""
        return unit.tokens if unit.kept is None else unit.kept

    @property
    def version(self) -> int:
        """The version of the format that this plan needs."""
        return 1 if self.every == 1 else 2

    @cached_property
    def by_name(self) -> dict[str, UnitDigest]:
        """The units by their names."""
        return {unit.name: unit for unit in self.units}

    @cached_property
    def digest(self) -> str:
        """The checksum of plan.json, by which every record names its plan."""
        digest = records.digest_of(self.encode())
        assert digest is not None
        return digest

    def encode(self) -> bytes:
        """The bytes of plan.json."""
        units = [_renamed(asdict(unit), "sequences", "rows") for unit in self.units]
        given = {"format": FORMAT, **asdict(self), "version": self.version}
        if self.version == 1:
            del given["every"]
            for unit in units:
                del unit["kept"]
        return records.encode({**given, "units": units})

    @classmethod
    def decode(cls, content: bytes, problem: str) -> "StorePlan":
        """The plan in these bytes; an error for one that was changed, or that a newer
        hiddenscope wrote.
        """
        given = records.decode(content, problem)
        if given.pop("format", None) != FORMAT:
            raise StoreError(
                problem,
                "its plan.json is of something else",
                "Give the folder of a store.",
            )
        version: Any = given.get("version")
        if not _whole(version, 1) or version > VERSION:
            reason = (
                f"it is of version {str(version)[:20]}, and this hiddenscope reads up"
                f" to version {VERSION}"
            )
            raise StoreError(problem, reason, "Install a newer hiddenscope.")
        try:
            del given["version"]
            known = {own.name for own in fields(cls)} - (
                {"every"} if version == 1 else set()
            )
            if set(given) != known:
                raise ValueError(f"its fields are {', '.join(sorted(given))[:200]}")
            units = tuple(_unit(unit, version) for unit in given["units"])
            plan = cls(**given | {"sites": tuple(given["sites"]), "units": units})
            if plan.version != version:
                raise ValueError(f"every is {plan.every}")
            return plan
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(
                problem,
                f"plan.json is not such a plan ({str(error)[:200]})",
                records.VERIFY,
            ) from error

    def filled(
        self, units: Iterable[UnitDigest], duplicates: str, strings: str
    ) -> "StorePlan":
        """This plan with the hashes of the files beside it."""
        return replace(self, units=tuple(units), duplicates=duplicates, strings=strings)

    def differences(self, other: "StorePlan") -> list[str]:
        """Every field in which another plan, which is asked for, differs from this one,
        which is there.
        """
        mine, theirs = dict(_flat(asdict(self))), dict(_flat(asdict(other)))
        units = self.units != other.units
        names = [
            name
            for name in mine | theirs
            if mine.get(name, _ABSENT) != theirs.get(name, _ABSENT)
        ]
        listed = [
            f"{name}: {_shown(mine.get(name, _ABSENT))} there,"
            f" {_shown(theirs.get(name, _ABSENT))} asked"
            for name in names
            if not name.startswith("units")
        ]
        return listed + [_units_differ(self.units, other.units)] if units else listed


_ABSENT = object()


def unit_name(number: int) -> str:
    """The name of a unit.

    >>> unit_name(7)
    '000007'
    """
    return f"{number:06d}"


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _unit(given: Mapping[str, Any], version: int) -> UnitDigest:
    unit = UnitDigest(**_renamed(given, "rows", "sequences"))
    counts = (
        _whole(unit.sequences, 1)
        and _whole(unit.tokens, unit.sequences)
        and _whole(unit.text_bytes, 0)
    )
    if version == 1:
        counts = counts and unit.kept is None
    else:
        counts = counts and _whole(unit.kept, 0) and _whole(unit.tokens, unit.kept or 0)
    if not (counts and records.is_digest(unit.sha256)):
        raise ValueError(f"unit {str(unit.name)[:20]} has no sequences, or no hash")
    return unit


def _renamed(fields: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Fields of a unit with one of them under another name."""
    return {new if name == old else name: value for name, value in fields.items()}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested mappings, by dotted names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _shown(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = (
        value
        if isinstance(value, str) and value.isprintable() and value
        else ascii(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."


def _units_differ(mine: tuple[UnitDigest, ...], theirs: tuple[UnitDigest, ...]) -> str:
    if len(mine) != len(theirs):
        return f"units: {len(mine):,} there, {len(theirs):,} asked"
    differing = [
        one.name for one, other in zip(mine, theirs, strict=True) if one != other
    ]
    return f"texts of {len(differing):,} units, the first is {differing[0]}"
