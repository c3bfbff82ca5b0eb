"""Which texts belong together."""

from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, TruncateOption, command, show
from hiddenscope.cli.embed import FilesArgument, PoolOption, SiteOption, position, texts_in
from hiddenscope.cli.search import opened


@command
def cluster(
    shared: Shared,
    texts: FilesArgument,
    site: SiteOption = None,
    pool: PoolOption = None,
    smallest: Annotated[int, typer.Option(help="The least texts that make a cluster.")] = 5,
    truncate: TruncateOption = False,
) -> None:
    """Which texts belong together?

    Prints every cluster with its most typical texts; --out clusters.html keeps the picture, .csv the numbers. States
    (.safetensors) and vectors (.npy) need no model.
    """
    source = opened(texts[0]) if len(texts) == 1 else None
    options: dict[str, Any] = {"site": site, "pool": position(pool), "smallest": smallest, "truncate": truncate}
    given = (shared.load(), texts_in(texts)) if source is None else (source,)
    show(hs.cluster(*given, **options), shared)
