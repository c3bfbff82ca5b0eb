"""Two texts, or one text in two models."""

from typing import Annotated

import typer

import hiddenscope as hs
from hiddenscope.cli.arguments import TextRule, check_place
from hiddenscope.cli.command import Shared, SitesOption, TruncateOption, command, show
from hiddenscope.errors import TextError

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", "--targets", help="The text of an encoder-decoder's decoder."
    ),
]
OtherTargetOption = Annotated[
    str | None,
    typer.Option(
        "--other-target",
        "--other-targets",
        help="The same for the second side, if it differs.",
    ),
]

ONE = TextRule(many=False)


@command
def compare(
    shared: Shared,
    a: Annotated[str, typer.Argument(help="A text; @FILE reads it from a file."), ONE],
    b: Annotated[
        str | None, typer.Argument(help="The text that it is compared with."), ONE
    ] = None,
    other: Annotated[
        str | None, typer.Option(help="Compare the one text in this model too.")
    ] = None,
    other_dtype: Annotated[
        str | None,
        typer.Option(help="The other side's dtype alone; --dtype sets both."),
    ] = None,
    other_device: Annotated[
        str | None,
        typer.Option(help="The other side's device alone; --device sets both."),
    ] = None,
    sites: SitesOption = "layer.*,final",
    target: TargetOption = None,
    other_target: OtherTargetOption = None,
    truncate: TruncateOption = False,
) -> None:
    """Where, and by how much, do two texts or two models differ?

    Prints the findings. --out compare.html keeps the pictures, .csv the numbers.
    """
    check_place(other_device, other_dtype)
    if other is None and (other_dtype or other_device):
        other = shared.model or ""  # the same model again, otherwise computed
    if (b is None) == (other is None):
        reason = (
            "there is no second text and no other model"
            if b is None
            else "a second text and another model"
        )
        raise TextError("Cannot compare", reason, "Give a second text, or --other.")
    model = shared.load()
    second = None
    if other is not None:
        second = shared.load_other(
            other or None, device=other_device, dtype=other_dtype
        )
    # Each model is given a decoder's text of its own.
    if second is not None and other_target is not None:
        pairs = (model, target), (second, other_target)
        sides = [
            one.capture(a, sites, targets=text, truncate=truncate)
            for one, text in pairs
        ]
        show(hs.compare(sides[0], sides[1]), shared)
        return
    text = (
        b
        if other_target is None or b is None
        else model.encode(b, targets=other_target, truncate=truncate)
    )
    show(
        hs.compare(
            model, a, text, other=second, sites=sites, targets=target, truncate=truncate
        ),
        shared,
    )
