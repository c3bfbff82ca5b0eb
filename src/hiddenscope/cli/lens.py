"""What each layer would say."""

from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.command import RESULTS, Shared, SitesOption, TextsArgument, command, handed_out, writes
from hiddenscope.cli.terminal import lines_of, print_json, table, visible


@command
@writes(*RESULTS, ".safetensors")
def lens(
    shared: Shared,
    texts: TextsArgument,
    k: Annotated[int, typer.Option("-k", help="How many words of each layer and token.")] = 5,
    target: Annotated[str | None, typer.Option(help="One token to follow (' Paris'), or next: the true next.")] = None,
    lens: Annotated[str, typer.Option(help="logit, or the path of a lens that was fitted.")] = "logit",
    fit: Annotated[str | None, typer.Option(help="Fit a lens on the texts: tuned or jacobian; --out keeps it.")] = None,
    sites: SitesOption = "layer.*",
) -> None:
    """Say what each layer would say, if it were the last.

    Prints the best words after the last token, layer by layer; --out lens.html keeps the whole grid, .csv the numbers.
    """
    if fit is not None:
        _fit(shared, lines_of(texts), fit)
        return
    result = hs.lens(shared.load(), lines_of(texts), k=k, target=target, lens=lens, sites=sites)
    if not handed_out(result, shared):
        typer.echo(visible(result.summary(), keep="\n"))
        if result.facts["texts"] == 1:
            _print_last(result)


def _fit(shared: Shared, texts: list[str], kind: Any) -> None:
    """Fit a lens and keep it; an interrupted fit that takes long goes on when it is asked for again."""
    if shared.out is None:
        raise errors.FileError(f"A {kind} lens", "there is no place to keep it", "Give --out lens.safetensors.")
    partial = shared.out.with_suffix(".partial.safetensors") if kind == "jacobian" else None
    fitted = hs.Lens.fit(shared.load(), texts, kind, partial=partial)
    fitted.save(shared.out)
    if partial is not None:
        partial.unlink(missing_ok=True)
    if shared.json:
        print_json(fitted.facts)
    else:
        typer.echo(visible(f"{fitted!r}, kept in {shared.out}"))


def _print_last(result: "hs.Result") -> None:
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
