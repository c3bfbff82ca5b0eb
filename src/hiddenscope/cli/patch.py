"""Which states carry an answer."""

from typing import Annotated, Literal

import typer

import hiddenscope as hs
from hiddenscope import texts
from hiddenscope.cli.command import Shared, command, show
from hiddenscope.errors import TextError


@command
def patch(
    shared: Shared,
    clean: Annotated[str | None, typer.Argument(help="A text that leads to the answer.")] = None,
    corrupt: Annotated[str | None, typer.Argument(help="A text that leads to the other.")] = None,
    answer: Annotated[str | None, typer.Option(help="One token, with its leading space: ' Paris'.")] = None,
    other: Annotated[str | None, typer.Option(help="The token that the corrupt text leads to: ' Berlin'.")] = None,
    what: Annotated[
        Literal["layer", "attn", "mlp", "block"] | None,
        typer.Option(help="Whole states (if not given), what a branch adds; blocks of a donor (if not given there)."),
    ] = None,
    direction: Annotated[
        Literal["denoise", "noise"], typer.Option(help="Clean states into the corrupt run, or the other way.")
    ] = "denoise",
    method: Annotated[
        Literal["exact", "attribution", "both"],
        typer.Option(help="A pass for each state, the gradient's estimate, both."),
    ] = "exact",
    window: Annotated[int, typer.Option(help="So many tokens at a time, or blocks of a donor.")] = 1,
    layers: Annotated[int | None, typer.Option(help="So many layers in a row, where whole layers are swapped.")] = None,
    target: Annotated[str | None, typer.Option(help="The decoder's text, in an encoder-decoder.")] = None,
    donor: Annotated[str | None, typer.Option(help="Another model of the same shape, in the place of texts.")] = None,
    data: Annotated[str | None, typer.Option(help="Prompts for the donor, each labelled with its answer.")] = None,
) -> None:
    """Put each state of one run in another and see how much of the answer it carries.

    With --donor and --data blocks of another model go into this one, a window at a time.

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
        donor=None if donor is None else hs.load(donor, device=shared.device, dtype=shared.dtype),
        data=None if data is None else _answered(data),
    )
    show(result, shared)


def _answered(data: str) -> list[tuple[str, str]]:
    """Prompts with their labels as answers."""
    read = texts.read(data)
    if read.labels is None:
        raise TextError(f"Prompts from {data}", "they have no labels", "Label each with its answer, one token.")
    return [(text, str(label)) for text, label in zip(read.texts, read.labels, strict=True)]
