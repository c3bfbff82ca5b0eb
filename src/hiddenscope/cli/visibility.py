"""Which states influence a state, and which does it influence?"""

from typing import Annotated, Literal

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, SitesOption, TextsArgument, TruncateOption, command, show
from hiddenscope.cli.terminal import lines_of

Measure = Literal["l1", "frobenius", "relative", "logit"]


@command
def visibility(
    shared: Shared,
    texts: TextsArgument,
    measure: Annotated[Measure, typer.Option(help="How influence is measured.")] = "l1",
    sites: SitesOption = "layer.*,final",
    probes: Annotated[int | None, typer.Option(help="Random vectors that estimate a Frobenius norm.")] = None,
    target: Annotated[str | None, typer.Option(help="With logit: the token, in place of the true next one.")] = None,
    targets: Annotated[str | None, typer.Option(help="The text of an encoder-decoder's decoder.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random vectors.")] = 0,
    truncate: TruncateOption = False,
) -> None:
    """Which states influence a state, and which does it influence?

    Prints the findings. --out visibility.html keeps the map, .csv the numbers. Several texts are averaged.
    """
    model = shared.load()
    inputs = model.encode(lines_of(texts), targets=targets, truncate=truncate)
    result = hs.visibility(model, inputs, measure=measure, sites=sites, probes=probes, target=target, seed=seed)
    show(result, shared)
