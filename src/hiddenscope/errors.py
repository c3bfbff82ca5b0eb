"""Everything that hiddenscope raises.

    Error
    ├── ArgumentError   (TypeError)         an argument of a type that the function does not take
    ├── SiteError       (LookupError)       an address that does not parse, or that the model does not have
    ├── LoadError       (ValueError)        a model that could not be loaded
    │   ├── UnknownModel    (LookupError)   no such model, folder or file
    │   ├── Unreachable     (ConnectionError)   a model that has to be fetched, but cannot be reached
    │   ├── Unsafe                          a model whose loading would run foreign code: pickle, remote code, path tricks
    │   └── Damaged         (FileError)     a checksum, a header or a length that is not what it must be
    ├── AnatomyError    (ValueError)        a module whose states cannot be proved; the error names the step
    ├── ModuleError     (ValueError)        a module whose states cannot be observed as it is
    ├── TextError       (ValueError)        a text or a list of ids that the model cannot take
    ├── StatesError     (ValueError)        states that do not fit together, or lack what a question needs
    ├── StoreError      (ValueError)        a folder that is not a store, or one of another plan or a newer version
    ├── PassError       (RuntimeError)      a pass that the proof does not allow
    ├── NotFinite       (ArithmeticError)   a NaN or an infinity, named by site and token
    ├── TooLarge        (MemoryError)       more than the free memory
    └── FileError       (OSError)           a file of ours that cannot be read or written

Every error says three things: the problem, the reason, the remedy.

>>> print(SiteError("No site 'layer.40' in gpt2", "it has layer.0 to layer.12", "The last is 'layer.12'."))
No site 'layer.40' in gpt2: it has layer.0 to layer.12. The last is 'layer.12'.
"""  # noqa: E501

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGE = os.path.dirname(__file__) + os.sep
# On a CPU torch raises a plain RuntimeError, which it words differently on x86-64 and
# aarch64.
_NO_MEMORY_WORDS = [
    "you tried to allocate",
    "can't allocate",
    "Cannot allocate memory",
    "ALLOC_FAILED",
    "can't start new thread",
    "failed to map segment",
]


class Error(Exception):
    """The root of the tree: it catches all errors of ours and nothing else."""

    def __init__(self, problem: str, reason: str, remedy: str) -> None:
        self.problem = problem
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{problem}: {reason.rstrip('.')}. {remedy}")

    def __reduce__(self) -> tuple[type["Error"], tuple[str, str, str]]:
        return type(self), (self.problem, self.reason, self.remedy)

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the caller's lines, and the message.

        IPython calls this. In another mode than its usual one it shows everything.
        """
        shell = sys.modules["IPython"].get_ipython()
        if shell.InteractiveTB.mode != "Context":
            arguments = type(self), self, self.__traceback__
            return list(shell.InteractiveTB.structured_traceback(*arguments))
        lines = []
        for frame in traceback.extract_tb(self.__traceback__):
            if frame.filename.startswith(_PACKAGE):
                break
            # A cell is no file.
            place = ""
            if os.path.exists(frame.filename):
                place = f"{os.path.basename(frame.filename)}, "
            if f"{os.sep}IPython{os.sep}" not in frame.filename:
                lines.append(f"{place}line {frame.lineno}: {frame.line}")
        lines.append(f"{type(self).__name__}: {self}")
        return [*lines, "(`%tb Verbose` shows the whole traceback.)"]


class ArgumentError(Error, TypeError):
    """An argument of a type that the function does not take."""


class SiteError(Error, LookupError):
    """An address that does not parse, or that the model does not have."""


class LoadError(Error, ValueError):
    """A model that could not be loaded."""


class UnknownModel(LoadError, LookupError):
    """No such model, folder or file."""


class Unreachable(LoadError, ConnectionError):
    """A model that has to be fetched, but cannot be reached."""


class Unsafe(LoadError):
    """A model whose loading would run foreign code."""


class AnatomyError(Error, ValueError):
    """A module whose states cannot be proved; the error names the step."""


class ModuleError(Error, ValueError):
    """A module whose states cannot be observed as it is, such as in training mode."""


class TextError(Error, ValueError):
    """A text or a list of ids that the model cannot take."""


class StatesError(Error, ValueError):
    """States that do not fit together, or lack what a question needs."""


class StoreError(Error, ValueError):
    """A folder that is not a store, or one of another plan or a newer version."""


class PassError(Error, RuntimeError):
    """A pass that the proof does not allow."""


class NotFinite(Error, ArithmeticError):
    """A NaN or an infinity, named by site and token."""


class TooLarge(Error, MemoryError):
    """More than the free memory."""


class FileError(Error, OSError):
    """A file of ours that cannot be read or written."""


class Damaged(LoadError, FileError):
    """A checksum, a header or a length is not what it must be."""


@contextmanager
def without_panic(kind: type[Error], problem: str, remedy: str) -> Iterator[None]:
    """Raise an error of ours where a library written in Rust stops.

    A panic is not an Exception, so that it would pass every handler. What such a
    library refuses, as a tokenizer does a word that it has not, is a bare Exception.

    >>> class PanicException(BaseException): ...
    >>> with without_panic(TextError, "Cannot encode the text", "Use another one."):
    ...     raise PanicException("retry limit")
    Traceback (most recent call last):
    hiddenscope.errors.TextError: Cannot encode the text: its library stopped (retry limit). Use another one.
    """  # noqa: E501
    try:
        yield
    except BaseException as error:
        is_bare = type(error) is Exception
        if type(error).__name__ != "PanicException" and not is_bare:
            raise
        reason = f"its library stopped ({str(error)[:200]})"
        raise kind(problem, reason, remedy) from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, for the reason of an error of ours.

    >>> first_line(ValueError("no such key\\nand a long explanation"))
    'no such key'
    """
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()[:300]
    return type(error).__name__[:300]


def was_interrupted(error: BaseException | None) -> bool:
    """Tell whether Ctrl-C caused an error.

    Libraries turn an interrupt in the middle of an import into an error of their own.

    >>> was_interrupted(KeyboardInterrupt()), was_interrupted(ValueError("x"))
    (True, False)
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, of whatever library, means that memory ran out.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("x"))
    (True, False)
    """
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    message = str(error)
    return any(words in message for words in _NO_MEMORY_WORDS)
