"""Map: what a lens makes of a state before the model's own tail reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenscope.sites import Site


@dataclass(frozen=True, eq=False)
class Map:
    """An affine map of states: `matrix` [width, width] times the state, plus `bias` [width] if there is one.

    >>> Map(2 * torch.eye(2), torch.tensor([1.0, 0.0])).carry(torch.tensor([[1.0, 1.0]]))
    tensor([[3., 2.]])
    """

    matrix: Tensor
    bias: Tensor | None = None

    def carry(self, rows: Tensor) -> Tensor:
        """The rows [token, width] as the last layer would have them, in their own dtype."""
        wide = rows.to(torch.promote_types(rows.dtype, self.matrix.dtype))
        made = wide @ self.matrix.to(wide).T
        return (made if self.bias is None else made + self.bias.to(wide)).to(rows.dtype)


def carried(values: Tensor, layers: Sequence[Site], maps: Mapping[int, Map]) -> Tensor:
    """States [site, token, width] of whole layers, each through the map of its layer; one that has none is left."""
    found = [
        (maps.get(-1 if site.layer is None else site.layer), rows) for site, rows in zip(layers, values, strict=True)
    ]
    return torch.stack([rows if one is None else one.carry(rows) for one, rows in found])
