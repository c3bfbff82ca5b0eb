"""A probe of a weighted sum of sites, whose weights are learnt with it."""

from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope.linear.logistic import minimise, undo_curvature
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
    mean, deviation = (torch.stack(part) for part in zip(*site_moments, strict=True))
    targets = problems.targets.T.contiguous()
    row_weights = (problems.train / counts[:, None]).T.contiguous()
    decay = problems.penalty.to(states) / counts
    # A point is the coefficients with the intercepts, then the inputs of the softmax.
    inner = (width + 1) * learner.outputs

    def score(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coef = points[:inner].view(width + 1, learner.outputs, -1)
        weights = points[inner:].softmax(0)
        scores = coef[-1].expand(rows, -1, -1).clone()
        for number, weight in enumerate(weights):
            plain = weight * coef[:-1] / deviation[number][:, None, which]
            products = (states[number] @ plain.view(width, -1)).view_as(scores)
            scores += products - (mean[number][:, None, which] * plain).sum(0)
        return coef, weights, scores

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        coef, weights, scores = score(points, which)
        value, slopes = learner.loss_and_gradient(
            scores, targets[:, which], row_weights[:, which]
        )
        sums = slopes.sum(0)
        gradient = decay[which] * coef[:-1]
        by_weight = []
        for number, weight in enumerate(weights):
            back = (slopes.view(rows, -1).T @ states[number]).T
            back = back.reshape(coef[:-1].shape)
            back = back - mean[number][:, None, which] * sums
            back = back / deviation[number][:, None, which]
            by_weight.append((back * coef[:-1]).sum((0, 1)))
            gradient += weight * back
        slope = torch.stack(by_weight)
        logits = points[inner:]
        # The derivative of a softmax.
        by_logit = weights * (slope - (weights * slope).sum(0))
        by_logit = by_logit + SOFTMAX_PENALTY * logits
        value = value + 0.5 * decay[which] * coef[:-1].square().sum((0, 1))
        value = value + 0.5 * SOFTMAX_PENALTY * logits.square().sum(0)
        flat = gradient.reshape(inner - learner.outputs, -1)
        return value, torch.cat([flat, sums, by_logit])

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
    minimum = minimise(evaluate, start, precondition, tolerance)
    _, weights, scores = score(minimum.point, torch.arange(len(problems)))
    return Mixed(weights, scores, minimum.converged)
