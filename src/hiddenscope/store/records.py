"""Records: small JSON files that end with a checksum over all their bytes.

The last field of a record is its seal: `hiddenscope-sha256:` and 64 hex digits, the
SHA-256 of the file with zeros in the place of the digits. A record is otherwise one
line of JSON with sorted keys, so that the same content is the same bytes, and two
records of the same content are the same file.

>>> content = encode({"b": 1, "a": "x"})
>>> content[:27], decode(content, "Cannot read it")
(b'{"a":"x","b":1,"seal":"hidd', {'a': 'x', 'b': 1})
>>> decode(content.replace(b"x", b"y"), "Cannot read it")
Traceback (most recent call last):
hiddenscope.errors.Damaged: Cannot read it: its bytes are not those that were written. Run `hiddenscope store verify`.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hiddenscope.errors import Damaged
from hiddenscope.files import UNSEALED

VERIFY = "Run `hiddenscope store verify`."
AGAIN = "Run the `hiddenscope extract` that made it again: what is lost is made anew."
_END = b'"seal":"%s"}\n' % UNSEALED.encode()
_DIGITS = 64
_AFTER = len(b'"}\n')


def plain_json(value: Any) -> bytes:
    """One line of JSON: keys sorted, no spaces, UTF-8 (half of a surrogate pair as its
    three bytes).
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
    """What `plain_json` wrote. Raises ValueError for anything that is not JSON."""
    try:
        return json.loads(line.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def encode(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a record with its seal."""
    open_end = plain_json(dict(fields))[:-1]
    content = open_end + (b"," if len(fields) else b"") + _END
    return (
        content[: -_DIGITS - _AFTER]
        + hashlib.sha256(content).hexdigest().encode()
        + content[-_AFTER:]
    )


def digest_of(content: bytes) -> str | None:
    """The digits of a record's seal, if they are the checksum of its bytes."""
    digits = content[-_DIGITS - _AFTER : -_AFTER]
    zeroed = content[: -_DIGITS - _AFTER] + b"0" * _DIGITS + content[-_AFTER:]
    whole = (
        zeroed.endswith(_END) and hashlib.sha256(zeroed).hexdigest().encode() == digits
    )
    return digits.decode() if whole else None


def decode(content: bytes, problem: str) -> dict[str, Any]:
    """The fields of a record, without its seal; Damaged if its bytes changed."""
    if digest_of(content) is None:
        raise Damaged(problem, "its bytes are not those that were written", VERIFY)
    try:
        fields = from_json(content)
    except ValueError as error:
        raise Damaged(
            problem, f"it is not JSON ({str(error)[:100]})", VERIFY
        ) from error
    if not isinstance(fields, dict):
        raise Damaged(problem, "it is not a JSON object", VERIFY)
    return {name: value for name, value in fields.items() if name != "seal"}


def is_digest(value: object) -> bool:
    """Whether a field is 64 hex digits, and so may be part of a file's name."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def lines_of(values: Iterable[Any]) -> bytes:
    """JSON lines."""
    return b"".join(plain_json(value) + b"\n" for value in values)
