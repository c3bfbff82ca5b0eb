"""Mix: one probe of all sites at once, whose share in it is learnt with it, as softmax weights that add up to 1."""

from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope.linear.logistic import curvature
from hiddenscope.linear.minimise import minimise
from hiddenscope.linear.problems import Learner, Problems, moments

SLIGHT = 1e-3  # of the mean loss, for one of half the squared length


class Mixed(NamedTuple):
    """The weights of the sites `[site, problem]`, and what each problem scores, `[row, output, problem]`."""

    weights: Tensor
    scores: Tensor
    converged: Tensor


def mix(states: Tensor, problems: Problems, learner: Learner, tolerance: float = 1e-4) -> Mixed:
    """Fit problems to a weighted sum of standardised sites `[site, row, width]`, weights and coefficients together.

    Every site is standardised on the rows that a problem learns from. What goes into the softmax bears a slight penalty
    of its own, so that weights stay equal where the rows speak for no other. In both together the loss has more than
    one minimum: this is the one below equal weights.
    """
    sites, rows, width = states.shape
    counts = problems.counts.to(states)
    scales = [moments(site, problems) for site in states]
    mean, deviation = (torch.stack(part) for part in zip(*scales, strict=True))
    targets, weights = problems.targets.T.contiguous(), (problems.train / counts[:, None]).T.contiguous()
    decay = problems.penalty.to(states) / counts
    inner = (width + 1) * learner.outputs

    def scored(places: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coef = places[:inner].view(width + 1, learner.outputs, -1)
        shares = places[inner:].softmax(0)
        scores = coef[-1].expand(rows, -1, -1).clone()
        for site, share, center, scale in zip(states, shares, mean, deviation, strict=True):
            plain = share * coef[:-1] / scale[:, None, which]
            scores += (site @ plain.view(width, -1)).view_as(scores) - (center[:, None, which] * plain).sum(0)
        return coef, shares, scores

    def evaluate(places: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        coef, shares, scores = scored(places, which)
        value, slopes = learner.head(scores, targets[:, which], weights[:, which])
        sums = slopes.sum(0)
        gradient = decay[which] * coef[:-1]
        pulls = []
        for site, share, center, scale in zip(states, shares, mean, deviation, strict=True):
            back = (slopes.view(rows, -1).T @ site).T.reshape(coef[:-1].shape)
            back = (back - center[:, None, which] * sums) / scale[:, None, which]
            pulls.append((back * coef[:-1]).sum((0, 1)))
            gradient += share * back
        pull = torch.stack(pulls)
        turned = shares * (pull - (shares * pull).sum(0)) + SLIGHT * places[inner:]
        value = value + 0.5 * decay[which] * coef[:-1].square().sum((0, 1))
        value = value + 0.5 * SLIGHT * places[inner:].square().sum(0)
        return value, torch.cat([gradient.reshape(inner - learner.outputs, -1), sums, turned])

    undo = curvature(states.mean(0), problems.penalty, float(counts.mean()), learner.typical, learner.outputs)

    def precondition(gradients: Tensor, which: Tensor) -> Tensor:
        return torch.cat([undo(gradients[:inner], which), gradients[inner:] / (1 / sites + SLIGHT)])

    start = torch.zeros(inner + sites, len(problems), dtype=states.dtype)
    found = minimise(evaluate, start, precondition, tolerance)
    _, shares, scores = scored(found.place, torch.arange(len(problems)))
    return Mixed(shares, scores, found.converged)
