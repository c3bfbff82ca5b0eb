"""What each layer would say."""

from typing import Annotated

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, SitesOption, TextsArgument, command, handed_out
from hiddenscope.cli.terminal import lines_of, table, visible


@command
def lens(
    shared: Shared,
    texts: TextsArgument,
    k: Annotated[int, typer.Option("-k", help="How many words of each layer and token.")] = 5,
    target: Annotated[str | None, typer.Option(help="One token to follow (' Paris'), or next: the true next.")] = None,
    sites: SitesOption = "layer.*",
) -> None:
    """Say what each layer would say, if it were the last.

    Prints the best words after the last token, layer by layer; --out lens.html keeps the whole grid, .csv the numbers.
    """
    result = hs.lens(shared.load(), lines_of(texts), k=k, target=target, sites=sites)
    if not handed_out(result, shared):
        typer.echo(visible(result.summary(), keep="\n"))
        if result.facts["texts"] == 1:
            _print_last(result)


def _print_last(result: hs.Result) -> None:
    """What every layer says after the last token."""
    here = result.data.isel(token=-1)
    columns = (here[name].values.tolist() for name in ("site", "entropy", "kl", "word", "probability"))
    rows = (
        [
            site,
            f"{entropy:.2f}",
            f"{kl:.2f}",
            "  ".join(f"{word!r} {share:.2f}" for word, share in zip(*said, strict=True)),
        ]
        for site, entropy, kl, *said in zip(*columns, strict=True)
    )
    table(["site", "entropy", "KL", "best words"], rows, text=(0, 3))
