"""Few rows: what a linear fit of them can tell apart has no more directions than there are rows.

The coefficients that bear the least penalty lie in a space of as many dimensions, another one for each set of rows that
is learnt from, since each has its own scale. In that space the problem is the same, exactly, and small.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hiddenscope.linear.minimise import minimise
from hiddenscope.linear.problems import Fitted, Head, Problems, moments


def fit_few(states: Tensor, problems: Problems, head: Head, shape: tuple[int, float], tolerance: float) -> Fitted:
    """The fits of `logistic` for states with far fewer rows than channels, in float64."""
    outputs, typical = shape
    sets, which_set = problems.sets
    wide = states.double()
    every = Problems(sets, sets, torch.ones(len(sets)))
    mean, deviation = moments(wide, every)
    features, back = _small(wide, mean, deviation)
    size, counts = features.shape[2], problems.counts.double()
    weights = (problems.train / counts[:, None]).T.contiguous()
    targets, decay = problems.targets.T.contiguous(), problems.penalty.double() / counts

    def evaluate(places: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        place = places.view(size + 1, outputs, -1)
        coef, own = place[:-1].permute(2, 0, 1), features[which_set[which]]
        scores = (own @ coef).permute(1, 2, 0) + place[-1]
        value, slopes = head(scores, targets[:, which], weights[:, which])
        gradient = (own.mT @ slopes.permute(2, 0, 1)).permute(1, 2, 0) + decay[which] * place[:-1]
        value = value + 0.5 * decay[which] * place[:-1].square().sum((0, 1))
        return value, torch.cat([gradient, slopes.sum(0)[None]]).view(-1, len(which))

    undo = _curvature(features, problems, which_set, typical, outputs)
    start = torch.zeros((size + 1) * outputs, len(problems), dtype=torch.float64)
    found = minimise(evaluate, start, undo, tolerance)
    place = found.place.view(size + 1, outputs, -1)
    coef = (back[which_set] @ place[:-1].permute(2, 0, 1)).permute(1, 2, 0)
    center = (mean[:, None, which_set] * coef).sum(0)
    return Fitted(coef.to(states), (place[-1] - center).to(states), found.converged)


def _small(states: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Of each set, the features of all rows `[set, row, size]`, and what turns coefficients back."""
    _, strength, right = torch.linalg.svd(states, full_matrices=False)
    kept = strength > strength.max() * 1e-12
    basis = right[kept] if bool(kept.any()) else right[:1]
    rows = states @ basis.T
    features, back = [], []
    for center, scale in zip(mean.T, deviation.T, strict=True):
        over = basis / scale
        factor = torch.linalg.cholesky(over @ over.T)
        features.append((rows - center @ basis.T) @ factor)
        back.append(torch.linalg.solve_triangular(factor, over / scale, upper=False).T)
    return torch.stack(features), torch.stack(back)


def _curvature(
    features: Tensor, problems: Problems, which_set: Tensor, typical: float, outputs: int
) -> Callable[[Tensor, Tensor], Tensor]:
    sets, _ = problems.sets
    own = features * sets[:, :, None]
    inner = typical * (own.mT @ own) / sets.sum(1)[:, None, None]
    shifted = inner[which_set]
    shifted.diagonal(dim1=1, dim2=2).add_((problems.penalty / problems.counts)[:, None])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(shifted))

    def undo(gradients: Tensor, which: Tensor) -> Tensor:
        gradient = gradients.view(-1, outputs, len(which))
        done = (inverse[which] @ gradient[:-1].permute(2, 0, 1)).permute(1, 2, 0)
        return torch.cat([done, gradient[-1:] / typical]).view_as(gradients)

    return undo
