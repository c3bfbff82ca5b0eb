"""Which texts belong together."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope.cli.arguments import TextRule
from hiddenscope.cli.command import Shared, TruncateOption, command, show
from hiddenscope.cli.embed import PoolOption, SiteOption, pooling
from hiddenscope.cli.search import opened
from hiddenscope.cli.states import StatesOption

SOURCE = (
    "The texts; @FILE reads texts, states (.safetensors) or vectors (.npy), - reads"
    " lines of stdin."
)


@command
def cluster(
    shared: Shared,
    texts: Annotated[
        list[str] | None, typer.Argument(help=SOURCE), TextRule(vectors=True)
    ] = None,
    site: SiteOption = None,
    pool: PoolOption = None,
    smallest: Annotated[
        int, typer.Option(help="The least texts that make a cluster.")
    ] = 5,
    states: StatesOption = None,
    truncate: TruncateOption = False,
) -> None:
    """Which texts belong together?

    Prints every cluster with its most typical texts; --out clusters.html keeps the
    picture, .csv the numbers. States (--states) and vectors (@FILE.npy) need no model.
    """
    # A path, where the argument was a file of states or vectors.
    given: Any = texts if states is None else states
    options: dict[str, Any] = {
        "site": site,
        "pool": pooling(pool),
        "smallest": smallest,
        "truncate": truncate,
    }
    source = (opened(given),) if isinstance(given, Path) else (shared.load(), given)
    show(hs.cluster(*source, **options), shared)
