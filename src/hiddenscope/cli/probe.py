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
from hiddenscope.cli.embed import (
    DefaultPoolOption,
    EachTokenOption,
    OldTokenOption,
    pooling,
)
from hiddenscope.cli.states import StatesOption, labels_of, read_states
from hiddenscope.errors import TextError

DATA = (
    "A shipped dataset, a file, - for stdin; or position, word-start, previous-token"
    " with --each-token."
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
    pool: DefaultPoolOption = None,
    each_token: EachTokenOption = False,
    token: OldTokenOption = None,
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
        result = hs.probe(
            hs.each_token(source) if each_token else source,
            labels,
            task=task,
            sites=sites,
            pool=pooling(pool),
            seed=seed,
        )
        show(result, shared)
        return
    given: Any = data
    if label in READY:
        given = (dataset(data, text, group=group), label)
    elif data not in READY:
        given = dataset(data, text, label, group)
    model = shared.load()
    show(
        hs.probe(
            hs.each_token(model) if each_token else model,
            given,
            task=task,
            sites=sites,
            pool=pooling(pool),
            seed=seed,
            truncate=truncate,
        ),
        shared,
    )
