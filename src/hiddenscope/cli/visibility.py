"""What a hidden state can see."""

from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, SitesOption, TextsArgument, command, show
from hiddenscope.cli.terminal import lines_of


@command
def visibility(
    shared: Shared,
    texts: TextsArgument,
    measure: Annotated[str, typer.Option(help="l1, frobenius, relative, or logit.")] = "l1",
    sites: SitesOption = "layer.*,final",
    probes: Annotated[int | None, typer.Option(help="Random vectors that estimate a Frobenius norm.")] = None,
    target: Annotated[str | None, typer.Option(help="With logit: the token, in place of the true next one.")] = None,
    targets: Annotated[str | None, typer.Option(help="The text of an encoder-decoder's decoder.")] = None,
) -> None:
    """Show how much every state is influenced by every state before it; several texts are averaged.

    Prints how far back influence reaches; --out map.html keeps the map, which shows what a cell sees and what sees it.
    """
    chosen: Any = measure  # what is not a measure is refused there
    options: dict[str, Any] = {"sites": sites, "probes": probes, "target": target, "targets": targets}
    show(hs.visibility(shared.load(), lines_of(texts), measure=chosen, **options), shared)
