"""How labelled texts lie in every layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.arguments import dataset, shipped
from hiddenscope.cli.command import (
    MODEL_HELP,
    RESULTS,
    GroupColumn,
    LabelColumn,
    Shared,
    SitesOption,
    TextColumn,
    TruncateOption,
    command,
    show,
    writes,
    zoo_names,
)
from hiddenscope.cli.embed import (
    DefaultPoolOption,
    EachTokenOption,
    OldTokenOption,
    pooling,
)
from hiddenscope.cli.states import StatesOption, labels_of, read_states
from hiddenscope.errors import TextError


@command
@writes(*RESULTS, unused=("model",))
def project(
    shared: Shared,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "A shipped dataset such as cities-incomplete, a file, or several to"
                " compare."
            ),
            autocompletion=shipped,
        ),
    ] = None,
    method: Annotated[
        Literal["umap", "pca", "pacmap", "tsne"],
        typer.Option(help="How pictures are made."),
    ] = "umap",
    pool: DefaultPoolOption = None,
    each_token: EachTokenOption = False,
    token: OldTokenOption = None,
    sites: SitesOption = "layer.*,final",
    seed: Annotated[
        int, typer.Option(help="The seed of everything that is random.")
    ] = 0,
    neighbours: Annotated[
        int, typer.Option(help="How many neighbours of a point count.")
    ] = 15,
    text: TextColumn = None,
    label: LabelColumn = None,
    group: GroupColumn = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help=f"{MODEL_HELP} Repeated: side by side.",
            autocompletion=zoo_names,
        ),
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option(help="Another model beside the first; may be repeated."),
    ] = None,
    states: StatesOption = None,
    truncate: TruncateOption = False,
) -> None:
    """How do labelled texts lie in every layer, and are their classes apart?

    Prints the findings. --out panels.html keeps the pictures: by PCA at once, then by
    the method asked for. With --states, DATA has the labels of the texts that the
    states were made of.
    """
    first: Sequence[str | None] = models or [None]
    names = [*first, *(other or [])]
    source, labelled = _sources(shared, data or [], states, names, (text, label, group))

    def preview(result: "hs.Result") -> None:
        if shared.out:
            result.save(shared.out, **shared.look)
            progress.note(f"{shared.out} shows them by PCA; {method} follows.")

    result = hs.project(
        hs.each_token(source) if each_token else source,
        labelled,
        method=hs.Pictures(method, neighbours, preview),
        pool=pooling(pool),
        sites=sites,
        seed=seed,
        truncate=truncate,
    )
    show(result, shared)


def _sources(
    shared: Shared,
    data: list[str],
    states: Path | None,
    models: Sequence[str | None],
    columns: tuple[str | None, ...],
) -> tuple[Any, Any]:
    """What is projected: models and datasets, or states and their labels."""
    if states is not None:
        if len(data) > 1:
            reason = (
                f"there are {len(data)} files, and states have one label for each text"
            )
            raise TextError(
                "Cannot compare datasets in --states", reason, "Give one, or none."
            )
        source = read_states(states)
        return source, labels_of(source, data[0], *columns) if data else None
    if not data:
        raise TextError(
            "No dataset",
            "none was given",
            "Give a shipped name such as cities-incomplete, or a file.",
        )
    datasets = {name: dataset(name, *columns) for name in data}
    loaded = list(map(shared.load_other, models))
    alone = loaded[0] if len(loaded) == 1 else loaded
    return alone, datasets if len(data) > 1 else datasets[data[0]]
