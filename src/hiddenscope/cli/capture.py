"""The hidden states of texts."""

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.command import Arguments, command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, print_json, visible
from hiddenscope.interface import Parameter
from hiddenscope.interface.parameters import TRUNCATE, sites, texts

GENERATE = Parameter(
    "generate",
    "integer",
    "Generate this many tokens after the text, and capture their states too.",
    default=0,
    least=0,
)


@command("capture", (texts(), sites(), GENERATE, TRUNCATE), writes=(".safetensors",))
def capture(shared: Shared, arguments: Arguments) -> None:
    """Capture the hidden states of texts.

    Prints the sites, the tokens and the shape. --out states.safetensors keeps the
    values.
    """
    texts, sites = arguments["texts"], arguments["sites"]
    new_tokens = arguments["generate"]
    if new_tokens and len(texts) != 1:
        raise errors.TextError(
            "--generate takes one text", f"there are {len(texts)}", "Give exactly one."
        )
    model = shared.load()
    states: hs.States | hs.Pair
    if new_tokens:
        states = model.capture_generation(
            texts[0], max_new_tokens=new_tokens, sites=sites
        )
    else:
        states = model.capture(texts, sites, truncate=arguments["truncate"])
    if shared.out:
        states.save(shared.out)
        shared.report_written()
    if shared.json:
        print_json(_as_json(states))
    elif not shared.out:
        echo(visible(repr(states), keep="\n"))


def _as_json(states: "hs.States | hs.Pair") -> dict[str, object]:
    if isinstance(states, hs.Pair):
        return {
            "encoder": _as_json(states.encoder),
            "decoder": _as_json(states.decoder),
        }
    tokens = states.tokens
    columns = {
        name: getattr(tokens, name).tolist()
        for name in ("text", "positions", "ids", "spans")
    }
    shape = [len(states.sites), len(tokens)]
    # Where widths differ, the shape ends before them.
    if len(set(states.widths)) == 1:
        shape.append(states.width)
    return {
        "sites": [str(site) for site in states.sites],
        "shape": shape,
        "widths": states.widths,
        "dtype": str(states.values.dtype).removeprefix("torch."),
        "texts": tokens.texts,
        "tokens": columns | {"strings": tokens.strings},
        "source": states.source.to_json(),
    }
