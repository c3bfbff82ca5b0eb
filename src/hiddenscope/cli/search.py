"""The texts nearest to a query."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.arguments import VECTORS, TextRule, dataset, shipped
from hiddenscope.cli.command import TEXTS_HELP, Shared, TextOption, TruncateOption, command, show
from hiddenscope.cli.embed import PoolOption, SiteOption, position

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="A file of texts (- for stdin), of states (.safetensors) or of vectors (.npy); or a dataset.",
        autocompletion=shipped,
    ),
]
QueriesArgument = Annotated[list[str] | None, typer.Argument(help=TEXTS_HELP), TextRule(file_option=False)]


@command
def search(
    shared: Shared,
    source: SourceArgument,
    queries: QueriesArgument = None,
    k: Annotated[int, typer.Option("-k", help="How many of the nearest.")] = 10,
    site: SiteOption = None,
    pool: PoolOption = None,
    nearness: Annotated[str, typer.Option(help="cosine, dot or l2.")] = "cosine",
    texts: Annotated[str | None, typer.Option(help="A file with the texts of the vectors in a .npy file.")] = None,
    text: TextOption = None,
    truncate: TruncateOption = False,
) -> None:
    """Which texts are nearest to this one?

    Prints them, the nearest first; --out found.html keeps the picture, .csv the numbers.
    """
    path = Path(source.removeprefix("@"))
    named = texts if path.suffix.lower() in VECTORS else source
    given: Any = None if named is None else list(dataset(named, text).texts)
    rows = opened(path) if path.suffix.lower() in VECTORS else None
    model = shared.load()
    options: dict[str, Any] = {"site": site, "pool": position(pool), "nearness": nearness}
    if truncate and rows is None:
        given = model.encode(given, truncate=True)
    query = model.encode(queries or [], truncate=truncate)
    show(hs.search(model if rows is None else rows, (model, query), k, texts=given, **options), shared)


def opened(source: Path) -> Any:
    """States or vectors from their file."""
    import numpy as np

    if source.suffix.lower() == ".safetensors":
        try:
            return hs.States.load(source)
        except errors.FileError as error:
            if "Pair" not in str(error):
                raise
            return hs.Pair.load(source)
    try:
        return np.load(source, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise errors.FileError(f"Cannot read vectors from {source}", str(error), "Give a .npy file.") from error
