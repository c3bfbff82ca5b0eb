"""The plan of a store: what it will hold, decided before the first pass.

The plan names everything that decides a number in the store: the model with the hash of
its weights, the tokenizer, the sites, the dtype, the environment, the corpus, and for
every unit the hash of its texts. It never changes. A unit can be computed again from
the plan alone, and on like hardware its bytes are the same.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, SiteError, StoreError
from hiddenscope.files import printable
from hiddenscope.sites import Site
from hiddenscope.store import records
from hiddenscope.store.folder import VERIFY, StoreFolder, is_digest

# Of a plan that stores only some of the tokens; all others are of version 1.
VERSION = 2
FORMAT = "hiddenscope.store"
DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
"""The dtypes of states in a store, as numpy holds them: bfloat16 as its bits."""

# Above any number of a text, a token or a batch.
LARGEST = 2**62
# Differences between two plans that are named.
MAX_DIFFERENCES = 20
_NO_DIGEST = ""


@checked
@dataclass(frozen=True)
class StoreSequence:
    """The tokens of one text, or of one window of a long document.

    `text` is the number of the text in the corpus, `start` the position of the first
    token in its document, `spans` the characters of each token in the text, and
    `string` the whole text (where start is 0 alone). Sequences with the same `batch`
    run together.

    >>> StoreSequence(0, 0, (5, 6), ((0, 2), (2, 4)), 0, "abcd").to_json()["ids"]
    (5, 6)
    """

    text: int
    start: int
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    batch: int
    string: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dict that JSON can hold."""
        record = dict(vars(self))
        if self.string is None:
            del record["string"]
        return record

    def kept(self, every: int) -> range:
        """Return the indices of the tokens at positions 0, n, 2n of the document.

        >>> list(StoreSequence(0, 3, (5, 6, 7, 8, 9), ((-1, -1),) * 5, 0).kept(2))
        [1, 3]
        """
        return range(-self.start % every, len(self.ids), every)

    @property
    def string_bytes(self) -> bytes:
        """Return the text in UTF-8, half of a surrogate pair as its three bytes."""
        return (self.string or "").encode("utf-8", "surrogatepass")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StoreSequence":
        """Read what `to_json` returned; raise ValueError for anything else."""
        numbers = np.array([data["text"], data["start"], data["batch"]])
        ids = np.array(data["ids"])
        spans = np.array(data["spans"])
        string = data.get("string")
        # What does not fit in 64 bits has another dtype, and so has an empty list.
        if (
            {numbers.dtype, ids.dtype, spans.dtype} != {np.dtype(np.int64)}
            or not 0 <= numbers.min() <= numbers.max() < LARGEST
            or ids.ndim != 1
            or spans.shape != (len(ids), 2)
            or not isinstance(string, str | None)
        ):
            raise ValueError(
                "a sequence needs a text, a start, a batch, and ids with a span for"
                " each"
            )
        text, start, batch = numbers.tolist()
        pairs = tuple(map(tuple, spans.tolist()))
        return cls(text, start, tuple(ids.tolist()), pairs, batch, string)


@dataclass(frozen=True)
class UnitDigest:
    """One unit in the plan: what it holds, and the hash of `plan/<name>.jsonl`.

    `sequences` are called `rows` in plan.json. `kept` is the number of tokens whose
    states are stored; version 1, in which all are, does not write it.
    """

    name: str
    sequences: int
    tokens: int
    text_bytes: int
    sha256: str
    kept: int


