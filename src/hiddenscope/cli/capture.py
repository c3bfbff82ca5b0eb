"""The hidden states of texts."""

from typing import Annotated

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.command import (
    Shared,
    SitesOption,
    TextsArgument,
    TruncateOption,
    command,
    writes,
)
from hiddenscope.cli.terminal import echo, print_json, visible


@command
@writes(".safetensors")
def capture(
    shared: Shared,
    texts: TextsArgument = None,
    sites: SitesOption = "layer.*,final",
    generate: Annotated[
        int,
        typer.Option(
            help=(
                "Generate this many tokens after the text, and capture their states"
                " too."
            )
        ),
    ] = 0,
    truncate: TruncateOption = False,
) -> None:
    """Capture the hidden states of texts.

    Prints the sites, the tokens and the shape. --out states.safetensors keeps the
    values.
    """
    texts = texts or []
    if generate and len(texts) != 1:
        raise errors.TextError(
            "--generate takes one text", f"there are {len(texts)}", "Give exactly one."
        )
    model = shared.load()
    captured: hs.States | hs.Pair
    if generate:
        captured = model.capture_generation(
            texts[0], max_new_tokens=generate, sites=sites
        )
    else:
        captured = model.capture(texts, sites, truncate=truncate)
    if shared.out:
        captured.save(shared.out)
        shared.say_written()
    if shared.json:
        print_json(_described(captured))
    elif not shared.out:
        echo(visible(repr(captured), keep="\n"))


def _described(captured: "hs.States | hs.Pair") -> dict[str, object]:
    if isinstance(captured, hs.Pair):
        return {
            "encoder": _described(captured.encoder),
            "decoder": _described(captured.decoder),
        }
    tokens = captured.tokens
    columns = {
        name: getattr(tokens, name).tolist()
        for name in ("text", "positions", "ids", "spans")
    }
    return {
        "sites": [str(site) for site in captured.sites],
        "shape": list(captured.values.shape),
        "dtype": str(captured.values.dtype).removeprefix("torch."),
        "texts": tokens.texts,
        "tokens": columns | {"strings": tokens.strings},
        "source": captured.source.to_json(),
    }
