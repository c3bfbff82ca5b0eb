"""The lens on the command line, and the fitting of lenses."""

from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.command import (
    RESULTS,
    Shared,
    SitesOption,
    TextsArgument,
    command,
    show,
    writes,
)
from hiddenscope.cli.terminal import echo, print_json, visible


@command
@writes(*RESULTS, ".safetensors")
def lens(
    shared: Shared,
    texts: TextsArgument = None,
    k: Annotated[
        int, typer.Option("-k", help="How many words of each layer and token.")
    ] = 5,
    target: Annotated[
        str | None,
        typer.Option(help="One token to follow (' Paris'), or next: the true next."),
    ] = None,
    lens: Annotated[
        str, typer.Option(help="logit, or the path of a lens that was fitted.")
    ] = "logit",
    fit: Annotated[
        str | None,
        typer.Option(
            help="Fit a lens on the texts: tuned or jacobian; --out keeps it."
        ),
    ] = None,
    sites: SitesOption = "layer.*",
) -> None:
    """Show what each layer would predict, if it were the last.

    Prints the top tokens after the last token, layer by layer; --out lens.html keeps
    the whole grid, .csv the numbers.
    """
    if fit is not None:
        _fit(shared, texts or [], fit)
    else:
        show(
            hs.lens(
                shared.load(), texts or [], k=k, target=target, lens=lens, sites=sites
            ),
            shared,
        )


def _fit(shared: Shared, texts: list[str], kind: Any) -> None:
    """Fit a lens and keep it; an interrupted fit of a Jacobian lens continues when the
    command is run again.
    """
    if shared.out is None:
        raise errors.FileError(
            f"Cannot keep the {kind} lens",
            "no path was given",
            "Add --out lens.safetensors.",
        )
    partial = (
        shared.out.with_suffix(".partial.safetensors") if kind == "jacobian" else None
    )
    fitted = hs.Lens.fit(shared.load(), texts, kind, partial=partial)
    fitted.save(shared.out)
    shared.say_written()
    if partial is not None:
        partial.unlink(missing_ok=True)
    if shared.json:
        print_json(fitted.facts)
    else:
        echo(visible(f"{fitted!r}, kept in {shared.out}"))
