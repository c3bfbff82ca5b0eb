"""The laminar profile of texts."""

from typing import Annotated

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, SitesOption, TextsArgument, TruncateOption, command, show
from hiddenscope.cli.terminal import lines_of


@command
def profile(
    shared: Shared,
    texts: TextsArgument,
    sites: SitesOption = "layer.*,final",
    footing: Annotated[str, typer.Option(help="raw, normed (through the final norm), or mixed.")] = "raw",
    sample: Annotated[int, typer.Option(help="At most so many tokens for neighbours and likeness.")] = 1000,
    truncate: TruncateOption = False,
) -> None:
    """Measure states layer by layer: how large, how spread, how alike.

    Prints what they show; --out profile.html keeps the pictures, --out profile.csv the numbers.
    """
    model, given = shared.load(), lines_of(texts)
    result = hs.profile(model, given, sites=sites, footing=footing, sample=sample, truncate=truncate)
    show(result, shared)
