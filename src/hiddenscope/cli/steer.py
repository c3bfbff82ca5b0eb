"""What the model says, changed along a direction."""

from typing import Annotated

import typer

import hiddenscope as hs
from hiddenscope import texts
from hiddenscope.cli.command import Shared, TextsArgument, command, handed_out
from hiddenscope.cli.terminal import lines_of, table, visible
from hiddenscope.errors import TextError


@command
def steer(
    shared: Shared,
    prompts: TextsArgument,
    toward: Annotated[list[str], typer.Option(help="A text, or with --data a label, whose states are steered to.")],
    away: Annotated[list[str], typer.Option(help="A text, or with --data a label, whose states are steered from.")],
    data: Annotated[str | None, typer.Option(help="Labelled texts: a shipped name, or a file.")] = None,
    answer: Annotated[list[str] | None, typer.Option(help="A token to look at, with its space: ' Paris'.")] = None,
    strengths: Annotated[str | None, typer.Option(help="Multiples of the difference, a comma list: -1,1,2.")] = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="Take the direction out, in place of adding it.")] = False,
    upwards: Annotated[bool, typer.Option("--upwards", help="In every layer above each site too.")] = False,
    sites: Annotated[str | None, typer.Option(help="Which states, one at a time; ten layers if not given.")] = None,
    quality: Annotated[str | None, typer.Option(help="Texts for the perplexity: a shipped name, or a file.")] = None,
    pool: Annotated[str, typer.Option(help="Which states of a text make its direction: last, mean or cls.")] = "last",
    spare_first: Annotated[
        bool, typer.Option("--spare-first", help="Take the first tokens' mean state out of the direction.")
    ] = False,
    new_tokens: Annotated[int | None, typer.Option(help="How many tokens are written; 0 for none.")] = None,
) -> None:
    """Change what the model says along the difference of two sets of texts.

    Prints what moves and what it costs, and the texts before and after; --out steer.html keeps the pictures.
    """
    along = _two_sets(data, toward, away)
    others = None if quality is None else list(texts.read(quality).texts)
    result = hs.steer(
        shared.load(),
        lines_of(prompts),
        along=along,
        how="ablate" if ablate else "add",
        strengths=None if strengths is None else strengths.split(","),  # type: ignore[arg-type]
        sites=sites,
        upwards=upwards,
        answers=answer or None,
        quality=others,
        pool=pool,
        spare_first=spare_first,
        new_tokens=new_tokens,
    )
    if not handed_out(result, shared):
        typer.echo(visible(result.summary(), keep="\n"))
        _print_texts(result)


def _two_sets(data: str | None, toward: list[str], away: list[str]) -> tuple[list[str], list[str]]:
    """The two sets of texts: those given, or those of a dataset that have the labels given."""
    if data is None:
        return toward, away
    read = texts.read(data)
    labels = [str(label) for label in read.labels or ()]
    for label in (*toward, *away):
        if label not in labels:
            reason = f"there are {', '.join(sorted(set(labels))) or 'none'}"
            raise TextError(f"The label {label!r} in {data}", reason, "Give one of these.")
    return tuple(  # type: ignore[return-value]
        [text for text, label in zip(read.texts, labels, strict=True) if label in wanted] for wanted in (toward, away)
    )


def _print_texts(result: "hs.Result") -> None:
    """What was written after each prompt, at the site that the facts name best, with every strength."""
    if "written" not in result.data:
        return
    here = result.data["written"].sel(site=result.data.attrs["written_at"])
    typer.echo(f"\nWritten after each prompt, steered at {result.data.attrs['written_at']}:\n")
    rows = [
        [str(prompt), name, str(text)]
        for place, prompt in enumerate(result.data["prompt"].values)
        for name, text in [
            ("before", result.data["written_before"].values[place]),
            *((f"{strength:+g}", here.sel(strength=strength).values[place]) for strength in here["strength"].values),
        ]
    ]
    table(["prompt", "strength", "text"], rows, text=(0, 2))
