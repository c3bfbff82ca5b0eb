"""What the words of a command line stand for, in every command.

    "A text."     a positional argument is a text
    @FILE         the texts of a .txt (one per line), .jsonl, .csv, .tsv or .parquet
                  file; `--text` names the column
    -, @-.csv     the lines of stdin, or a table on stdin; -.csv is understood too
    @@name        the text "@name"

An argument that is the path of a file, or looks like one, is an error that says how to
read it: the states of the words `corpus.txt` are never what was meant. Where only a
file makes sense (a dataset, a source to search), the @ may be left out.

>>> texts_in(["A text.", "@@name"])
['A text.', '@name']
>>> texts_in(["corpus.txt"])  # doctest: +ELLIPSIS
Traceback (most recent call last):
hiddenscope.errors.TextError: 'corpus.txt' looks like a file: ...
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import hiddenscope as hs
from hiddenscope import texts as reader
from hiddenscope.cli.terminal import STDIN
from hiddenscope.errors import FileError, LoadError, StatesError, TextError
from hiddenscope.files import check_file, reading
from hiddenscope.texts import COMPRESSIONS, FORMATS, Labelled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Files that hold states or vectors in place of texts.
VECTORS = (".safetensors", ".npy")
MARKUP = (".json", ".md", ".rst", ".html", ".htm", ".xml", ".yaml", ".yml")
DOCUMENTS = (*MARKUP, ".log", ".pdf", ".doc", ".docx", ".xlsx")
PROGRAMS = (".py", ".ipynb", ".gguf", ".npz", ".nc", ".arrow", ".zip")
SUFFIXES = {*FORMATS, *COMPRESSIONS, *VECTORS, *DOCUMENTS, *PROGRAMS}
DEVICE = re.compile(
    r"(?:cpu|cuda|mps|xpu|hpu|npu|mtia|ipu|xla|auto)(?::[0-9]+)?"
    r"|balanced|balanced_low_0|sequential"
)
DTYPE = re.compile(
    r"(?:torch\.)?(?:(?:b?float|b?f|b?fp)(?:16|32|64)?|half|double|auto|float8_\w+)"
)


def texts_in(
    words: Sequence[str],
    file: str | None = None,
    column: str | None = None,
    *,
    required: bool = True,
) -> list[str]:
    """Return the texts that the words of an argument and `--texts` stand for."""
    words = list(words)
    if file is not None:
        words.append(f"@{file.removeprefix('@')}")
    if column is not None and not any(map(_is_source, words)):
        raise TextError(
            f"Cannot use --text {column}",
            "it is a column of a file, and no file is given",
            "Give one as @FILE, or leave --text out.",
        )
    if not words and required:
        remedy = "Give texts, @FILE to read a file, or - to read stdin."
        raise TextError("No texts", "none was given", remedy)
    texts = []
    for word in words:
        texts += _texts_of(word, column)
    return texts


def vectors_in(words: Sequence[str], file: str | None) -> Path | None:
    """Return the path of states or vectors, where that is what the words name."""
    names = [word.removeprefix("@") for word in words if _is_source(word)]
    if file is not None:
        names.append(file.removeprefix("@"))
    is_one_file = len(names) == 1 and len(words) <= 1
    if is_one_file and Path(names[0]).suffix.lower() in VECTORS:
        return Path(names[0])
    return None


def text_in(word: str) -> str:
    """Return the one text that a word stands for."""
    texts = _texts_of(word, None)
    if len(texts) != 1:
        remedy = "Give one text: a file with one line, or the text itself."
        raise TextError(
            f"Cannot take one text from {word!r}", f"it holds {len(texts):,}", remedy
        )
    return texts[0]


def numbers_in(option: str, word: str) -> list[float]:
    """Return the numbers of a comma list."""
    try:
        return [float(number) for number in word.split(",")]
    except ValueError:
        remedy = "Give a comma list such as -1,1,2."
        raise TextError(f"{option} must be numbers", f"got {word!r}", remedy) from None


def dataset(
    name: str,
    text: str | None = None,
    label: str | None = None,
    group: str | None = None,
) -> Labelled:
    """Read a dataset: a shipped name, a file, or stdin."""
    return reader.read(checked_source(name), text=text, label=label, group=group)


def contrasts_in(name: str) -> "list[hs.Contrast]":
    """Read contrasts from a table whose columns are their fields."""
    clean = dataset(name, "clean", "answer")
    corrupt = dataset(name, "corrupt", "other")
    columns: Any = (
        clean.texts,
        corrupt.texts,
        clean.labels,
        corrupt.labels,
        # Some may belong to no group.
        [row.group for row in reader.rows(name, text="clean", group="group")],
    )
    names = "clean", "corrupt", "answer", "other", "group"
    contrasts = []
    for number, row in enumerate(zip(*columns, strict=True), 1):
        try:
            contrasts.append(hs.Contrast(**dict(zip(names, row, strict=True))))
        except TextError as error:
            problem = f"Contrast {number:,} of {clean.name}"
            raise TextError(problem, error.reason, error.remedy) from error
    return contrasts


def check_group(label: str | None, group: str | None) -> None:
    """Refuse groups that are the labels: no text of a label would be left to test."""
    if group is not None and group == label:
        raise TextError(
            f"Cannot use --group {group}",
            "it would be both group and label",
            "Name another column, or leave it out.",
        )


def check_place(device: str | None, dtype: str | None) -> None:
    """Refuse a device or a dtype that torch does not know.

    Whether this machine has the device shows when a model is loaded.

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
    if text == word and os.path.isfile(word):
        remedy = (
            f"Write @{word} to read it; `echo {word} | hiddenscope ... -` gives its"
            " name as a text."
        )
        raise TextError(f"{word!r} is a file", "an argument is a text", remedy)
    looks_like_file = (
        not re.search(r"\s", word) and Path(word).suffix.lower() in SUFFIXES
    )
    if text == word and looks_like_file:
        raise TextError(
            f"{word!r} looks like a file",
            "an argument is a text",
            f"Write @{word} to read a file.",
        )
    return [text]


