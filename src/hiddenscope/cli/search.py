"""The texts nearest to a query."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.command import Shared, TruncateOption, command, show
from hiddenscope.cli.embed import PoolOption, SiteOption, position, texts_in

SourceArgument = Annotated[
    str, typer.Argument(help="Texts (.txt .jsonl .csv .parquet, - for stdin), states (.safetensors) or vectors (.npy).")
]


@command
def search(
    shared: Shared,
    source: SourceArgument,
    queries: Annotated[list[str], typer.Argument(help="The texts to look for.")],
    k: Annotated[int, typer.Option("-k", help="How many of the nearest.")] = 10,
    site: SiteOption = None,
    pool: PoolOption = None,
    nearness: Annotated[str, typer.Option(help="cosine, dot or l2.")] = "cosine",
    texts: Annotated[Path | None, typer.Option(help="The texts of the vectors in a .npy file.")] = None,
    truncate: TruncateOption = False,
) -> None:
    """Which texts are nearest to this one?

    Prints them, the nearest first; --out found.html keeps the picture, .csv the numbers.
    """
    model = shared.load()
    rows = opened(source)
    given: Any = texts if rows is not None else texts_in([source])
    options: dict[str, Any] = {"site": site, "pool": position(pool), "nearness": nearness}
    if truncate and rows is None:
        given = model.encode(hs.read(given).texts, truncate=True)
    query = model.encode(queries, truncate=truncate)
    show(hs.search(model if rows is None else rows, (model, query), k, texts=given, **options), shared)


def opened(source: str) -> Any:
    """States or vectors from their file; None where it is a file of texts."""
    import numpy as np

    suffix = Path(source).suffix.lower()
    if suffix == ".safetensors":
        try:
            return hs.States.load(source)
        except errors.FileError as error:
            if "Pair" not in str(error):
                raise
            return hs.Pair.load(source)
    if suffix != ".npy":
        return None
    try:
        return np.load(source, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise errors.FileError(f"Cannot read vectors from {source}", str(error), "Give a .npy file.") from error
