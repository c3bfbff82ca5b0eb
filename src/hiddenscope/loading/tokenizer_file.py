"""A tokenizer.json, checked before it is loaded: one whose steps multiply a text is
refused.

A tokenizer is a list of steps, and each may make its input longer: "replace e by ee",
thirty times in a row, makes a thousand million letters of one, already while the added
tokens are read. So the most that the steps can do together is multiplied out first. The
vocabulary, which is nearly all of the file, is not parsed for it.
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
    """Raise Damaged if the steps of a tokenizer.json can make a text absurdly long;
    that there is none is no fault.
    """
    try:
        steps = _steps(path.read_bytes())
    except (OSError, ValueError, RecursionError, IndexError):
        return  # it is not there, or it is not JSON, which the library says itself
    growth = 1.0
    for name, value in steps:
        if name in ("normalizer", "pre_tokenizer", "decoder"):
            one = _growth(value)
            growth *= one if name != "decoder" else 1
            _refuse_above(
                MOST_GROWTH, one, path, f"its {name} can make one character into {{}}"
            )
        elif name == "post_processor":
            _refuse_above(
                MOST_COPIES,
                _copies(value),
                path,
                "its post_processor can copy a text {} times",
            )
            _refuse_above(
                MOST_SPECIAL,
                _special(value),
                path,
                "its post_processor adds {} special tokens",
            )
        elif name == "padding":
            _refuse_above(
                LONGEST_PADDING,
                _padding(value),
                path,
                "it pads every text to {} tokens",
            )
    _refuse_above(
        MOST_GROWTH, growth, path, "its steps together can make one character into {}"
    )


def _refuse_above(most: int, number: float, path: Path, reason: str) -> None:
    if number > most:
        said = f"{number:,.0f}" if number < 1e24 else f"{number:.0e}"
        remedy = "Use a tokenizer that you trust, or pass the live (module, tokenizer)."
        raise Damaged(f"Cannot load the tokenizer {path}", reason.format(said), remedy)


def _steps(content: bytes) -> list[tuple[str, Any]]:
    """The top-level entries of the file other than the model.

    The model comes last where the library wrote the file, and holds the whole
    vocabulary: it is parsed only if one of the entries could stand behind it.
    """
    model = content.find(b'"model"')
    if model >= 0 and not _more_behind(content, model):
        try:
            return _entries(content[: model + len('"model"')].decode("utf-8"))
        except (ValueError, IndexError):
            pass  # "model" was something else than the name of the entry
    return _entries(content.decode("utf-8"))


def _entries(text: str) -> list[tuple[str, Any]]:
    """The entries of a JSON object, or those before the model where the text ends with
    its name.
    """
    decoder, found = json.JSONDecoder(), list[tuple[str, Any]]()
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        if name == "model" and at == len(text):
            return found
        at = _skip(text, _skip(text, at) + 1)
        value, at = decoder.raw_decode(text, at)
        found.append((name, value))
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _more_behind(content: bytes, at: int) -> bool:
    """Whether an entry with steps may follow, or letters are written as escapes, so
    that this cannot be seen.
    """
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


def _growth(step: Any) -> float:
    """How many characters the steps can make of one, at most."""
    parts = _parts(step)
    if parts:
        return (
            prod(map(_growth, parts), start=1.0) if len(parts) < 2_000 else float("inf")
        )
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Replace":
        return _replaced(step)
    return {"ByteLevel": 4.0, "Metaspace": 2.0}.get(str(kind), 1.0)


def _parts(step: Any) -> list[Any]:
    if not isinstance(step, dict) or step.get("type") != "Sequence":
        return []
    lists = [value for value in step.values() if isinstance(value, list)]
    return [part for parts in lists for part in parts]


def _replaced(step: dict[str, Any]) -> float:
    pattern, content = step.get("pattern"), step.get("content")
    length = len(content) if isinstance(content, str) else 0
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return max(1.0, length / max(1, len(pattern["String"])))
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    return max(1.0, float(length if _takes_a_character(regex) else length + 1))


def _takes_a_character(regex: Any) -> bool:
    """Whether a regular expression never matches nothing; one that Python cannot read
    may.
    """
    try:
        return (
            isinstance(regex, str)
            and re.compile(regex).match("") is None
            and "(?" not in regex
        )
    except (re.error, RecursionError, OverflowError):
        return False


def _copies(step: Any) -> float:
    parts = _parts(step)
    if parts:
        return (
            prod(map(_copies, parts), start=1.0) if len(parts) < 2_000 else float("inf")
        )
    pieces = (
        [step.get(name) for name in ("single", "pair")]
        if isinstance(step, dict)
        else []
    )
    copies = [
        sum(_names_text(piece) for piece in some)
        for some in pieces
        if isinstance(some, list)
    ]
    return max([1, *copies]) if len(copies) < 2 else max(1, copies[0], copies[1] / 2)


def _names_text(piece: Any) -> bool:
    return isinstance(piece, dict) and "Sequence" in piece


def _special(step: Any) -> float:
    """How many special tokens the templates add, each as often as its steps copy it."""
    parts = _parts(step)
    if parts:
        return sum(map(_special, parts))
    if not isinstance(step, dict):
        return 0
    given = step.get("special_tokens")
    known = given if isinstance(given, dict) else {}
    total = 0
    for name in ("single", "pair"):
        pieces = step.get(name)
        for piece in pieces if isinstance(pieces, list) else []:
            token = piece.get("SpecialToken") if isinstance(piece, dict) else None
            entry = (
                known.get(token.get("id"))
                if isinstance(token, dict) and isinstance(token.get("id"), str)
                else None
            )
            ids = entry.get("ids") if isinstance(entry, dict) else None
            total += len(ids) if isinstance(ids, list) else 1
    return total


def _padding(step: Any) -> float:
    if not isinstance(step, dict):
        return 0
    strategy = step.get("strategy")
    numbers = [
        step.get("pad_to_multiple_of"),
        strategy.get("Fixed") if isinstance(strategy, dict) else None,
    ]
    return max([0, *(number for number in numbers if isinstance(number, int))])
