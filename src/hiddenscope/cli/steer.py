"""What the model answers and writes, changed along a direction."""

from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope.cli.arguments import dataset, texts_in
from hiddenscope.cli.command import Shared, TextsArgument, command, show
from hiddenscope.cli.embed import pooling
from hiddenscope.errors import TextError
from hiddenscope.states.pooling import CHOICES

FEW = 10  # on all 40 the perplexity of every setting takes most of the time
QUALITY = (
    f"Texts for the perplexity: a file, or plain for all 40 shipped sentences; {FEW} of"
    " them if not given."
)


@command
def steer(
    shared: Shared,
    toward: Annotated[
        list[str],
        typer.Option(help="A text, @FILE, or with --data a label, to steer to."),
    ],
    away: Annotated[
        list[str],
        typer.Option(help="A text, @FILE, or with --data a label, to steer away from."),
    ],
    prompts: TextsArgument = None,
    data: Annotated[
        str | None, typer.Option(help="Labelled texts: a shipped name, or a file.")
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(help="A token to look at, with its space: ' Paris'."),
    ] = None,
    strengths: Annotated[
        str | None,
        typer.Option(help="Multiples of the difference, a comma list: -1,1,2."),
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Project the direction out instead of adding it."
        ),
    ] = False,
    upwards: Annotated[
        bool, typer.Option("--upwards", help="In every layer above each site too.")
    ] = False,
    sites: Annotated[
        str | None,
        typer.Option(help="Which states, one at a time; ten layers if not given."),
    ] = None,
    quality: Annotated[str | None, typer.Option(help=QUALITY)] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            help=(
                f"Which states of a text make its direction: {CHOICES}; if not given,"
                " last of a decoder and mean of an encoder."
            )
        ),
    ] = None,
    spare_first: Annotated[
        bool,
        typer.Option(
            "--spare-first",
            help="Take the first tokens' mean state out of the direction.",
        ),
    ] = False,
    new_tokens: Annotated[
        int | None, typer.Option(help="How many tokens are written; 0 for none.")
    ] = None,
) -> None:
    """Change what the model answers and writes along the difference of two sets of
    texts.

    Prints what moves and what it costs, and the texts before and after; --out
    steer.html keeps the pictures.
    """
    if ablate and strengths is not None:
        reason = "an ablation projects the direction out wholly"
        raise TextError(
            "--strengths and --ablate were both given", reason, "Leave one of them out."
        )
    sets = _two_sets(data, toward, away)
    plain = list(
        dataset("plain").texts[:FEW] if quality is None else dataset(quality).texts
    )
    options: dict[str, Any] = (
        {}
        if strengths is None and not ablate
        else {"strengths": "ablate" if ablate else _numbers(strengths)}
    )
    model = shared.load()
    direction = hs.Direction.between(
        model,
        *sets,
        sites=sites,
        pool=pooling(pool),
        upwards=upwards,
        spare_first=spare_first,
    )
    result = hs.steer(
        model,
        prompts or [],
        direction,
        answers=answer or None,
        quality=plain,
        new_tokens=new_tokens,
        **options,
    )
    show(result, shared)


def _numbers(strengths: str | None) -> list[float]:
    try:
        return [float(one) for one in (strengths or "").split(",")]
    except ValueError:
        remedy = "Give a comma list: --strengths=-1,1,2."
        raise TextError(
            "--strengths must be numbers", f"got {strengths!r}", remedy
        ) from None


def _two_sets(
    data: str | None, toward: list[str], away: list[str]
) -> tuple[list[str], list[str]]:
    """The two sets of texts: those given, or those of a dataset that have the labels
    given.
    """
    if data is None:
        return list(texts_in(toward)), list(texts_in(away))  # type: ignore[arg-type]
    read = dataset(data)
    labels = [str(label) for label in read.labels or ()]
    for label in (*toward, *away):
        if label not in labels:
            reason = (
                f"its labels are {', '.join(sorted(set(labels)))}"
                if labels
                else "it has no labels"
            )
            raise TextError(
                f"No label {label!r} in {data}", reason, "Give one of these."
            )
    first, second = (
        [
            text
            for text, label in zip(read.texts, labels, strict=True)
            if label in chosen
        ]
        for chosen in (toward, away)
    )
    return first, second
