"""The texts nearest to a query, in a file of texts, of states or of vectors."""

from pathlib import Path
from typing import Any

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.arguments import VECTORS, dataset, texts_in
from hiddenscope.cli.asking import argument_values, asks, show_result
from hiddenscope.cli.command import STATES, TEXT_COLUMN, Arguments
from hiddenscope.cli.options import Shared
from hiddenscope.cli.states import read_saved
from hiddenscope.interface import Parameter
from hiddenscope.interface.parameters import TEXTS_HELP, TRUNCATE
from hiddenscope.loading.outline import outline
from hiddenscope.loading.zoo import ZOO

OPTIONS = (
    Parameter(
        "source",
        "data",
        "A file of texts (- for stdin), of states (.safetensors) or of vectors (.npy);"
        " a dataset; or --states.",
        positional=True,
    ),
    Parameter("queries", "words", TEXTS_HELP, positional=True),
    Parameter("texts", "word", "A file with the texts of the vectors in a .npy file."),
    TEXT_COLUMN,
    STATES,
    TRUNCATE,
)


@asks("search", *OPTIONS, model_with_states=True)
def search(shared: Shared, arguments: Arguments) -> None:
    """Search a file for the texts nearest to the queries."""
    source, path = arguments["source"], arguments["states"]
    queries = arguments["queries"] or []
    if path is not None and source is not None:
        # With --states there is no source: its place holds a query.
        queries, source = [source, *queries], None
    queries = texts_in(queries, required=False)
    if path is None:
        path = Path((source or "").removeprefix("@"))
    if not path.name:
        raise errors.TextError(
            "No source to search",
            "none was given",
            "Give a file, a dataset, or --states.",
        )
    is_saved = arguments["states"] is not None or path.suffix.lower() in VECTORS
    texts: Any = None
    file = arguments.pop("texts") if is_saved else source
    if file is not None:
        texts = list(dataset(file, arguments["text"]).texts)
    saved = read_saved(path) if is_saved else None
    if not queries:
        raise errors.TextError(
            "No texts", "no query was given", "Give a text to search for."
        )
    model = shared.load_other(
        _model_name(saved, shared.model, path),
        adapters=shared.adapter,
        scheme=shared.quantise,
    )
    truncate = arguments["truncate"]
    if truncate and saved is None:
        texts = model.encode(texts, truncate=True)
    query = model.encode(queries, truncate=truncate)
    collection = model if saved is None else saved
    values = argument_values("search", shared, arguments, collection)
    show_result(
        hs.search(collection, (model, query), **values | {"texts": texts}), shared
    )


def _model_name(saved: Any, name: str | None, path: Path) -> str | None:
    """Return the name of the model that reads the queries.

    Without --model that is the model of the states. Another model is refused before it
    is loaded, which may take minutes.
    """
    states = getattr(saved, "encoder", saved)
    source = getattr(states, "source", None)
    if source is None:
        return name
    problem = f"Cannot search for a text in {path.name}"
    if name is None:
        if source.model not in ZOO and "/" not in source.model:
            raise errors.StatesError(
                problem,
                f"its states are of {source.model[:60]!r}, and no name says where that"
                " model is",
                "Name the folder of that model: --model PATH.",
            )
        return str(source.model)
    known = outline(name)
    is_other_zoo_model = name in ZOO and source.model in ZOO and name != source.model
    depths = {known.layers, source.depth} - {None}
    if is_other_zoo_model or len(depths) > 1:
        raise errors.StatesError(
            problem,
            f"its states are of {source.model}, and not of {known.name}",
            "Leave --model out, or name the model that they were made with.",
        )
    return name
