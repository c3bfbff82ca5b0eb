"""Records: small JSON files that end with a checksum over all their bytes.

The last field of a record is its seal: `hiddenscope-sha256:` and 64 hex digits, the
SHA-256 of the file with zeros in the place of the digits. A record is otherwise one
line of JSON with sorted keys, so that the same content is the same bytes, and two
records of the same content are the same file.

The commit of a unit is such a record, which makes the unit visible; complete.json is
the record of all commits. The files of plan/ have lines of JSON, and their checksums
are in the plan.

>>> content = encode_record({"b": 1, "a": "x"})
>>> content[:27], decode(content, "Cannot read it")
(b'{"a":"x","b":1,"seal":"hidd', {'a': 'x', 'b': 1})
>>> decode(content.replace(b"x", b"y"), "Cannot read it")
Traceback (most recent call last):
hiddenscope.errors.Damaged: Cannot read it: its bytes are not those that were written. Run `hiddenscope store verify`.
"""  # noqa: E501

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hiddenscope.errors import Damaged
from hiddenscope.files import UNSEALED
from hiddenscope.store.folder import VERIFY, StoreFolder, is_digest

COMMIT = "hiddenscope.store.commit"
COMPLETE = "hiddenscope.store.complete"

_END = b'"seal":"%s"}\n' % UNSEALED.encode()

Parsed = TypeVar("Parsed")


def plain_json(value: Any) -> bytes:
    """Return one line of JSON in UTF-8, with sorted keys and without spaces.

    Half of a surrogate pair becomes its three bytes.
    """
    line = json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return line.encode("utf-8", "surrogatepass")


def from_json(line: bytes) -> Any:
    """Read what `plain_json` wrote; raise ValueError for what is not JSON."""
    try:
        return json.loads(line.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def encode_record(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of a record with its seal."""
    content, _ = _sealed(plain_json(dict(fields))[:-1] + b",")
    return content


def digest_of(content: bytes) -> str | None:
    """Return the digits of a record's seal, if they are the checksum of its bytes."""
    expected, digest = _sealed(content[: -len(_END)])
    return digest if content == expected else None


def _sealed(start: bytes) -> tuple[bytes, str]:
    """Return a record with its seal, and the digits of that, given all before it."""
    digest = hashlib.sha256(start + _END).hexdigest()
    return start + _END.replace(b"0" * 64, digest.encode()), digest


def decode(content: bytes, problem: str) -> dict[str, Any]:
    """Return the fields of a record without its seal; Damaged if its bytes changed."""
    if digest_of(content) is None:
        raise Damaged(problem, "its bytes are not those that were written", VERIFY)
    try:
        fields = from_json(content)
        del fields["seal"]
    except (TypeError, ValueError) as error:
        reason = f"it is not a JSON object ({str(error)[:100]})"
        raise Damaged(problem, reason, VERIFY) from error
    return dict(fields)


def read_beside(folder: StoreFolder, name: str, sha256: str) -> bytes:
    """Read a file of plan/, checked against its hash in the plan."""
    content = folder.read(folder.texts(name))
    if hashlib.sha256(content).hexdigest() != sha256:
        raise folder.damaged(f"plan/{name}.jsonl is not what the plan was made with")
    return content


def read_lines(
    folder: StoreFolder, name: str, sha256: str, parse: Callable[[Any], Parsed]
) -> list[Parsed]:
    """Read a file of plan/; `parse` raises for a line that is not as it must be."""
    content = read_beside(folder, name, sha256)
    try:
        return [parse(from_json(line)) for line in content.splitlines()]
    except (KeyError, TypeError, ValueError) as error:
        reason = f"plan/{name}.jsonl: {str(error)[:200]}"
        raise folder.damaged(reason) from error


@dataclass(frozen=True)
class Commit:
    """The record of a unit: its plan, and the SHA-256 and the length of its shard.

    `blocks` is the SHA-256 of the table of block checksums at the end of the shard. A
    record holds no time, host or process, so that whoever computes a unit writes the
    same.
    """

    plan: str
    unit: str
    sha256: str
    size: int
    blocks: str

    def encode(self) -> bytes:
        """Return the bytes of commits/<unit>.json."""
        return encode_record({"format": COMMIT, **asdict(self)})


def committed(folder: StoreFolder, plan: str, unit: str) -> Commit:
    """Read the record of a unit, checked by itself and against the plan's digest."""
    problem = f"Cannot read unit {unit} of {folder.shown}"
    fields = decode(folder.read(folder.record(unit)), problem)
    digests = [fields.get(name) for name in ("plan", "sha256", "blocks")]
    if (
        fields.pop("format", None) != COMMIT
        or not all(map(is_digest, digests))
        or type(fields.get("size")) is not int
        or len(fields) != 5
    ):
        raise Damaged(problem, "its record is not one of a unit", VERIFY)
    commit = Commit(**fields)
    _check_plan(commit.plan, plan, problem)
    if commit.unit != unit:
        reason = f"its record is of unit {str(commit.unit)[:20]!r}"
        raise Damaged(problem, reason, VERIFY)
    return commit


def completed(
    folder: StoreFolder, plan: str, units: Collection[str]
) -> dict[str, str] | None:
    """Read the hash of every unit's shard in complete.json; None while there is none.

    It is checked by itself, and against the plan's digest and the names of its units.
    """
    if not os.path.lexists(folder.complete):
        return None
    problem = f"Cannot read {folder.shown}"
    fields = decode(folder.read(folder.complete), problem)
    shards = fields.get("units")
    lists_units = isinstance(shards, dict) and set(shards) == set(units)
    if fields.get("format") != COMPLETE or not lists_units:
        raise folder.damaged("complete.json does not list the units of the plan")
    _check_plan(fields.get("plan"), plan, problem)
    return dict(fields["units"])


def check_complete(
    folder: StoreFolder, shards: Mapping[str, str], commits: Mapping[str, Commit]
) -> None:
    """Refuse a store whose commits are not those that complete.json lists."""
    for unit, sha256 in shards.items():
        if unit not in commits:
            raise folder.damaged(f"the record of unit {unit} is missing")
        if commits[unit].sha256 != sha256:
            what = f"the record of unit {unit}"
            raise folder.damaged(f"{what} is not the one that complete.json lists")


def _check_plan(digest: object, plan: str, problem: str) -> None:
    if digest != plan:
        named = str(digest)[:12]
        raise Damaged(
            problem,
            f"its record is of another plan ({named}), so plan.json was changed",
            "Put back the plan.json that the store was made with.",
        )
