"""A command: its parameters as typer reads them, and what is checked before it runs.

A command takes parameters that are described (`hiddenscope.catalog.Parameter`), and
runs a function with the shared options and with what was typed for each of them. What
can be checked without a model is checked first, before torch is imported.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from hiddenscope import progress, texts
from hiddenscope.arguments import integer
from hiddenscope.catalog import COMMANDS
from hiddenscope.cli.arguments import (
    check_states,
    is_store,
    numbers_in,
    text_in,
    texts_in,
    vectors_in,
)
from hiddenscope.cli.endings import errors_as_messages
from hiddenscope.cli.options import RESULTS, Shared, shared_parameters, zoo_names
from hiddenscope.errors import TextError
from hiddenscope.interface import (
    HEAD,
    TARGETS,
    TRUNCATE,
    Description,
    Kind,
    Parameter,
    flattened,
)
from hiddenscope.loading.outline import check_attention, check_sites, outline
from hiddenscope.sites import check_syntax
from hiddenscope.states.pooling import parse_pooling

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

Arguments: TypeAlias = dict[str, Any]
"""What was typed for the parameters of a command, by their names: texts that were read,
and otherwise words and numbers.
"""
Function: TypeAlias = Callable[..., None]


def command(
    word: str,
    parameters: Sequence[Parameter] = (),
    *,
    details: str,
    writes: Sequence[str] = RESULTS,
    without: Collection[str] = (),
    description: Description | None = None,
    model_with_states: bool = False,
) -> Callable[[Function], Function]:
    """Make a command of a function that takes `shared` and `arguments`.

    A function that is not an analysis may take options of typer in place of
    `arguments`. `details` follow the first sentence of its help. `writes` are the
    suffixes of --out, and `without` the shared options that would do nothing.
    `model_with_states` says that the model has a use beside --states, which holds its
    states already.
    """
    described = list(parameters)
    if any(takes_texts(parameter) for parameter in described):
        described += [TEXTS_FILE, COLUMN_OF_TEXTS_FILE]
    shared_options = list(shared_parameters(writes, without))

    def decorate(function: Function) -> Function:
        declared = inspect.signature(function, eval_str=True).parameters
        takes_arguments = "arguments" in declared
        options = [as_typer(parameter) for parameter in described]
        if not takes_arguments:
            options = [declared[name] for name in declared if name != "shared"]
        signature = inspect.Signature([*options, *shared_options])

        def run(**values: Any) -> None:
            names = set(values)
            shared = Shared(
                **{part.name: values.pop(part.name) for part in shared_options}
            )
            progress.show(shared.progress)
            with errors_as_messages(shared.debug, names):
                shared.check(writes)
                with progress.status(f"Running {word}"):
                    if not takes_arguments:
                        function(shared, **values)
                        return
                    arguments = _read(described, values)
                    states = arguments.get("states")
                    if states is None:
                        _check_models(shared, arguments, description)
                    elif model_with_states:
                        check_states(states, {}, {})
                    else:
                        check_states(states, shared.of_model, arguments)
                    function(shared, arguments)

        run.__name__ = word
        run.__doc__ = f"{COMMANDS[word]}\n\n{details}"
        run.__annotations__ = {
            name: part.annotation for name, part in signature.parameters.items()
        }
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


def _read(parameters: Sequence[Parameter], values: Arguments) -> Arguments:
    """Return the arguments with texts, positions and numbers in place of words."""
    arguments = dict(values)
    file = arguments.pop("texts_file", None)
    column = None
    # Beside labelled texts the columns are theirs.
    if arguments.get("data") is None:
        column = arguments.pop("text_column", None)
    states = arguments.get("states")
    source = (arguments.get("source") or "").removeprefix("@")
    if states is None and is_store(source):
        # A search may name a store in the place of its source.
        arguments |= {"states": Path(source), "source": None}
    for parameter in parameters:
        word = arguments.get(parameter.name)
        if takes_texts(parameter):
            words = word or ()
            path = vectors_in(words, file) if parameter.vectors else None
            # States come with texts of their own, and labelled texts are texts.
            has_none = "states" in arguments and arguments.get("data") is None
            needs_texts = parameter.required or has_none
            texts = path or texts_in(
                words, file, column, required=needs_texts and states is None
            )
            if states is not None and texts:
                raise TextError(
                    "Cannot use texts with --states",
                    "the states have their own texts",
                    "Leave one of the two out.",
                )
            arguments[parameter.name] = texts or None
        elif word is None:
            continue
        elif parameter.kind == "integer" and parameter.least is not None:
            integer(word, parameter.option, parameter.least)
        elif parameter.kind == "sites" and not word.startswith("feature:"):
            check_syntax(word)
        elif parameter.kind == "text":
            arguments[parameter.name] = text_in(word)
        elif parameter.kind == "pooling":
            arguments[parameter.name] = parse_pooling(word, scores=True)
        elif parameter.kind == "numbers":
            arguments[parameter.name] = numbers_in(parameter.option, word)
    return arguments


def _check_models(
    shared: Shared, arguments: Arguments, description: Description | None
) -> None:
    """Refuse what the config of a model shows to be impossible."""
    for model in arguments.get("models") or [shared.model]:
        if model is not None and model.endswith(".safetensors"):
            continue
        known = outline(model)
        for name in ("sites", "site"):
            sites = arguments.get(name)
            if sites is not None and not sites.startswith("feature:"):
                check_sites(known, sites)
        if "heads" in arguments:
            check_attention(known, arguments["layers"], arguments["heads"])
        if description is None or not known.headless or HEAD not in description.needs:
            continue
        if not description.is_directed(arguments):
            raise HEAD.refusal(description.verb, known.name)


# What a shell completes.
COMPLETIONS: dict[Kind, Callable[[], list[str]]] = {
    "model": zoo_names,
    "data": lambda: list(texts.shipped()),
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
