"""Commands that ask an analysis: they parse, call and print.

The command of an analysis is generated from the description of its parameters. An
analysis whose command does more than ask has a module of its own, `cli/<word>.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import hiddenscope as hs
from hiddenscope.catalog import ANALYSIS
from hiddenscope.cli.arguments import dataset
from hiddenscope.cli.command import COLUMNS, Arguments, Function, command, options_of
from hiddenscope.cli.options import Shared
from hiddenscope.cli.states import read_saved
from hiddenscope.cli.terminal import echo, table, visible
from hiddenscope.interface import Parameter, build_value, describe
from hiddenscope.results import tables_of


def generated(word: str) -> Function:
    """Return the command of an analysis that only asks."""

    def run(shared: Shared, arguments: Arguments) -> None:
        show_result(ask(word, shared, arguments), shared)

    return asks(word)(run)


def asks(
    word: str,
    *more: Parameter,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **options: Any,
) -> Callable[[Function], Function]:
    """Make the command of an analysis of a function.

    The command takes the parameters that the analysis describes, with `changes` of some
    by their names, and then `more`; `options` are those of `command`.
    """
    description = describe(word)
    parameters = [
        replace(parameter, **changes.get(parameter.name, {}))
        for parameter in options_of(description)
    ]
    summary = description.summary or ANALYSIS[word].question
    details = description.details or (
        f"Prints the findings. --out {word}.html keeps the pictures, .csv the numbers."
    )
    return command(
        word,
        [*parameters, *more],
        help=f"{summary}\n\n{details}",
        verb_if_head_needed=description.verb_if_head_needed,
        **options,
    )


def ask(word: str, shared: Shared, arguments: Arguments) -> "hs.Result":
    """Ask an analysis of a model, or of states, and return its result."""
    arguments = dict(arguments)
    # A file is read first: that it is missing should not show after a model is loaded.
    if isinstance(arguments.get("data"), str):
        columns = [arguments.pop(column.name) for column in COLUMNS]
        arguments["data"] = dataset(arguments["data"], *columns)
    for parameter in describe(word).parameters:
        if parameter.fields and not parameter.takes_model:
            arguments[parameter.name] = build_value(parameter, None, arguments)
    source = source_of(shared, arguments)
    result: hs.Result = getattr(hs, word)(
        source, **argument_values(word, shared, arguments, source)
    )
    return result


def source_of(shared: Shared, arguments: Arguments) -> Any:
    """Load the model of a command, or open the states or vectors in its place."""
    path = _saved_path(arguments)
    if path is not None:
        return read_saved(path)
    return shared.load()


def argument_values(
    word: str, shared: Shared, arguments: Arguments, source: Any
) -> dict[str, Any]:
    """Return what an analysis takes for the arguments that are there."""
    of_states = _saved_path(arguments) is not None
    values = {}
    for parameter in describe(word).parameters:
        if parameter.of_model and of_states:
            continue
        value = arguments.get(parameter.name)
        if parameter.takes_model:
            value = build_value(parameter, source, arguments)
        elif value is None:
            continue
        elif parameter.kind == "model":
            value = shared.load_other(value)
        elif parameter.encoded:
            value = source.encode(
                value, targets=arguments["targets"], truncate=arguments["truncate"]
            )
        values[parameter.name] = value
    return values


def _saved_path(arguments: Arguments) -> Path | None:
    """Return the path of states, or of vectors that stand in place of texts."""
    for name in ("states", "texts"):
        path = arguments.get(name)
        if isinstance(path, Path):
            return path
    return None


def show_result(result: "hs.Result", shared: Shared) -> None:
    """Save a result with --out, and print it: as JSON, or its findings and tables.

    A result that cannot be saved is printed all the same: it may have taken long.
    """
    try:
        if shared.out:
            result.save(shared.out, **shared.look)
    finally:
        _print(result, shared.json)
    shared.report_written()


def _print(result: "hs.Result", as_json: bool) -> None:
    if as_json:
        with TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            result.save(path)
            echo(path.read_text("utf-8"))
        return
    echo(visible(result.summary(), keep="\n"))
    for printed in tables_of(result):
        echo(f"\n{visible(printed.title)}" if printed.title else "")
        table(printed.columns, printed.rows, text=printed.text_columns)
