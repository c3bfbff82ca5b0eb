"""The texts nearest to a query."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.arguments import VECTORS, TextRule, dataset, shipped, texts_in
from hiddenscope.cli.command import (
    TEXTS_HELP,
    Shared,
    TextOption,
    TruncateOption,
    command,
    show,
)
from hiddenscope.cli.embed import PoolOption, SiteOption, pooling
from hiddenscope.cli.states import StatesOption, read_states
from hiddenscope.loading.outline import outline
from hiddenscope.loading.zoo import ZOO

SourceArgument = Annotated[
    str | None,
    typer.Argument(
        help=(
            "A file of texts (- for stdin), of states (.safetensors) or of vectors"
            " (.npy); a dataset; or --states."
        ),
        autocompletion=shipped,
    ),
]
QueriesArgument = Annotated[
    list[str] | None,
    typer.Argument(help=TEXTS_HELP),
    TextRule(file_option=False, beside_states=True),
]


@command
def search(
    shared: Shared,
    source: SourceArgument = None,
    queries: QueriesArgument = None,
    k: Annotated[int, typer.Option("-k", help="How many of the nearest.")] = 10,
    site: SiteOption = None,
    pool: PoolOption = None,
    nearness: Annotated[str, typer.Option(help="cosine, dot or l2.")] = "cosine",
    texts: Annotated[
        str | None,
        typer.Option(help="A file with the texts of the vectors in a .npy file."),
    ] = None,
    text: TextOption = None,
    states: StatesOption = None,
    truncate: TruncateOption = False,
) -> None:
    """Which texts are nearest to this one?

    Prints them, the nearest first; --out found.html keeps the picture, .csv the
    numbers. Queries are read by the model that states were made with, if no other way
    to load the same model is given.
    """
    if states is not None:
        queries = [*([] if source is None else _texts(source)), *(queries or [])]
    path = Path((source or "").removeprefix("@")) if states is None else states
    if not path.name:
        raise errors.TextError(
            "No source to search",
            "none was given",
            "Give a file, a dataset, or --states.",
        )
    vectors = states is not None or path.suffix.lower() in VECTORS
    named = texts if vectors else source
    given: Any = None if named is None else list(dataset(named, text).texts)
    rows = opened(path) if vectors else None
    if not queries:
        raise errors.TextError(
            "No texts", "no query was given", "Give a text to search for."
        )
    model = shared.load_other(_model_of(rows, shared.model, path))
    options: dict[str, Any] = {
        "site": site,
        "pool": pooling(pool),
        "nearness": nearness,
    }
    if truncate and rows is None:
        given = model.encode(given, truncate=True)
    query = model.encode(queries or [], truncate=truncate)
    show(
        hs.search(
            model if rows is None else rows, (model, query), k, texts=given, **options
        ),
        shared,
    )


def _model_of(rows: Any, given: str | None, path: Path) -> str | None:
    """The name of the model that reads the queries: that of the states, where they know
    it.

    One that plainly is another is refused before it is loaded, which may take minutes.
    """
    part = getattr(rows, "encoder", rows)
    source = getattr(part, "source", None)
    if source is None:
        return given
    problem = f"Cannot search for a text in {path.name}"
    if given is None:
        if source.model not in ZOO and "/" not in source.model:
            reason = (
                f"its states are of {source.model[:60]!r}, and no name says where that"
                " model is"
            )
            raise errors.StatesError(
                problem, reason, "Name the folder of that model: --model PATH."
            )
        return str(source.model)
    known = outline(given)
    other = given in ZOO and source.model in ZOO and given != source.model
    if other or _differ(known.layers, source.depth):
        reason = f"its states are of {source.model}, and not of {known.name}"
        raise errors.StatesError(
            problem,
            reason,
            "Leave --model out, or name the model that they were made with.",
        )
    return given


def _differ(layers: int | None, depth: int | None) -> bool:
    """Whether two models have other numbers of layers, where both are known."""
    return layers is not None and depth is not None and layers != depth


def _texts(word: str) -> list[str]:
    return list(texts_in([word]))  # type: ignore[arg-type]


def opened(source: Path) -> Any:
    """States or vectors from their file."""
    import numpy as np

    if source.suffix.lower() != ".npy":
        return read_states(source)
    try:
        return np.load(source, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise errors.FileError(
            f"Cannot read vectors from {source}", str(error), "Give a .npy file."
        ) from error
