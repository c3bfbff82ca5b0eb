"""The texts nearest to a query."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.command import Shared, TruncateOption, command, handed_out
from hiddenscope.cli.embed import PoolOption, SiteOption, position, texts_in
from hiddenscope.cli.terminal import table, visible

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
    texts: Annotated[Path | None, typer.Option(help="The texts that the vectors of a .npy file are of.")] = None,
    truncate: TruncateOption = False,
) -> None:
    """Find the texts nearest to a query.

    Prints them, the nearest first; --out found.html keeps the picture, .csv the numbers.
    """
    model = shared.load()
    found = opened(source)
    given = texts if found is not None else texts_in([source])
    where: dict[str, Any] = {"k": k, "site": site, "pool": position(pool), "nearness": nearness, "truncate": truncate}
    result = hs.search(model if found is None else found, queries, texts=given, model=model, **where)
    if not handed_out(result, shared):
        _print(result)


def opened(source: str) -> Any:
    """States or vectors from their file; None where it is one of texts."""
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


def _print(result: "hs.Result") -> None:
    facts = result.facts
    typer.echo(visible(f"{result.title}: {facts['searched']}, by {facts['nearness']}"))
    named = "string" if "string" in result.data else "number"
    for query in range(result.data.sizes["query"]):
        here = result.data.isel(query=query)
        typer.echo(f"\n{visible(str(here['query'].item()))}")
        columns = (here[name].values.tolist() for name in ("rank", "score", "number", named))
        rows = (
            [str(rank), f"{score:.4f}", str(number), str(text)]
            for rank, score, number, text in zip(*columns, strict=True)
        )
        table(["rank", facts["nearness"], "number", "text"], rows, text=(3,))
