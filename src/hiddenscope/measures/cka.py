"""Linear CKA (Kornblith et al. 2019): how similar two sets of states of the same tokens
are, whatever their widths.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Sites: TypeAlias = Tensor | Sequence[Tensor]

FEWEST = 3  # two centred tokens span one direction, and any CKA of them is 1
WORTH_READING = 50
CHUNK = 1 << 21  # products of tokens that are held together: 16 MiB of float64


def linear_cka(x: Sites, y: Sites | None = None) -> tuple[Tensor, Tensor]:
    """The linear CKA of every pair of sites, and its mean over all random pairings of
    the tokens.

    `x` and `y` are `[site, token, width]`, or one `[token, width]` a site, over the
    same tokens, of any widths; without `y` it is every pair of sites of `x`. Both
    results are `[site of x, site of y]`, NaN where all states of a site are equal. The
    products of tokens are computed some rows at a time, in float64; the cost grows with
    their square.

    >>> x = torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(0))
    >>> linear_cka(x)[0].diagonal().tolist(), round(linear_cka(x, 3 * x.flip(2) + 1)[0][1, 1].item(), 6)
    ([1.0, 1.0], 1.0)
    """
    sides = [x] if y is None else [x, y]
    tokens, device = len(x[0]), x[0].device
    rows = max(1, CHUNK // max(1, tokens * sum(map(len, sides))))
    means = [_means(side) for side in sides]
    shared = torch.zeros(
        len(sides[0]), len(sides[-1]), dtype=torch.float64, device=device
    )
    own = [torch.zeros(len(side), dtype=torch.float64, device=device) for side in sides]
    traces = [torch.zeros_like(one) for one in own]
    for start in range(0, tokens, rows):
        products = [
            _products(side, mean, slice(start, start + rows))
            for side, mean in zip(sides, means, strict=True)
        ]
        shared += products[0].flatten(1) @ products[-1].flatten(1).T
        for place, product in enumerate(products):
            own[place] += torch.linalg.vector_norm(product, dim=(1, 2)).square()
            traces[place] += product[:, :, start:].diagonal(dim1=1, dim2=2).sum(1)
    if y is None:
        own = [shared.diagonal()]  # so that a site with itself gives 1, exactly
    scale = (own[0][:, None] * own[-1][None]).sqrt()
    chance = traces[0][:, None] * traces[-1][None] / (tokens - 1) / scale
    return _at_most_one(shared / scale), _at_most_one(chance)


def _means(side: Sites) -> list[Tensor]:
    """The mean of each site, computed relative to its first row: exactly that row,
    where all are equal.
    """
    wide = ((rows[0].to(torch.float64), rows.to(torch.float64)) for rows in side)
    return [origin + (rows - origin).mean(0) for origin, rows in wide]


def _products(side: Sites, means: list[Tensor], some: slice) -> Tensor:
    """Rows of the centred Gram matrix of every site: `[site, some tokens, token]`."""
    count = len(range(*some.indices(len(side[0]))))
    products = means[0].new_empty(len(side), count, len(side[0]))
    for place, (rows, mean) in enumerate(zip(side, means, strict=True)):
        centred = rows.to(torch.float64) - mean
        torch.mm(centred[some], centred.T, out=products[place])
    return products


def _at_most_one(values: Tensor) -> Tensor:
    """Rounding may take a ratio past 1 by a few units in the last place."""
    return values.clamp(0, 1)
