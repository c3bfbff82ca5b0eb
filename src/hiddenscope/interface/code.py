"""A question to an analysis as the Python and the command that ask the same.

>>> from hiddenscope.interface.descriptions import describe
>>> arguments = {"texts": "A text.", "k": 3}
>>> python_arguments(describe("lens").parameters, arguments, {})
["'A text.'", 'k=3']
>>> command_words(describe("lens").parameters, arguments, {})
(['-k', '3'], ['A text.'])
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from hiddenscope.interface import Kind, Parameter
from hiddenscope.texts import names_a_file

ONLY_PYTHON = "This can be asked in Python only."
FILE_LIKE = re.compile(r"\S+\.[A-Za-z0-9]{1,11}")


class Named(NamedTuple):
    """The path that an opaque name stands for, and the columns chosen for it."""

    path: str
    columns: Mapping[str, str] = MappingProxyType({})


Names: TypeAlias = Mapping[str, Named]
Values: TypeAlias = Mapping[str, Any]


class NoCommand(Exception):
    """The command line cannot ask this, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} {ONLY_PYTHON}")


def protect_from_file_lookup(kind: Kind, value: Any) -> Any:
    """Return texts that no function takes for the name of a file.

    Some functions read a single string that names a file, but none in a list.

    >>> protect_from_file_lookup("texts", "diary.txt")
    ['diary.txt']
    >>> protect_from_file_lookup("texts", "A text.")
    'A text.'
    """
    if kind == "texts" and isinstance(value, str) and names_a_file(value):
        return [value]
    return value


def resolved(name: str, names: Names) -> Named:
    """Return what a name stands for; a name that is not opaque stands for itself."""
    return names.get(name, Named(name))


def python_arguments(
    parameters: Sequence[Parameter],
    values: Values,
    names: Names,
    *,
    of_states: bool = False,
) -> list[str]:
    """Return the arguments of a call, written as Python.

    Kept states take labels that were read, not the name of a dataset.
    """
    written = []
    # After a positional parameter that is left out, the others must be named.
    must_name = False
    for parameter in parameters:
        value = values.get(parameter.name)
        if value is None and not parameter.explicit:
            must_name = True
            continue
        text = _as_python(parameter, value, names, of_states)
        if must_name or not parameter.positional:
            text = f"{parameter.name}={text}"
        written.append(text)
    return written


def python_load(choice: Values, names: Names) -> str:
    """Return the call that loads a model."""
    arguments = [repr(resolved(choice["name"], names).path)]
    if choice.get("dtype"):
        arguments.append(f"dtype={choice['dtype']!r}")
    return f"hs.load({', '.join(arguments)})"


def _as_python(parameter: Parameter, value: Any, names: Names, of_states: bool) -> str:
    if parameter.kind == "model":
        return python_load(value, names)
    if parameter.kind == "data":
        path, columns = resolved(value, names)
        if not columns and not of_states:
            return repr(path)
        named = [f"{name}={column!r}" for name, column in columns.items()]
        return f"hs.read({', '.join([repr(path), *named])})"
    if parameter.fields:
        arguments = python_arguments(parameter.fields, value, names)
        if parameter.takes_model:
            arguments = ["model", *arguments]
        return f"hs.{parameter.constructor}({', '.join(arguments)})"
    if parameter.repeated and isinstance(value, str):
        return repr([value])
    return repr(protect_from_file_lookup(parameter.kind, value))


def command_words(
    parameters: Iterable[Parameter],
    values: Values,
    names: Names,
    dtype: str | None = None,
) -> tuple[list[str], list[str]]:
    """Return the options and the arguments of a command.

    `dtype` is that of the model: a command gives a second model the same.
    """
    options: list[str] = []
    arguments: list[str] = []
    for parameter in parameters:
        value = values.get(parameter.name)
        if value is None:
            options += parameter.python_default
        elif parameter.python_only:
            raise NoCommand(parameter.python_only)
        elif parameter.fields:
            more = command_words(parameter.fields, value, names, dtype)
            options += more[0]
            arguments += more[1]
        elif parameter.kind == "data":
            path, columns = resolved(value, names)
            arguments.append(path)
            for name, column in columns.items():
                options += option_words(f"--{name}", column)
        elif parameter.is_argument:
            arguments += _argument(parameter, value, names, dtype)
        else:
            options += _option(parameter, value, names, dtype)
    return options, arguments


def option_words(option: str, value: object) -> list[str]:
    """Return an option with its value; one that begins with a dash must be joined.

    >>> option_words("--pool", "mean"), option_words("--pool", -1)
    (['--pool', 'mean'], ['--pool=-1'])
    """
    word = str(value)
    if word.startswith("-"):
        return [f"{option}={word}"]
    return [option, word]


def text_word(text: str) -> str:
    """Return a text as an argument, or raise NoCommand where it would mean a file."""
    if text.startswith("@"):
        return f"@{text}"
    if text == "-" or not text.strip() or FILE_LIKE.fullmatch(text) or "\0" in text:
        raise NoCommand(
            f"A command line takes {text[:40]!r} for something else than a text."
        )
    return text


def _argument(
    parameter: Parameter, value: Any, names: Names, dtype: str | None
) -> list[str]:
    if parameter.kind == "model":
        return [_second_model(value, names, dtype)]
    return [text_word(text) for text in _listed(value)]


def _option(
    parameter: Parameter, value: Any, names: Names, dtype: str | None
) -> list[str]:
    option = parameter.option
    if parameter.kind == "flag":
        if value == parameter.default:
            return []
        return [option if value else option.replace("--", "--no-")]
    if parameter.kind == "model":
        return [option, _second_model(value, names, dtype)]
    if parameter.kind == "numbers":
        if value in parameter.choices:
            return [f"--{value}"]
        return [f"{option}={','.join(map(str, _listed(value)))}"]
    if parameter.repeated:
        return _repeated(option, _listed(value))
    if isinstance(value, list):
        raise NoCommand(f"The command takes one text for {parameter.name}.")
    return option_words(option, value)


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    words = []
    for value in values:
        words += option_words(option, value)
    return words


def _second_model(choice: Values, names: Names, dtype: str | None) -> str:
    if choice.get("dtype") != dtype:
        raise NoCommand("The two models have different dtypes.")
    return resolved(choice["name"], names).path


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
