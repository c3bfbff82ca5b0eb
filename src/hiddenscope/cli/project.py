"""How labelled texts lie in every layer: of several datasets and several models."""

from typing import Any

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.arguments import check_group, dataset
from hiddenscope.cli.asking import argument_values, asks, show_result
from hiddenscope.cli.command import COLUMNS, EACH_TOKEN, Arguments
from hiddenscope.cli.options import MODEL_HELP, Shared
from hiddenscope.cli.states import read_states
from hiddenscope.errors import TextError
from hiddenscope.interface import Parameter

OPTIONS = (
    EACH_TOKEN,
    Parameter(
        "neighbours",
        "integer",
        "How many neighbours of a point count.",
        default=15,
        least=2,
    ),
    Parameter(
        "models",
        "model",
        f"{MODEL_HELP} Repeated: side by side.",
        spelling=("--model",),
        repeated=True,
    ),
    Parameter(
        "other",
        "model",
        "Another model beside the first; may be repeated.",
        repeated=True,
    ),
)


@asks(
    "project",
    *OPTIONS,
    changes={"data": {"repeated": True}},
    without=("model",),
)
def project(shared: Shared, arguments: Arguments) -> None:
    """Draw the texts, by PCA at once and then by the chosen method."""
    names = arguments.pop("data") or []
    columns = [arguments[column.name] for column in COLUMNS]
    check_group(*columns[1:])
    if arguments["states"] is None:
        data = _datasets(names, columns)
        source = _models(shared, arguments)
    else:
        source = read_states(arguments["states"])
        data = _labels(names, columns)
    method = arguments.pop("method")

    def preview(result: "hs.Result") -> None:
        if shared.out:
            result.save(shared.out, **shared.look)
            progress.note(f"{shared.out} shows them by PCA; {method} follows.")

    values = argument_values("project", shared, arguments, source)
    if arguments["each_token"]:
        source = hs.each_token(source)
    pictures = hs.Pictures(method, arguments["neighbours"], preview)
    result = hs.project(source, data, method=pictures, **values)
    show_result(result, shared)


def _models(shared: Shared, arguments: Arguments) -> Any:
    """Load the models; one by itself is not a list."""
    names = [*(arguments["models"] or [None]), *(arguments["other"] or [])]
    models = [shared.load_other(name) for name in names]
    return models[0] if len(models) == 1 else models


def _datasets(names: list[str], columns: list[str | None]) -> Any:
    """Read the datasets; one by itself has no name."""
    if not names:
        raise TextError(
            "No dataset",
            "none was given",
            "Give a shipped name such as cities-incomplete, or a file.",
        )
    datasets = {name: dataset(name, *columns) for name in names}
    return datasets if len(datasets) > 1 else datasets[names[0]]


def _labels(names: list[str], columns: list[str | None]) -> Any:
    """Read the labels of the texts of states."""
    if len(names) > 1:
        raise TextError(
            "Cannot compare datasets in --states",
            f"there are {len(names)} files, and states have one label for each text",
            "Give one, or none.",
        )
    if not names:
        return None
    return dataset(names[0], *columns)
