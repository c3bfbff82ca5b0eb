"""A vector for every text."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, overload

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

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SiteOption = Annotated[
    str | None, typer.Option(help="Which state: layer.3, final; the last if not given.")
]
PoolOption = Annotated[
    str | None,
    typer.Option(
        help="What stands for a text: mean, max, last, first, cls or a position."
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "What stands for a text: last (of a decoder, if not given), mean (of an"
            " encoder), first, max, cls or a position; each: every token."
        )
    ),
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
        pool=position(pool),
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


@overload
def position(pool: str) -> str | int: ...


@overload
def position(pool: None) -> None: ...


def position(pool: str | None) -> str | int | None:
    """A number is a position."""
    return int(pool) if pool is not None and pool.lstrip("-").isdecimal() else pool


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
