"""A command: its parameters as typer reads them, and what is checked before it runs.

A command takes parameters that are described (`hiddenscope.catalog.Parameter`), and
runs a function with the shared options and with what was typed for each of them. What
can be checked without a model is checked first, before torch is imported.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hiddenscope import errors, progress
from hiddenscope.arguments import integer
from hiddenscope.cli.arguments import (
    numbers_in,
    text_in,
    texts_in,
    vectors_in,
)
from hiddenscope.cli.failures import errors_as_messages
from hiddenscope.cli.options import RESULTS, Shared, shared_parameters
from hiddenscope.cli.states import check_states, is_store
from hiddenscope.interface import Parameter
from hiddenscope.interface.typer_parameters import (
    COLUMN_OF_TEXTS_FILE,
    TEXTS_FILE,
    as_typer,
    takes_texts,
)
from hiddenscope.loading.outline import check_attention, check_sites, outline
from hiddenscope.sites import check_syntax
from hiddenscope.states.pooling import parse_pooling

Arguments: TypeAlias = dict[str, Any]
"""What was typed for the parameters of a command, by their names: texts that were read,
and otherwise words and numbers.
"""
Function: TypeAlias = Callable[..., None]


def command(
    word: str,
    parameters: Sequence[Parameter] = (),
    *,
    help: str = "",  # noqa: A002
    writes: Sequence[str] = RESULTS,
    without: Collection[str] = (),
    verb_if_head_needed: str = "",
    model_with_states: bool = False,
) -> Callable[[Function], Function]:
    """Make a command of a function that takes `shared` and `arguments`.

    A function that is not an analysis may take options of typer in place of
    `arguments`. `writes` are the suffixes of --out, and `without` the shared options
    that would do nothing. `model_with_states` says that the model has a use beside
    --states, which holds its states already.
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
                        _check_models(shared, arguments, verb_if_head_needed)
                    elif model_with_states:
                        check_states(states, {}, {})
                    else:
                        check_states(states, shared.of_model, arguments)
                    function(shared, arguments)

        run.__name__ = word
        run.__doc__ = help or function.__doc__
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
            # States come with texts of their own.
            needs_texts = parameter.required or "states" in arguments
            texts = path or texts_in(
                words, file, column, required=needs_texts and states is None
            )
            if states is not None and texts:
                raise errors.TextError(
                    "Cannot use texts with --states",
                    "the states have their own texts",
                    "Leave one of the two out.",
                )
            arguments[parameter.name] = texts
        elif word is None:
            continue
        elif parameter.kind == "integer" and parameter.least is not None:
            integer(word, parameter.option, parameter.least)
        elif parameter.kind == "sites":
            check_syntax(word)
        elif parameter.kind == "text":
            arguments[parameter.name] = text_in(word)
        elif parameter.kind == "pooling":
            arguments[parameter.name] = parse_pooling(word)
        elif parameter.kind == "numbers":
            arguments[parameter.name] = numbers_in(parameter.option, word)
    return arguments


def _check_models(
    shared: Shared, arguments: Arguments, verb_if_head_needed: str
) -> None:
    """Refuse what the config of a model shows to be impossible."""
    for model in arguments.get("models") or [shared.model]:
        if model is not None and model.endswith(".safetensors"):
            continue
        known = outline(model)
        for name in ("sites", "site"):
            if arguments.get(name) is not None:
                check_sites(known, arguments[name])
        if "heads" in arguments:
            check_attention(known, arguments["layers"], arguments["heads"])
        if verb_if_head_needed and known.headless:
            raise errors.PassError(
                f"Cannot {verb_if_head_needed} {known.name}",
                "it has no head, a module that makes logits",
                "Give a language model: --model NAME.",
            )
