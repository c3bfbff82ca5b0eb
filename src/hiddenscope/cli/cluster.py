"""Which texts belong together."""

from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, TruncateOption, command, handed_out
from hiddenscope.cli.embed import FilesArgument, PoolOption, SiteOption, position, texts_in
from hiddenscope.cli.search import opened
from hiddenscope.cli.terminal import table, visible


@command
def cluster(
    shared: Shared,
    texts: FilesArgument,
    site: SiteOption = None,
    pool: PoolOption = None,
    smallest: Annotated[int, typer.Option(help="The least texts that make a cluster.")] = 5,
    truncate: TruncateOption = False,
) -> None:
    """Find the texts that belong together.

    Prints every cluster with its most typical texts; --out clusters.html keeps the picture, .csv the numbers. States
    (.safetensors) and vectors (.npy) need no model.
    """
    source = opened(texts[0]) if len(texts) == 1 else None
    where: dict[str, Any] = {"site": site, "pool": position(pool), "smallest": smallest, "truncate": truncate}
    given = (shared.load(), texts_in(texts)) if source is None else (source,)
    result = hs.cluster(*given, **where)
    if not handed_out(result, shared):
        _print(result)


def _print(result: "hs.Result") -> None:
    facts = result.facts
    unit = "tokens" if "tokens" in facts else "texts"
    typer.echo(visible(f"{result.title}: {facts[unit]} {unit}, {facts['clusters']} clusters, {facts['noise']} in none"))
    if "drawn at random" in facts:
        typer.echo(f"drawn at random: {facts['drawn at random']}")
    said = [facts[f"cluster {number}"] for number in range(min(facts["clusters"], 20))]
    rows = (
        [str(number), str(one["size"]), f"{one['stability']:.2f}", "\n".join(one.get("typical", []))]
        for number, one in enumerate(said)
    )
    table(["cluster", "size", "stability", "typical"], rows, text=(3,))