@checked
@dataclass(frozen=True)
class StorePlan:
    """The plan of a store.

    `model` has the fields of a `Source` and perhaps more; `corpus` says which texts,
    and `count` in it how many. `pool` is None for a row of states for each token.
    `units`, `duplicates` and `strings` (hashes of the files beside the plan) are filled
    in by `create`. With `every` only the tokens at positions 0, n, 2n of a text are
    stored.

    >>> plan = StorePlan({"model": "toy"}, {}, ("final",), {"final": 4}, "bfloat16")
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
        reason = self._fault()
        if reason:
            raise StoreError(
                "Cannot make this plan of a store",
                reason,
                "Give a plan as docs/store-format.md says.",
            )

    def _fault(self) -> str:
        """Say what the plan lacks; empty for a sound plan."""
        if self.dtype not in DTYPES:
            return f"its dtype is {str(self.dtype)[:40]!r}, and not one of a store"
        records_of = (self.model, self.tokenizer, self.environment, self.corpus)
        are_records = all(isinstance(record, dict) for record in records_of)
        if not are_records or not isinstance(self.pool, str | None):
            return "its model, tokenizer, environment and corpus must be objects"
        try:
            sites = [Site.parse(site) for site in self.sites]
        except SiteError as error:
            return str(error)
        stacks = {site.stack for site in sites}
        if len(stacks) != 1 or sites != sorted(set(sites)):
            return (
                "its sites must be of one stack, each once, in the order of the forward"
                " pass"
            )
        have_widths = all(_is_integer(width, 1) for width in self.widths.values())
        if set(self.widths) != set(self.sites) or not have_widths:
            return "it must have a width for each site"
        if not _is_integer(self.every, 1) or (self.every > 1 and self.pool is not None):
            return "it keeps every n-th token, n from 1 on, or pools them"
        names = [unit_name(number) for number in range(len(self.units))]
        if [unit.name for unit in self.units] != names:
            return "its units must be 000000, 000001 and so on"
        return ""

    @property
    def rows(self) -> int:
        """Return the number of rows of states: tokens, or pooled texts and windows."""
        return sum(self.rows_of(unit) for unit in self.units)

    def rows_of(self, unit: UnitDigest) -> int:
        """Return the number of rows of states in a unit."""
        return unit.kept if self.pool is None else unit.sequences

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, a token's or a pooled one, at all sites."""
        return sum(self.widths.values()) * DTYPES[self.dtype].itemsize

    @property
    def version(self) -> int:
        """Return the version of the format that this plan needs."""
        return 1 if self.every == 1 else 2

    @cached_property
    def by_name(self) -> dict[str, UnitDigest]:
        """Return the units by their names."""
        return {unit.name: unit for unit in self.units}

    @cached_property
    def digest(self) -> str:
        """Return the checksum of plan.json, by which every record names its plan."""
        digest = records.digest_of(self.encode())
        assert digest is not None
        return digest

    def encode(self) -> bytes:
        """Return the bytes of plan.json."""
        record = {"format": FORMAT, **asdict(self), "version": self.version}
        for unit in record["units"]:
            unit["rows"] = unit.pop("sequences")
        if self.version == 1:
            del record["every"]
            for unit in record["units"]:
                del unit["kept"]
        return records.encode_record(record)

    @classmethod
    def decode(cls, content: bytes, problem: str) -> "StorePlan":
        """Read a plan; refuse one that was changed, or is of a newer hiddenscope."""
        record = records.decode(content, problem)
        if record.pop("format", None) != FORMAT:
            raise StoreError(
                problem,
                "its plan.json is of something else",
                "Give the folder of a store.",
            )
        version: Any = record.pop("version", None)
        if not _is_integer(version, 1) or version > VERSION:
            reason = (
                f"it is of version {str(version)[:20]}, and this hiddenscope reads up"
                f" to version {VERSION}"
            )
            raise StoreError(problem, reason, "Install a newer hiddenscope.")
        try:
            known = {plan_field.name for plan_field in fields(cls)}
            if version == 1:
                known.remove("every")
            if set(record) != known:
                raise ValueError(f"its fields are {', '.join(sorted(record))[:200]}")
            record["units"] = tuple(_unit(unit, version) for unit in record["units"])
            plan = cls(**record)
            if plan.version != version:
                raise ValueError(f"every is {plan.every}")
            return plan
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(
                problem,
                f"plan.json is not such a plan ({str(error)[:200]})",
                VERIFY,
            ) from error

    def check_same(self, requested: "StorePlan", store: str) -> None:
        """Refuse to go on with a store of this plan where another one is requested."""
        here, there = map(_flattened, (self, requested))
        lines = []
        for name in here | there:
            stored = here.get(name, "nothing")
            other = there.get(name, "nothing")
            if stored != other and name != "units":
                lines.append(f"{name}: {_shown(stored)} there, {_shown(other)} asked")
        counts = len(self.units), len(requested.units)
        if counts[0] != counts[1]:
            lines.append(f"units: {counts[0]:,} there, {counts[1]:,} asked")
        elif self.units != requested.units:
            pairs = zip(self.units, requested.units, strict=True)
            names = [unit.name for unit, other_unit in pairs if unit != other_unit]
            lines.append(f"texts of {len(names):,} units, the first is {names[0]}")
        if lines:
            raise StoreError(
                f"Cannot go on with {store}: it was started with other settings",
                "; ".join(lines[:MAX_DIFFERENCES]),
                "Give another folder, or ask for the same as before.",
            )


