"""A vector for every text; these are an array, and not a result."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hiddenscope.cli.asking import ask, asks
from hiddenscope.cli.command import Arguments
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, print_json
from hiddenscope.files import replacing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@asks("embed", writes=(".npy", ".safetensors", ".csv"))
def embed(shared: Shared, arguments: Arguments) -> None:
    """Compute the vectors, and write them or say how many there are."""
    vectors = cast("NDArray[np.float32]", ask("embed", shared, arguments))
    if shared.out:
        _save(vectors, shared.out)
        shared.report_written()
    if shared.json:
        print_json(vectors.tolist())
        return
    place = f" in {shared.out}" if shared.out else "; --out vectors.npy keeps them"
    echo(f"{len(vectors)} vectors, {vectors.shape[1]} wide{place}")


def _save(vectors: "NDArray[np.float32]", out: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    suffix = out.suffix.lower()
    with replacing(out) as fresh:
        if suffix == ".npy":
            np.save(fresh, vectors)
        elif suffix == ".safetensors":
            save_file({"vectors": vectors}, fresh)
        else:
            with fresh.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                for row in vectors.tolist():
                    # Nine digits give back every float32.
                    writer.writerow([f"{value:.9g}" for value in row])
