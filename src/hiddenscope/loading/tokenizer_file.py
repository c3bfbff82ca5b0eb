"""Refuse a tokenizer.json whose steps would multiply a text, before it is loaded.

A tokenizer is a list of steps, and each may lengthen its input: "replace e by ee",
thirty times in a row, turns one letter into a billion, even while the added tokens are
read. So the growth of all steps is multiplied out first. The vocabulary, nearly all of
the file, is not parsed for that.
"""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

from hiddenscope.errors import Damaged

MOST_GROWTH = 4_096
MOST_COPIES = 64
MOST_SPECIAL = 10_000
LONGEST_PADDING = 2**24
MOST_PARTS = 2_000
_STEPS = (
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "padding",
    "added_tokens",
)
_SPACE = re.compile(r"[ \t\r\n]*")
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
_VALUE = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*[{\[]")


def check_tokenizer_file(path: Path) -> None:
    """Raise Damaged if the steps of a tokenizer.json can make a text absurdly long."""
    try:
        steps = _steps(path.read_bytes())
    except (OSError, ValueError, RecursionError, IndexError):
        # A missing file is no fault, and the library reports what is not JSON.
        return
    growth = 1.0
    for name, value in steps:
        if name in ("normalizer", "pre_tokenizer", "decoder"):
            factor = _growth(value)
            reason = f"its {name} can make one character into {{}}"
            _refuse_above(MOST_GROWTH, factor, path, reason)
            # A decoder runs on the way back, after the other steps.
            if name != "decoder":
                growth *= factor
        elif name == "post_processor":
            reason = "its post_processor can copy a text {} times"
            _refuse_above(MOST_COPIES, _copies(value), path, reason)
            reason = "its post_processor adds {} special tokens"
            _refuse_above(MOST_SPECIAL, _special(value), path, reason)
        elif name == "padding":
            reason = "it pads every text to {} tokens"
            _refuse_above(LONGEST_PADDING, _padding(value), path, reason)
    reason = "its steps together can make one character into {}"
    _refuse_above(MOST_GROWTH, growth, path, reason)


def _refuse_above(limit: int, number: float, path: Path, reason: str) -> None:
    if number <= limit:
        return
    shown = f"{number:,.0f}" if number < 1e24 else f"{number:.0e}"
    remedy = "Use a tokenizer that you trust, or pass the live (module, tokenizer)."
    raise Damaged(f"Cannot load the tokenizer {path}", reason.format(shown), remedy)


def _steps(content: bytes) -> list[tuple[str, object]]:
    """Return the top-level entries of the file other than the model.

    The model holds the whole vocabulary, and the library writes it last: it is parsed
    only if one of the entries could stand behind it.
    """
    model = content.find(b'"model"')
    if model >= 0 and not _more_behind(content, model):
        try:
            return _entries(content[: model + len('"model"')].decode("utf-8"))
        except (ValueError, IndexError):
            # This "model" was not the name of the entry.
            pass
    return _entries(content.decode("utf-8"))


def _entries(text: str) -> list[tuple[str, object]]:
    """Return the entries of a JSON object, up to the model if the text ends there."""
    decoder = json.JSONDecoder()
    entries: list[tuple[str, object]] = []
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        if name == "model" and at == len(text):
            return entries
        at = _skip(text, _skip(text, at) + 1)
        value, at = decoder.raw_decode(text, at)
        entries.append((name, value))
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return entries


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _more_behind(content: bytes, at: int) -> bool:
    """Tell whether an entry with steps may follow."""
    # Names written with escapes cannot be searched for.
    if content.find(b"\\u00", at) >= 0 and _ESCAPED_LETTER.search(content, at):
        return True
    for name in _STEPS:
        quoted = f'"{name}"'.encode()
        place = content.find(quoted, at)
        while place >= 0:
            if _VALUE.match(content, place + len(quoted)):
                return True
            place = content.find(quoted, place + 1)
    return False


def _growth(step: object) -> float:
    """Return how many characters the steps can make of one, at most."""
    parts = _parts(step)
    if len(parts) >= MOST_PARTS:
        return float("inf")
    if parts:
        return prod(map(_growth, parts), start=1.0)
    if not isinstance(step, dict):
        return 1.0
    if step.get("type") == "Replace":
        return _replaced(step)
    return {"ByteLevel": 4.0, "Metaspace": 2.0}.get(str(step.get("type")), 1.0)


def _parts(step: object) -> list[object]:
    if not isinstance(step, dict) or step.get("type") != "Sequence":
        return []
    parts = []
    for value in step.values():
        if isinstance(value, list):
            parts += value
    return parts


def _replaced(step: dict[str, Any]) -> float:
    pattern, content = step.get("pattern"), step.get("content")
    length = 0
    if isinstance(content, str):
        length = len(content)
    if not isinstance(pattern, dict):
        pattern = {}
    if isinstance(pattern.get("String"), str):
        return max(1.0, length / max(1, len(pattern["String"])))
    # What matches the empty string is put beside every character, not in its place.
    if not _consumes_a_character(pattern.get("Regex")):
        length += 1
    return max(1.0, float(length))


def _consumes_a_character(regex: object) -> bool:
    """Tell whether a regular expression surely never matches the empty string."""
    if not isinstance(regex, str) or "(?" in regex:
        return False
    try:
        return re.compile(regex).match("") is None
    except (re.error, RecursionError, OverflowError):
        return False


def _copies(step: object) -> float:
    parts = _parts(step)
    if len(parts) >= MOST_PARTS:
        return float("inf")
    if parts:
        return prod(map(_copies, parts), start=1.0)
    # A template for two texts names both of them, so each is copied half as often.
    single = sum("Sequence" in piece for piece in _template(step, "single"))
    pair = sum("Sequence" in piece for piece in _template(step, "pair"))
    return max(1, single, pair / 2)


def _template(step: object, name: str) -> list[dict[str, Any]]:
    """Return the pieces of a template that are objects; others add nothing."""
    if not isinstance(step, dict) or not isinstance(step.get(name), list):
        return []
    return [piece for piece in step[name] if isinstance(piece, dict)]


def _special(step: object) -> float:
    """Count the special tokens that the templates add."""
    parts = _parts(step)
    if parts:
        return sum(map(_special, parts))
    if not isinstance(step, dict):
        return 0
    total = 0
    for name in ("single", "pair"):
        for piece in _template(step, name):
            if "Sequence" not in piece:
                total += _ids(step.get("special_tokens"), piece)
    return total


def _ids(special_tokens: object, piece: dict[str, Any]) -> int:
    """Count the ids of a special token; a token that is not listed has one."""
    match special_tokens, piece.get("SpecialToken"):
        case dict(), {"id": str(name)}:
            entry = special_tokens.get(name)
        case _:
            return 1
    match entry:
        case {"ids": list(ids)}:
            return len(ids)
        case _:
            return 1


def _padding(step: object) -> float:
    if not isinstance(step, dict):
        return 0
    lengths = [step.get("pad_to_multiple_of")]
    strategy = step.get("strategy")
    if isinstance(strategy, dict):
        lengths.append(strategy.get("Fixed"))
    return max([length for length in lengths if isinstance(length, int)], default=0)