def checked_source(name: str) -> str:
    """Return a file, a shipped dataset or stdin as `texts.read` takes it."""
    source = name.removeprefix("@")
    if source == "-" or STDIN.fullmatch(source):
        if sys.stdin is None:
            raise FileError(
                "Cannot read stdin",
                "it is closed",
                "Pipe texts into the command, or give them here.",
            )
        return source
    if os.path.isfile(source) or os.path.isdir(source):
        return source
    shipped = reader.shipped()
    if source in shipped:
        return source
    similar = get_close_matches(source.lower(), shipped, 1, 0.6)
    if name.startswith("@"):
        remedy = f"Check the path. For the text {name[:40]!r} write @{name[:40]}."
    elif similar:
        remedy = f"Did you mean {similar[0]!r}?"
    else:
        remedy = f"Give a file, or one of {', '.join(shipped)}."
    raise FileError(
        f"Cannot read texts from {source[:80]!r}", "there is no such file", remedy
    )


Saved: TypeAlias = "hs.Store | hs.States | hs.Pair"
# Options of texts and of other models, which have no use beside states.
USELESS = {
    "models": "--model",
    "targets": "--targets",
    "truncate": "--truncate",
    "other": "--other",
}


def is_store(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the folder of a store."""
    return os.path.isdir(path) and os.path.lexists(Path(path) / "plan.json")


def check_states(
    path: Path, of_model: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuse a path that cannot hold states, and options that have no use beside it."""
    is_saved_file = path.suffix.lower() == ".safetensors" and path.is_file()
    if not is_store(path) and not is_saved_file:
        reason = "there is no such file or folder"
        if path.is_dir():
            reason = "it has no plan.json, so it is not a store"
        elif path.exists():
            reason = "it is not a .safetensors file"
        raise FileError(
            f"Cannot read states from {str(path)[:80]!r}",
            reason,
            "Give the folder that `extract --to` wrote, or the file that `capture"
            " --out` wrote.",
        )
    useless = [f"--{name}" for name, value in of_model.items() if value is not None]
    useless += [option for name, option in USELESS.items() if options.get(name)]
    if useless:
        raise StatesError(
            f"Cannot use {', '.join(useless)} with --states",
            "no model computes anything",
            "Leave one out.",
        )


def read_states(path: Path) -> Saved:
    """Open the store in a folder, or load the states in a file."""
    if is_store(path):
        return hs.open(path)
    # Imported only here, since it needs torch.
    states: hs.States | hs.Pair = import_module("hiddenscope.states").load_states(path)
    return states


def read_saved(path: Path) -> "Saved | NDArray[np.float32]":
    """Open states, or the vectors in a .npy file."""
    import numpy as np

    if path.suffix.lower() != ".npy":
        return read_states(path)
    problem = f"Cannot read vectors from {path}"
    check_file(path, problem)
    with reading(problem):
        vectors: NDArray[np.float32] = np.load(path, mmap_mode="r")
        return vectors
