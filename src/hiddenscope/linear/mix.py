"""A probe of a weighted sum of sites, whose weights are learnt with it."""

from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope.linear.logistic import differentiated, minimise, undo_curvature
from hiddenscope.linear.problems import Learner, Problems, moments

# Penalty on the inputs of the softmax: this times half their squared norm is added to
# the mean loss. With the penalty of the coefficients, weights would never leave equal;
# with none they go to a single site, for noise too.
SOFTMAX_PENALTY = 1e-3


class Mixed(NamedTuple):
    """Weights of the sites `[site, problem]`, and scores `[row, output, problem]`."""

    weights: Tensor
    scores: Tensor
    converged: Tensor


def mix(
    states: Tensor, problems: Problems, learner: Learner, tolerance: float = 1e-4
) -> Mixed:
    """Fit problems to a weighted sum of standardised sites `[site, row, width]`.

    The weights are a softmax, so they add up to 1. Every site is standardised on the
    training rows of a problem. The joint loss has more than one minimum: this is the
    one that descent from equal weights leads to.
    """
    sites, rows, width = states.shape
    counts = problems.counts.to(states)
    site_moments = [moments(site, problems) for site in states]
    mean, deviation = map(torch.stack, zip(*site_moments, strict=True))
    targets = problems.targets.T.contiguous()
    row_weights = (problems.train / counts[:, None]).T.contiguous()
    decay = problems.penalty.to(states) / counts
    # A point is the coefficients with the intercepts, then the inputs of the softmax.
    inner = (width + 1) * learner.outputs

    def score(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coef = points[:inner].view(width + 1, learner.outputs, -1)
        weights = points[inner:].softmax(0)
        # The coefficients of each site, for states that are not standardised again.
        plain = weights[:, None, None] * coef[:-1] / deviation[:, :, None, which]
        level = coef[-1] - (mean[:, :, None, which] * plain).sum((0, 1))
        products = (states @ plain.flatten(2)).sum(0)
        return coef, weights, products.view(rows, learner.outputs, -1) + level

    def loss(points: Tensor, which: Tensor) -> Tensor:
        coef, _, scores = score(points, which)
        losses = learner.losses(scores, targets[:, which]) * row_weights[:, which]
        penalty = decay[which] * coef[:-1].square().sum((0, 1))
        penalty = penalty + SOFTMAX_PENALTY * points[inner:].square().sum(0)
        return losses.sum(0) + 0.5 * penalty

    undo = undo_curvature(
        states.mean(0),
        problems.penalty,
        float(counts.mean()),
        learner.curvature,
        learner.outputs,
    )

    def precondition(gradients: Tensor, which: Tensor) -> Tensor:
        by_logit = gradients[inner:] / (1 / sites + SOFTMAX_PENALTY)
        return torch.cat([undo(gradients[:inner], which), by_logit])

    start = torch.zeros(inner + sites, len(problems), dtype=states.dtype)
    minimum = minimise(differentiated(loss), start, precondition, tolerance)
    _, weights, scores = score(minimum.point, torch.arange(len(problems)))
    return Mixed(weights, scores, minimum.converged)
