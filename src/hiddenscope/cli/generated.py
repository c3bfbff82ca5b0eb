"""Commands that are generated from the signature of an analysis: they parse, call and
print.

The first parameter of an analysis is the model. Of the others, positional ones become
arguments and keyword-only ones options; the type says how a word of the command line is
read (`Texts`, a second `Model`, a number, one of a few words). An analysis that takes
`Inputs` needs no parameters for how texts are encoded: its command has these options
anyway. An analysis of labelled texts, `data`, has options that name the columns of
their file. One that takes `Readable` states has `--states PATH` in place of a model and
its texts. Parameters that only a program can give, such as callbacks, are left out.
Help is in the catalog, and here where several analyses share a parameter.

Signatures are read from the source (`hiddenscope.interface.signatures`): importing an analysis imports torch, and `hiddenscope
--help` should not take seconds.
"""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import hiddenscope as hs
from hiddenscope.catalog import Analysis, Option
from hiddenscope.cli.arguments import TextRule, dataset
from hiddenscope.cli.command import (
    TEXTS_HELP,
    GroupColumn,
    LabelColumn,
    Shared,
    TextColumn,
    command,
    show,
)
from hiddenscope.cli.states import StatesOption, read_states
from hiddenscope.interface.signatures import Parameter, parameters_of, words_of

SHARED_HELP = {
    "texts": TEXTS_HELP,
    "text": TEXTS_HELP,
    "sites": "Which states: layer.3, layer.*, final, *.attn, a comma list.",
    "targets": "The text of an encoder-decoder's decoder.",
    "truncate": "Cut a text that is longer than the model's window.",
    "seed": "The seed of everything that is random.",
}
ONLY_IN_PYTHON = {"Callable"}
# Of `data`, labelled texts in a file.
COLUMNS = {
    "text": TextColumn,
    "label": LabelColumn,
    "group": GroupColumn,
}

ENCODING = (
    Parameter("targets", ast.Name("str"), positional=False, required=False),
    Parameter(
        "truncate", ast.Name("bool"), positional=False, required=False, default=False
    ),
)


def generated(analysis: Analysis) -> Callable[..., None]:
    """The command of an analysis that needs no module of its own."""
    module = f"hiddenscope.{analysis.module}"
    source, *declared = parameters_of(module, analysis.word)
    parameters = [
        parameter for parameter in declared if not ONLY_IN_PYTHON & parameter.names
    ]
    texts = [
        parameter
        for parameter in parameters
        if parameter.positional and "Texts" in parameter.names
    ]
    # With one place for texts, a command takes any number of them.
    many = texts[0].name if len(texts) == 1 else None
    named = {parameter.name for parameter in parameters}
    encoding = [
        extra
        for extra in ENCODING
        if many and "Inputs" in texts[0].names and extra.name not in named
    ]

    def call(shared: Shared, *, states: Path | None = None, **words: Any) -> None:
        if states is not None:
            of_texts = {many, *(extra.name for extra in ENCODING)}
            own = {
                parameter.name: words[parameter.name]
                for parameter in parameters
                if parameter.name not in of_texts
            }
            show(getattr(hs, analysis.word)(read_states(states), **own), shared)
            return
        read = dict(words)
        if "data" in named:
            columns = {name: read.pop(name) for name in COLUMNS}
            read["data"] = dataset(read["data"], **columns)
        model = shared.load()
        values = {
            parameter.name: _value(shared, parameter, read[parameter.name])
            for parameter in parameters
        }
        if encoding and many:
            values[many] = model.encode(
                values[many], **{extra.name: words[extra.name] for extra in encoding}
            )
        show(getattr(hs, analysis.word)(model, **values), shared)

    first = inspect.Parameter(
        "shared", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Shared
    )
    others = [
        _as_typer(parameter, analysis, module, many)
        for parameter in (*parameters, *encoding)
    ]
    if "data" in named:
        others += [_column(name, annotation) for name, annotation in COLUMNS.items()]
    if "Readable" in source.names:
        others.append(
            inspect.Parameter(
                "states", first.KEYWORD_ONLY, annotation=StatesOption, default=None
            )
        )
    call.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
    call.__name__ = analysis.word
    call.__doc__ = (
        f"{analysis.question}\n\nPrints the findings. --out {analysis.word}.html keeps"
        " the pictures, .csv the numbers."
    )
    return command(call)


def _column(name: str, annotation: Any) -> inspect.Parameter:
    """The option that names a column of labelled texts."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None
    )


def _value(shared: Shared, parameter: Parameter, word: Any) -> Any:
    """What the analysis is given for a word of the command line."""
    if word is not None and {"Model", "ModelLike"} & parameter.names:
        return shared.load_other(word)
    return word


def _as_typer(
    parameter: Parameter, analysis: Analysis, module: str, many: str | None
) -> inspect.Parameter:
    """A parameter as typer reads it."""
    option = analysis.options.get(
        parameter.name, Option(SHARED_HELP.get(parameter.name, ""))
    )
    kind = list[str] if parameter.name == many else _kind(parameter, module)
    default = option.default if option.default is not None else parameter.default
    required = parameter.name != many and parameter.required and option.default is None
    if default is None and not required:
        kind = kind | None
    if parameter.positional:
        look: Any = typer.Argument(help=option.help)
    else:
        look = typer.Option(*option.spellings, help=option.help)
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=(
            Annotated[kind, look, TextRule()]
            if parameter.name == many
            else Annotated[kind, look]
        ),
        default=inspect.Parameter.empty if required else default,
    )


def _kind(parameter: Parameter, module: str) -> Any:
    """The type of a word of the command line."""
    if not {"Texts", "Model", "ModelLike"} & parameter.names:
        if words := tuple(words_of(parameter.type, module)):
            return Literal[words]
        for plain in (bool, str, int, float):
            if plain.__name__ in parameter.names:
                return plain
    return str
