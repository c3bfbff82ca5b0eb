"""Which states carry an answer."""

from typing import Annotated, Literal

import typer

import hiddenscope as hs
from hiddenscope.cli.arguments import TextRule
from hiddenscope.cli.command import Shared, SitesOption, command, show

ONE = TextRule(many=False)


@command
def patch(
    shared: Shared,
    clean: Annotated[
        str,
        typer.Argument(help="A prompt that the model continues with the answer."),
        ONE,
    ],
    corrupt: Annotated[
        str,
        typer.Argument(help="A prompt that it continues with the other answer."),
        ONE,
    ],
    answer: Annotated[
        str, typer.Option(help="One token, with its leading space: ' Paris'.")
    ],
    other: Annotated[
        str, typer.Option(help="The answer to the corrupt prompt: ' Berlin'.")
    ],
    target: Annotated[
        str | None, typer.Option(help="The decoder's text, in an encoder-decoder.")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            help="The position at which the answer is read; the last if not given."
        ),
    ] = None,
    sites: SitesOption = "layer.*",
    into: Annotated[
        Literal["corrupt", "clean"],
        typer.Option(help="The run that states of the other one are put into."),
    ] = "corrupt",
    window: Annotated[
        int, typer.Option(help="How many tokens are exchanged at a time.")
    ] = 1,
    layers: Annotated[
        int | None,
        typer.Option(help="How many layers in a row, where whole layers are."),
    ] = None,
    method: Annotated[
        Literal["exact", "attribution", "both"],
        typer.Option(
            help="A pass for each state, an estimate by one gradient, or both."
        ),
    ] = "exact",
) -> None:
    """Put each state of one run into another and see how much of the answer it carries.

    Prints where the answer is carried; --out patch.html keeps the picture, .csv the
    numbers.
    """
    contrast = hs.Contrast(clean, corrupt, answer, other, targets=target, at=at)
    result = hs.patch(
        shared.load(),
        contrast,
        sites=sites,
        into=into,
        window=window,
        layers=layers,
        method=method,
    )
    show(result, shared)