def unit_name(number: int) -> str:
    """Return the name of a unit.

    >>> unit_name(7)
    '000007'
    """
    return f"{number:06d}"


def _is_integer(value: object, lower_bound: int) -> bool:
    # Not isinstance: True and False are integers too.
    return type(value) is int and value >= lower_bound


def _unit(record: dict[str, Any], version: int) -> UnitDigest:
    if version == 1:
        # A field of this name is then refused, being there twice.
        unit = UnitDigest(sequences=record.pop("rows"), kept=record["tokens"], **record)
    else:
        unit = UnitDigest(sequences=record.pop("rows"), **record)
    if not (
        _is_integer(unit.sequences, 1)
        and _is_integer(unit.tokens, unit.sequences)
        and _is_integer(unit.kept, 0)
        and unit.kept <= unit.tokens
        and _is_integer(unit.text_bytes, 0)
        and is_digest(unit.sha256)
    ):
        raise ValueError(f"unit {str(unit.name)[:20]} has no sequences, or no hash")
    return unit


def _flattened(plan: StorePlan) -> dict[str, Any]:
    """Return the fields of a plan by dotted names, as they are when it is read."""
    flat = {}

    def flatten(value: Any, name: str) -> None:
        if not isinstance(value, dict) or not value:
            flat[name] = value
            return
        for key, inner in value.items():
            flatten(inner, f"{name}.{key}".removeprefix("."))

    flatten(records.from_json(records.plain_json(asdict(plan))), "")
    return flat


def _shown(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def read_plan(folder: StoreFolder) -> StorePlan:
    """Read the plan of a store."""
    return StorePlan.decode(folder.read(folder.plan), f"Cannot open {folder.shown}")


def read_sequences(folder: StoreFolder, unit: UnitDigest) -> list[StoreSequence]:
    """Return the sequences of a unit, checked against the plan."""
    sequences = records.read_lines(
        folder, unit.name, unit.sha256, StoreSequence.from_json
    )
    tokens = sum(len(sequence.ids) for sequence in sequences)
    if (len(sequences), tokens) != (unit.sequences, unit.tokens):
        reason = (
            f"it has {len(sequences):,} sequences of {tokens:,} tokens, and plan.json"
            " says otherwise"
        )
        raise folder.damaged(f"plan/{unit.name}.jsonl: {reason}")
    return sequences


def read_copies(folder: StoreFolder, plan: StorePlan) -> dict[int, int]:
    """Read which earlier text each copy is a copy of, checked against the plan."""

    def parse(line: Any) -> tuple[int, int]:
        text, original = line["text"], line["same_as"]
        if not _is_integer(original, 0) or not _is_integer(text, original + 1):
            raise ValueError("a line names no text and an earlier one")
        if text >= LARGEST:
            raise ValueError(f"text {text} is too large a number")
        return text, original

    pairs = records.read_lines(folder, "duplicates", plan.duplicates, parse)
    copies = dict(pairs)
    if len(copies) < len(pairs) or copies.keys() & set(copies.values()):
        reason = "a text is there twice, or is a copy of a copy"
        raise folder.damaged(f"plan/duplicates.jsonl: {reason}")
    return copies


def read_strings(folder: StoreFolder, plan: StorePlan) -> dict[int, str]:
    """Read the strings of token ids, checked against the plan."""

    def parse(line: Any) -> tuple[int, str]:
        number, string = line
        if type(number) is not int or not isinstance(string, str):
            raise ValueError("a line has no id and its string")
        return number, string

    return dict(records.read_lines(folder, "strings", plan.strings, parse))
