"""What a linear probe reads from every layer."""

from typing import Annotated, Any, Literal

import typer

import hiddenscope as hs
from hiddenscope.cli.arguments import dataset, shipped
from hiddenscope.cli.command import (
    GroupColumn,
    Shared,
    SitesOption,
    TextColumn,
    TruncateOption,
    command,
    show,
)
from hiddenscope.cli.embed import TokenOption, position
from hiddenscope.cli.states import StatesOption, labels_of, read_states
from hiddenscope.errors import TextError

DATA = (
    "A shipped dataset, a file, - for stdin; or position, word-start, previous-token"
    " with --token each."
)
READY = ("position", "word-start", "previous-token")


@command
def probe(
    shared: Shared,
    data: Annotated[
        str, typer.Argument(help=DATA, autocompletion=shipped)
    ] = "cities-incomplete",
    task: Annotated[
        Literal["classify", "regress"], typer.Option(help="Classes, or numbers.")
    ] = "classify",
    token: TokenOption = None,
    text: TextColumn = None,
    label: Annotated[
        str | None,
        typer.Option(help="The column of the labels, or a ready label of tokens."),
    ] = None,
    group: GroupColumn = None,
    sites: SitesOption = "layer.*,final",
    seed: Annotated[
        int, typer.Option(help="The seed of the folds and of the control labels.")
    ] = 0,
    states: StatesOption = None,
    truncate: TruncateOption = False,
) -> None:
    """What can a linear probe read from the states of each layer?

    Prints the findings. --out probe.html keeps the pictures, probe.nc the probes. With
    --states, DATA has the labels of the texts that the states were made of.
    """
    if group is not None and (data in READY or (states is not None and label in READY)):
        reason = "groups are a column of a file, and this label needs none"
        raise TextError(
            f"Cannot use --group {group}",
            reason,
            "Give a file with --label, or leave --group out.",
        )
    if states is not None:
        source = read_states(states)
        ready = next((word for word in (label, data) if word in READY), None)
        labels = ready or labels_of(source, data, text, label, group)
        show(
            hs.probe(
                source, labels, task=task, sites=sites, token=position(token), seed=seed
            ),
            shared,
        )
        return
    given: Any = data
    if label in READY:
        given = (dataset(data, text, group=group), label)
    elif data not in READY:
        given = dataset(data, text, label, group)
    show(
        hs.probe(
            shared.load(),
            given,
            task=task,
            sites=sites,
            token=position(token),
            seed=seed,
            truncate=truncate,
        ),
        shared,
    )
