"""What a linear probe reads off every layer."""

from typing import Annotated, Literal

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, SitesOption, TruncateOption, command, show

DATA = "A shipped dataset, a file, - for stdin; or position, word-start, previous-token with --token each."


@command
def probe(
    shared: Shared,
    data: Annotated[str, typer.Argument(help=DATA)] = "cities-incomplete",
    task: Annotated[Literal["classify", "regress"], typer.Option(help="Classes, or numbers.")] = "classify",
    token: Annotated[str, typer.Option(help="What stands for a text: last, first, mean, max, cls, each.")] = "last",
    text: Annotated[str | None, typer.Option(help="The column of the texts.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the labels, or a ready label of tokens.")] = None,
    sites: SitesOption = "layer.*,final",
    seed: Annotated[int, typer.Option(help="Decides the folds and the control labels.")] = 0,
    truncate: TruncateOption = False,
) -> None:
    """Train a linear probe on every layer, and test it on texts that it has not seen.

    Prints where the label can be read and how sure that is; --out probe.html keeps the picture, probe.nc the probes.
    """
    columns = {"text": text, "label": label}
    result = hs.probe(shared.load(), data, task=task, sites=sites, token=token, seed=seed, truncate=truncate, **columns)
    show(result, shared)
