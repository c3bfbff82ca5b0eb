"""Where a model's states live."""

import typer

import hiddenscope as hs
from hiddenscope.cli.command import Shared, command, handed_out
from hiddenscope.cli.terminal import table, visible


@command
def anatomy(shared: Shared) -> None:
    """Say where a model's states live, and prove it.

    The table gives, for every layer, the largest difference from Hugging Face's own `hidden_states`.
    """
    result = hs.anatomy(shared.load())
    if handed_out(result, shared):
        return
    typer.echo(visible(result.summary(), keep="\n"))
    columns = [name for name, column in result.data.data_vars.items() if column.dims == ("site",)]
    rows = zip(result.data["site"].values, *(result.data[name].values.tolist() for name in columns), strict=True)
    text = [0, *(place for place, name in enumerate(columns, 1) if result.data[name].dtype.kind not in "iuf")]
    table(["site", *map(str, columns)], ([_shown(cell) for cell in row] for row in rows), text=text)


def _shown(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
