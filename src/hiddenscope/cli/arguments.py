"""What the words of a command line stand for: one rule for every command, applied
before torch is imported.

    "A text."     a positional argument is a text
    @FILE         the texts of a file: .txt (one per line), .jsonl, .csv, .tsv, .parquet; `--text` names the column
    -, @-.csv     the lines of stdin, or a table on stdin; -.csv is understood too
    @@name        the text "@name"

An argument that is the path of a file, or looks like one, is an error that says how to
read it: the states of the words `corpus.txt` are never what was meant. Where only a
file makes sense (a dataset, a source to search), the @ may be left out.

>>> texts_in(["A text.", "@@name"])
['A text.', '@name']
>>> texts_in(["corpus.txt"])
Traceback (most recent call last):
hiddenscope.errors.TextError: 'corpus.txt' looks like a file: an argument is a text. Write @corpus.txt to read a file.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hiddenscope import texts as reader
from hiddenscope.errors import FileError, LoadError, TextError
from hiddenscope.texts import COMPRESSIONS, FORMATS, Labelled, is_file

# Files that hold states or vectors in place of texts.
VECTORS = (
    ".safetensors",
    ".npy",
)
DOCUMENTS = (
    ".json",
    ".md",
    ".rst",
    ".html",
    ".htm",
    ".xml",
    ".yaml",
    ".yml",
    ".log",
    ".pdf",
    ".doc",
    ".docx",
    ".xlsx",
)
PROGRAMS = (".py", ".ipynb", ".gguf", ".npz", ".nc", ".arrow", ".zip")
SUFFIXES = {*FORMATS, *COMPRESSIONS, *VECTORS, *DOCUMENTS, *PROGRAMS}
DEVICE = re.compile(r"(?:cpu|cuda|mps|xpu|hpu|npu|mtia|ipu|xla|auto)(?::[0-9]+)?")
DTYPE = re.compile(
    r"(?:torch\.)?(?:(?:b?float|b?f|b?fp)(?:16|32|64)?|half|double|auto|float8_\w+)"
)
STDIN = re.compile(r"-(?:\.\w+)+")


@dataclass(frozen=True)
class TextRule:
    """Marks an argument that holds texts: the command is given the texts themselves.

    `many` texts may come from `--texts FILE` too, unless the command has a use of its
    own for that option. They are `required`, or may be left out. With `vectors` a file
    may hold states or vectors: the command is given its path. `beside_states` texts are
    wanted with `--states` too, as queries are; others are those of the states.
    """

    many: bool = True
    file_option: bool = True
    required: bool = True
    vectors: bool = False
    beside_states: bool = False


def texts_in(
    words: Sequence[str],
    file: str | None = None,
    column: str | None = None,
    rule: TextRule | None = None,
) -> list[str] | Path:
    """The texts that the words of an argument and `--texts` stand for, or the path of a
    file of states or vectors.
    """
    rule = rule or TextRule()
    words = [*words, *([] if file is None else [f"@{file.removeprefix('@')}"])]
    files = [word for word in words if _is_source(word)]
    if column is not None and not files:
        reason = "it is a column of a file, and no file is given"
        raise TextError(
            f"Cannot use --text {column}",
            reason,
            "Give one as @FILE, or leave --text out.",
        )
    if (
        rule.vectors
        and len(words) == 1
        and files
        and Path(words[0]).suffix.lower() in VECTORS
    ):
        return Path(words[0][1:])
    if not words and rule.required:
        remedy = "Give texts, @FILE to read a file, or - to read stdin."
        raise TextError("No texts", "none was given", remedy)
    return [text for word in words for text in _texts_of(word, column)]


def text_in(word: str) -> str:
    """The one text that a word stands for."""
    found = _texts_of(word, None)
    if len(found) != 1:
        remedy = "Give one text: a file with one line, or the text itself."
        raise TextError(
            f"Cannot take one text from {word!r}", f"it holds {len(found):,}", remedy
        )
    return found[0]


def dataset(
    name: str,
    text: str | None = None,
    label: str | None = None,
    group: str | None = None,
) -> Labelled:
    """Read a dataset: a shipped name, a file, or stdin."""
    return reader.read(_opened(name), text=text, label=label, group=group)


def shipped() -> list[str]:
    """The names of the shipped datasets, for a shell to complete."""
    return list(reader.shipped())


def check_place(device: str | None, dtype: str | None) -> None:
    """Refuse a device or a dtype that torch cannot have; whether this machine has it is
    seen later.

    >>> check_place("cuda:1", "bf16")
    """
    if device is not None and not DEVICE.fullmatch(device):
        raise LoadError(
            f"No device {device!r}",
            "torch has no device of that name",
            "Give cpu, cuda, cuda:1, mps or auto.",
        )
    if dtype is not None and not DTYPE.fullmatch(dtype):
        raise LoadError(
            f"No dtype {dtype!r}",
            "it is not a floating-point dtype",
            "Give float32, bfloat16 or float16.",
        )


def with_stdin(words: Sequence[str]) -> list[str]:
    """The words of a command line, where -.csv is no bundle of options but stdin.

    >>> with_stdin(["embed", "-.csv", "-k", "3"])
    ['embed', '@-.csv', '-k', '3']
    """
    return [f"@{word}" if STDIN.fullmatch(word) else word for word in words]


def _is_source(word: str) -> bool:
    return word == "-" or (word.startswith("@") and not word.startswith("@@"))


def _texts_of(word: str, column: str | None) -> list[str]:
    if _is_source(word):
        return list(dataset(word, text=column).texts)
    text = word.removeprefix("@")
    if not text.strip():
        reason = "it is only white space" if text else "it is empty"
        raise TextError(
            f"Cannot use the text {text!r}",
            reason,
            "Give a text, @FILE to read a file, or - to read stdin.",
        )
    if text == word:
        _refuse_file(word)
    return [text]


def _refuse_file(word: str) -> None:
    """Refuse a text that is the path of a file, or looks like one."""
    exists = is_file(word)
    if exists or (not re.search(r"\s", word) and Path(word).suffix.lower() in SUFFIXES):
        what = "is a file" if exists else "looks like a file"
        remedy = f"Write @{word} to read a file."
        if exists:
            remedy = (
                f"Write @{word} to read it; `echo {word} | hiddenscope ... -` gives its"
                " name as a text."
            )
        raise TextError(f"{word!r} {what}", "an argument is a text", remedy)


def _opened(name: str) -> str:
    """The name of a file, a shipped dataset or stdin as `texts.read` takes it."""
    source = name.removeprefix("@")
    stdin = source == "-" or STDIN.fullmatch(source) is not None
    if stdin and sys.stdin is None:
        raise FileError(
            "Cannot read stdin",
            "it is closed",
            "Pipe texts into the command, or give them here.",
        )
    there = stdin or is_file(source) or os.path.isdir(source)
    if not there and source not in (names := reader.shipped()):
        near = get_close_matches(source.lower(), names, 1, 0.6)
        remedy = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"Give a file, or one of {', '.join(names)}."
        )
        if name.startswith("@"):
            remedy = f"Check the path. For the text {name[:40]!r} write @{name[:40]}."
        raise FileError(
            f"Cannot read texts from {source[:80]!r}", "there is no such file", remedy
        )
    return source
