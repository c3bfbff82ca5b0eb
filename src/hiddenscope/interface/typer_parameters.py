"""Parameters as typer reads them: the arguments and the options of a command."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hiddenscope import texts
from hiddenscope.interface import Description, Kind, Parameter
from hiddenscope.interface.descriptions import flattened
from hiddenscope.interface.parameters import TARGETS, TRUNCATE
from hiddenscope.loading.zoo import ZOO

MODEL_HELP = "A zoo name, a Hugging Face id, a folder or a .gguf file."
TEXT_COLUMN = Parameter("text", "word", "The column of the texts in a file.")
# The columns of labelled texts.
COLUMNS = tuple(Parameter(name, "word", text) for name, text in texts.COLUMNS.items())
STATES = Parameter(
    "states",
    "path",
    "States in place of a model: a store that extract wrote, or a file that capture"
    " wrote.",
)
EACH_TOKEN = Parameter(
    "each_token",
    "flag",
    "One row for each token, not for each text.",
    default=False,
    # A spelling of its own keeps typer from adding --no-each-token.
    spelling=("--each-token",),
)
# Options of every command that takes any number of texts.
TEXTS_FILE = Parameter(
    "texts_file",
    "word",
    "A file of texts: .txt .jsonl .csv .tsv .parquet.",
    spelling=("--texts",),
)
COLUMN_OF_TEXTS_FILE = replace(TEXT_COLUMN, name="text_column", spelling=("--text",))

TYPES: dict[Kind, type] = {
    "integer": int,
    "flag": bool,
    "words": list[str],
    "path": Path,
}


def zoo_names() -> list[str]:
    """Return the names of the zoo, for a shell to complete."""
    return list(ZOO)


def dataset_names() -> list[str]:
    """Return the names of the shipped datasets, for a shell to complete."""
    return list(texts.shipped())


COMPLETIONS: dict[Kind, Callable[[], list[str]]] = {
    "model": zoo_names,
    "data": dataset_names,
}


def options_of(description: Description) -> Iterator[Parameter]:
    """Yield every parameter of a generated command, except those of all commands."""
    parameters = [
        parameter
        for parameter in flattened(description.parameters)
        if not parameter.python_only
    ]
    yield from parameters
    if any(parameter.encoded for parameter in parameters):
        yield from (TARGETS, TRUNCATE)
    if any(parameter.kind == "data" for parameter in parameters):
        yield from COLUMNS
    if description.states:
        yield STATES


def takes_texts(parameter: Parameter) -> bool:
    """Return whether a parameter is an argument that takes any number of texts."""
    return parameter.kind == "texts" and parameter.is_argument


def as_typer(parameter: Parameter) -> inspect.Parameter:
    """Return a parameter as typer reads it."""
    type_: Any = _type(parameter)
    default: Any = parameter.default
    # Missing texts are reported later, with a better message than typer's.
    is_required = parameter.required and not takes_texts(parameter)
    if is_required:
        default = inspect.Parameter.empty
    elif default is None:
        type_ = type_ | None
    if parameter.kind == "numbers":
        # `cli.command` parses the comma list; typer must not see the tuple default.
        type_, default = str | None, None
    completion = COMPLETIONS.get(parameter.kind)
    if parameter.is_argument:
        place: Any = typer.Argument(help=parameter.help, autocompletion=completion)
    else:
        place = typer.Option(
            *parameter.spelling, help=parameter.help, autocompletion=completion
        )
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[type_, place],
        default=default,
    )


def _type(parameter: Parameter) -> Any:
    """Return the type of what is typed for a parameter."""
    if parameter.kind == "choice":
        return Literal[parameter.choices]
    if parameter.repeated or takes_texts(parameter):
        return list[str]
    return TYPES.get(parameter.kind, str)
