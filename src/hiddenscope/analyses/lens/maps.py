"""Maps: one affine map for each layer, which brings its states nearer to the last, and
the files that hold them: safetensors, with a JSON header.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hiddenscope.analyses.lens.reading import LensSites
from hiddenscope.errors import FileError
from hiddenscope.files import read_tensors, write_tensors
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site
from hiddenscope.states import States
from hiddenscope.states.mixed import one_tensor

PathLike: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Map:
    """An affine map of states: `matrix` [width, width], and `bias` [width] if any.

    >>> double = Map(2 * torch.eye(2), torch.tensor([1.0, 0.0]))
    >>> double.apply(torch.tensor([[1.0, 1.0]]))
    tensor([[3., 2.]])
    """

    matrix: Tensor
    bias: Tensor | None = None

    def apply(self, rows: Tensor) -> Tensor:
        """Map rows [token, width]; they keep their dtype."""
        wide = rows.to(torch.promote_types(rows.dtype, self.matrix.dtype))
        result = wide @ self.matrix.to(wide).T
        if self.bias is not None:
            result = result + self.bias.to(wide)
        return result.to(rows.dtype)


def mapped(states: Tensor, layers: Sequence[Site], maps: Mapping[int, Map]) -> Tensor:
    """Map states [layer, token, width]; a layer without a map stays as it is."""
    results = []
    for site, rows in zip(layers, states, strict=True):
        layer_map = maps.get(site.layer or 0)
        if layer_map is not None:
            rows = layer_map.apply(rows)
        results.append(rows)
    return torch.stack(results)


def layer_states(model: Model, inputs: Inputs, sites: LensSites) -> Tensor:
    """Capture all layers [layer, token, width], on the device that computes them."""
    states = model.capture(inputs, list(sites.layers), keep="device")
    assert isinstance(states, States), "the sites are in one stack"
    return one_tensor(states.values)


def write_lens_file(
    path: PathLike,
    file_format: str,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, object],
) -> None:
    """Write tensors and their header; the suffix must be .safetensors."""
    if Path(path).suffix.lower() != ".safetensors":
        raise FileError(
            f"Cannot save a lens as {os.fspath(path)!r}",
            "a lens is a .safetensors file",
            "Give the path that suffix.",
        )
    write_tensors(path, tensors, {"format": file_format, "lens": json.dumps(header)})


def read_lens_file(
    path: PathLike, file_format: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_lens_file` wrote."""
    tensors, header = read_tensors(path, "a lens", file_format)
    try:
        return tensors, dict(json.loads(header["lens"]))
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: PathLike, error: Exception) -> FileError:
    """Return the error for a file that holds no lens."""
    return FileError(
        f"Cannot read a lens from {os.fspath(path)!r}",
        f"it is damaged or of another kind ({error})",
        "Fit the lens again.",
    )
