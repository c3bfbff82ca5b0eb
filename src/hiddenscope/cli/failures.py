"""Errors as the command line tells them: one message on stderr, and an exit code."""

import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from hiddenscope import errors
from hiddenscope.cli import interrupt
from hiddenscope.cli.terminal import echo, visible

KEYWORD = re.compile(
    r"""`?\b(?P<name>[a-z_]+)=(?P<value>'[^']*'|"[^"]*"|-?\w(?:[\w.*]*[\w*])?|)`?"""
)


@contextmanager
def errors_as_messages(debug: bool, options: Collection[str] = ()) -> Iterator[None]:
    """Turn an error into a message and an exit code; with `debug` let it through.

    Where an error names a keyword argument of Python for which the command has an
    option, the message names the option.
    """
    try:
        with interrupt.guarded():
            yield
    except KeyboardInterrupt:
        interrupt.leave()
    except BrokenPipeError:
        # The reader of our output has gone, as in `hiddenscope models | head -1`.
        discard_output()
        sys.exit(141)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        if not isinstance(error, OSError) and _was_interrupted(error):
            interrupt.leave()
        _leave(_message(error, options))


def _message(error: Exception, options: Collection[str]) -> str:
    # Where a library has no memory left, our own error may name the wrong cause.
    lack = error.__cause__ or error
    if errors.is_out_of_memory(lack) and not isinstance(lack, errors.Error):
        return (
            f"There is not enough memory ({errors.first_line(lack)}). Close other"
            " programs, raise `ulimit -v`, or use a smaller model."
        )
    if isinstance(error, errors.Error):
        return in_options(str(error), options)
    if isinstance(error, OSError):
        return f"Cannot read or write: {error.strerror or error}."
    return (
        f"{type(error).__name__}: {error}\nThis is unexpected: --debug shows where it"
        " happened."
    )


def in_options(message: str, options: Collection[str]) -> str:
    """Return a message with options in place of Python's keyword arguments.

    >>> message = "Split it, or give truncate=True. Name it: text='...', task='x'."
    >>> in_options(message, {"truncate", "text"})
    "Split it, or give --truncate. Name it: --text '...', task='x'."
    """

    def spelled(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in options:
            return match[0]
        negation = "no-" if value == "False" else ""
        option = f"--{negation}{name.replace('_', '-')}"
        if value in ("", "True", "False"):
            return option
        return f"{option} {value}"

    return KEYWORD.sub(spelled, message)


def discard_output() -> None:
    """Send stdout nowhere, so that Python's own flush at the end cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error.

    transformers turns an interrupted import into an error of its own.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _leave(message: str) -> NoReturn:
    echo(visible(message, keep="\n"), err=True)
    sys.exit(2)
