"""A vector for every text."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hiddenscope as hs
from hiddenscope.cli.command import (
    Shared,
    TextsArgument,
    TruncateOption,
    command,
    writes,
)
from hiddenscope.cli.terminal import echo, print_json
from hiddenscope.files import replacing
from hiddenscope.states.pooling import CHOICES, Pooling, parse_pooling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SiteOption = Annotated[
    str | None, typer.Option(help="Which state: layer.3, final; the last if not given.")
]
PoolOption = Annotated[
    str | None,
    typer.Option(help=f"What stands for a text: {CHOICES}."),
]
DefaultPoolOption = Annotated[
    str | None,
    typer.Option(
        help=(
            f"What stands for a text: {CHOICES}; if not given, last of a decoder and"
            " mean of an encoder."
        )
    ),
]
EachTokenOption = Annotated[
    bool,
    typer.Option("--each-token", help="One row for each token, not for each text."),
]


def _renamed(value: str | None) -> None:
    if value is not None:
        new = "--each-token" if value == "each" else f"--pool {value}"
        raise typer.BadParameter(f"it is now {new}.")


OldTokenOption = Annotated[
    str | None,
    typer.Option("--token", hidden=True, callback=_renamed, help="Now --pool."),
]


@command
@writes(".npy", ".safetensors", ".csv")
def embed(
    shared: Shared,
    texts: TextsArgument = None,
    site: SiteOption = None,
    pool: PoolOption = None,
    adjust: Annotated[
        str | None, typer.Option(help="centre or whiten the vectors.")
    ] = None,
    normalize: Annotated[
        bool, typer.Option(help="Scale every vector to norm 1.")
    ] = True,
    truncate: TruncateOption = False,
) -> None:
    """Which vector stands for a text?

    --out vectors.npy, .safetensors or .csv keeps them, one row for each text in the order given.
    """
    vectors = hs.embed(
        shared.load(),
        texts,
        pool=pooling(pool),
        site=site,
        normalize=normalize,
        adjust=adjust,  # type: ignore[arg-type]
        truncate=truncate,
    )
    if shared.out:
        _save(vectors, shared.out)
        shared.say_written()
    if shared.json:
        print_json(vectors.tolist())
    else:
        kept = f" in {shared.out}" if shared.out else "; --out vectors.npy keeps them"
        echo(f"{len(vectors)} vectors, {vectors.shape[1]} wide{kept}")


def pooling(pool: str | None) -> Pooling | None:
    """Return a pooling by its name, or a position; None where none was given."""
    return None if pool is None else parse_pooling(pool)


def _save(vectors: "NDArray[np.float32]", out: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    with replacing(out) as fresh:
        if out.suffix.lower() == ".npy":
            np.save(fresh, vectors)
        elif out.suffix.lower() == ".safetensors":
            save_file({"vectors": vectors}, fresh)
        else:
            with fresh.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(
                    [f"{value:.9g}" for value in row] for row in vectors.tolist()
                )
