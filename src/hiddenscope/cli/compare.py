"""Two texts, or one text in two models."""

from typing import Annotated

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, SitesOption, TruncateOption, command, show


@command
def compare(
    shared: Shared,
    a: Annotated[str, typer.Argument(help="A text.")],
    b: Annotated[str | None, typer.Argument(help="The text that it is compared with.")] = None,
    other: Annotated[str | None, typer.Option(help="Compare the one text in this model too, in place of two.")] = None,
    sites: SitesOption = "layer.*,final",
    target: Annotated[str | None, typer.Option(help="The text of an encoder-decoder's decoder.")] = None,
    other_target: Annotated[str | None, typer.Option(help="The same for the second side, if it is another.")] = None,
    truncate: TruncateOption = False,
) -> None:
    """Compare two texts, or one text in two models.

    Prints where they part and where the difference grows; --out difference.html keeps the picture, .csv the numbers.
    """
    model = shared.load()
    second = hs.load(other, device=shared.device, dtype=shared.dtype) if other is not None else None
    decoders = {"targets": target, "other_targets": other_target}
    result = hs.compare(model, a, b, other=second, sites=sites, truncate=truncate, **decoders)
    show(result, shared)
