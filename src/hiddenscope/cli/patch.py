"""Which states carry an answer."""

from typing import Annotated, Literal

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, command, show


@command
def patch(
    shared: Shared,
    clean: Annotated[str, typer.Argument(help="A text that leads to the answer.")],
    corrupt: Annotated[str, typer.Argument(help="A text that leads to the other.")],
    answer: Annotated[str, typer.Option(help="One token, with its leading space: ' Paris'.")],
    other: Annotated[str, typer.Option(help="The token that the corrupt text leads to: ' Berlin'.")],
    what: Annotated[
        Literal["layer", "attn", "mlp"], typer.Option(help="Whole states, or what a branch adds.")
    ] = "layer",
    direction: Annotated[
        Literal["denoise", "noise"], typer.Option(help="Clean states into the corrupt run, or the other way.")
    ] = "denoise",
    method: Annotated[
        Literal["exact", "attribution", "both"],
        typer.Option(help="A pass for each state, the gradient's estimate, both."),
    ] = "exact",
    window: Annotated[int, typer.Option(help="So many tokens at a time.")] = 1,
    layers: Annotated[int | None, typer.Option(help="So many layers in a row, where whole layers are swapped.")] = None,
    target: Annotated[str | None, typer.Option(help="The decoder's text, in an encoder-decoder.")] = None,
) -> None:
    """Put each state of one run in another and see how much of the answer it carries.

    Prints where the answer is carried; --out patch.html keeps the picture, .csv the numbers.
    """
    model = shared.load()
    result = hs.patch(
        model,
        clean=clean,
        corrupt=corrupt,
        answer=answer,
        other=other,
        what=what,
        direction=direction,
        method=method,
        window=window,
        layers=layers,
        targets=target,
    )
    show(result, shared)
