"""How labelled texts lie in every layer."""

from typing import Annotated, Literal

import typer

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.arguments import dataset, shipped
from hiddenscope.cli.command import Shared, SitesOption, TruncateOption, command, show


@command
def project(
    shared: Shared,
    data: Annotated[
        list[str],
        typer.Argument(
            help="A shipped dataset such as cities-incomplete, a file, or several to compare.", autocompletion=shipped
        ),
    ],
    method: Annotated[Literal["umap", "pca", "pacmap", "tsne"], typer.Option(help="How pictures are made.")] = "umap",
    token: Annotated[str, typer.Option(help="What stands for a text: last, first, mean, max, cls, each.")] = "last",
    sites: SitesOption = "layer.*,final",
    seed: Annotated[int, typer.Option(help="The seed of everything that is random.")] = 0,
    neighbours: Annotated[int, typer.Option(help="How many neighbours of a point count.")] = 15,
    text: Annotated[str | None, typer.Option(help="The column of the texts.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the labels.")] = None,
    other: Annotated[list[str] | None, typer.Option(help="Another model beside the first; may be repeated.")] = None,
    truncate: TruncateOption = False,
) -> None:
    """How do labelled texts lie in every layer, and are their classes apart?

    Prints the findings. --out panels.html keeps the pictures: by PCA at once, then by the method asked for.
    """
    datasets = {name: dataset(name, text, label) for name in data}
    models = [shared.load(), *map(shared.load_other, other or ())]

    def preview(result: "hs.Result") -> None:
        if shared.out:
            result.save(shared.out, **shared.look)
            progress.note(f"{shared.out} shows them by PCA; {method} follows.")

    result = hs.project(
        models[0] if len(models) == 1 else models,
        datasets if len(data) > 1 else datasets[data[0]],
        method=hs.Pictures(method, neighbours, preview),
        token=token,
        sites=sites,
        seed=seed,
        truncate=truncate,
    )
    show(result, shared)
