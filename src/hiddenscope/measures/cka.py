"""Linear CKA (Kornblith et al. 2019): how similar two sets of states are.

The states are of the same tokens, and may have different widths.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Sites: TypeAlias = Tensor | Sequence[Tensor]

# Two centred tokens span one direction, so that any CKA of them is 1.
FEWEST = 3
WORTH_READING = 50
# Products of tokens that are held together: 16 MiB of float64.
CHUNK = 1 << 21


def linear_cka(x: Sites, y: Sites | None = None) -> tuple[Tensor, Tensor]:
    """Return the linear CKA of every pair of sites, and its mean over random pairings.

    `x` and `y` are `[site, token, width]`, or one `[token, width]` per site. Without
    `y`, every pair of sites of `x` is compared. Both results are `[site of x, site of
    y]`, NaN where all states of a site are equal. Products of tokens are computed some
    rows at a time, in float64; the cost grows with the square of their number.

    >>> x = torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(0))
    >>> linear_cka(x)[0].diagonal().tolist()
    [1.0, 1.0]
    >>> round(linear_cka(x, 3 * x.flip(2) + 1)[0][1, 1].item(), 6)
    1.0
    """
    sides = [x] if y is None else [x, y]
    means = [_means(side) for side in sides]
    tokens, device = len(x[0]), x[0].device
    rows = max(1, CHUNK // max(1, tokens * sum(map(len, sides))))
    # Of the centred Gram matrices: their inner products between sites, squared norms,
    # and traces.
    shared = torch.zeros(
        len(sides[0]), len(sides[-1]), dtype=torch.float64, device=device
    )
    norms = []
    traces = []
    for side in sides:
        norms.append(torch.zeros(len(side), dtype=torch.float64, device=device))
        traces.append(torch.zeros_like(norms[-1]))
    for start in range(0, tokens, rows):
        products = []
        for number, side in enumerate(sides):
            # Rows of the centred Gram matrix of every site, `[site, some, token]`.
            count = min(rows, tokens - start)
            product = shared.new_empty(len(side), count, tokens)
            for site, mean in enumerate(means[number]):
                centred = side[site].to(torch.float64) - mean
                some = centred[start : start + rows]
                torch.mm(some, centred.T, out=product[site])
            norms[number] += torch.linalg.vector_norm(product, dim=(1, 2)).square()
            traces[number] += product[:, :, start:].diagonal(dim1=1, dim2=2).sum(1)
            products.append(product)
        shared += products[0].flatten(1) @ products[-1].flatten(1).T
    if y is None:
        # The same numbers, so that a site compared with itself gives exactly 1.
        norms = [shared.diagonal()]
    scale = (norms[0][:, None] * norms[-1][None]).sqrt()
    # The mean over all pairings of the tokens in closed form.
    chance = traces[0][:, None] * traces[-1][None] / (tokens - 1) / scale
    # Rounding may take a ratio past 1 by a few units in the last place.
    return (shared / scale).clamp(0, 1), chance.clamp(0, 1)


def _means(side: Sites) -> list[Tensor]:
    """Return the mean state of each site."""
    means = []
    for rows in side:
        wide = rows.to(torch.float64)
        # Relative to the first row: equal rows have exactly that row as their mean.
        means.append(wide[0] + (wide - wide[0]).mean(0))
    return means
