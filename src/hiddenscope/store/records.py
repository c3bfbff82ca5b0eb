"""Records: small JSON files that end with a checksum over all their bytes.

The last field of a record is its seal: `hiddenscope-sha256:` and 64 hex digits, the
SHA-256 of the file with zeros in the place of the digits. A record is otherwise one
line of JSON with sorted keys, so that the same content is the same bytes, and two
records of the same content are the same file.

>>> content = encode_record({"b": 1, "a": "x"})
>>> content[:27], decode(content, "Cannot read it")
(b'{"a":"x","b":1,"seal":"hidd', {'a': 'x', 'b': 1})
>>> decode(content.replace(b"x", b"y"), "Cannot read it")
Traceback (most recent call last):
hiddenscope.errors.Damaged: Cannot read it: its bytes are not those that were written. Run `hiddenscope store verify`.
"""  # noqa: E501

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from hiddenscope.errors import Damaged
from hiddenscope.files import UNSEALED

VERIFY = "Run `hiddenscope store verify`."
AGAIN = "Run the `hiddenscope extract` that made it again: what is lost is made anew."
_END = b'"seal":"%s"}\n' % UNSEALED.encode()
_DIGITS = 64
_AFTER = len(b'"}\n')


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
    content = plain_json(dict(fields))[:-1]
    if fields:
        content += b","
    content += _END
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[: -_DIGITS - _AFTER] + digest + content[-_AFTER:]


def digest_of(content: bytes) -> str | None:
    """Return the digits of a record's seal, if they are the checksum of its bytes."""
    digits = content[-_DIGITS - _AFTER : -_AFTER]
    zeroed = content[: -_DIGITS - _AFTER] + b"0" * _DIGITS + content[-_AFTER:]
    digest = hashlib.sha256(zeroed).hexdigest()
    if not zeroed.endswith(_END) or digest.encode() != digits:
        return None
    return digest


def decode(content: bytes, problem: str) -> dict[str, Any]:
    """Return the fields of a record without its seal; Damaged if its bytes changed."""
    if digest_of(content) is None:
        raise Damaged(problem, "its bytes are not those that were written", VERIFY)
    try:
        fields = from_json(content)
    except ValueError as error:
        reason = f"it is not JSON ({str(error)[:100]})"
        raise Damaged(problem, reason, VERIFY) from error
    if not isinstance(fields, dict):
        raise Damaged(problem, "it is not a JSON object", VERIFY)
    fields.pop("seal", None)
    return fields


def is_digest(value: object) -> bool:
    """Tell whether a field is 64 hex digits, and so may be part of a file's name."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
