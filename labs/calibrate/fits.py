"""Fits: the probes of many draws at once, on any device, as `hs.probe` fits them one
draw after another.

A draw is small, and its fits are tens of thousands of small products that wait for
Python. Here all draws of a condition share each product, in float64. Logistic
regressions are fitted by Newton's method in place of L-BFGS, so this is also a second
implementation of the fits; a test compares the two.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hiddenscope.linear.crossvalidation import (
    DEFAULT_PENALTY,
    PENALTIES,
    SMALLEST_SHARE,
)
from hiddenscope.linear.logistic import minimise
from hiddenscope.linear.mix import SOFTMAX_PENALTY

# Most steps, halvings of a step, the largest entry of a gradient at the end.
NEWTON, HALVINGS, CLOSE = (
    60,
    12,
    1e-7,
)
# Of the trace of a matrix of products between rows: so little is added that its factor
# exists.
JITTER = 1e-11
# Of the squared error and of the logistic loss, by whether numbers are predicted.
CURVATURE = {
    True: 1.0,
    False: 0.25,
}


class Draws(NamedTuple):
    """Draws with equally many folds.

    `states` `[draw, site, row, width]`, `targets` (0 and 1, or numbers) and `folds`
    `[draw, row]`; `fresh` `[draw, site, row, width]` are rows without targets.
    """

    states: Tensor
    targets: Tensor
    folds: Tensor
    fresh: Tensor
    regress: bool

    @property
    def fold_count(self) -> int:
        return int(self.folds.max()) + 1


class Fits(NamedTuple):
    """Scores `[draw, site, row]` from the fit that did not see the row, and from that
    of all rows; scores of fresh rows from the fits of all folds `[draw, site, fold,
    row]`; mean losses on inner folds `[draw, site, penalty, fold]`."""

    scores: Tensor
    whole: Tensor
    fresh: Tensor
    inner_loss: Tensor


def penalties_of(inner_loss: Tensor) -> Tensor:
    """The penalty of each fold, `[..., fold]`, from losses `[..., penalty, fold]`; of
    equal ones, the larger.
    """
    grid = torch.tensor(PENALTIES, dtype=torch.float64, device=inner_loss.device)
    best = len(grid) - 1 - inner_loss.flip(-2).argmin(-2)
    return torch.where(inner_loss.isnan().any(-2), DEFAULT_PENALTY, grid[best])


def fit_sites(draws: Draws) -> Fits:
    """Cross-validate every site, with a penalty chosen on inner folds."""
    folds, regress = draws.fold_count, draws.regress
    states, fresh = draws.states.flatten(0, 1), draws.fresh.flatten(0, 1)
    targets, fold_of = (
        by_site(part, draws) for part in (draws.targets.double(), draws.folds)
    )
    grid = torch.tensor(PENALTIES, dtype=torch.float64, device=states.device).expand(
        len(states), -1
    )
    totals = states.new_zeros(len(states), len(PENALTIES), folds)
    sizes = states.new_zeros(len(states), 1, folds)
    for pair in combinations(range(folds), 2) if folds > 2 else ():
        fitted = _fit(
            states, (fold_of != pair[0]) & (fold_of != pair[1]), targets, grid, regress
        )
        losses = _losses(fitted.scores(states), targets[:, None], regress)
        for tested, left_out in (pair, pair[::-1]):
            rows = (fold_of == tested).double()[:, None]
            totals[..., left_out] += (losses * rows).sum(2)
            sizes[..., left_out] += rows.sum(2)
    inner_loss = totals / sizes  # with two folds 0 / 0
    chosen = penalties_of(inner_loss)
    scores, of_fresh = torch.empty_like(targets), []
    for fold in range(folds):
        fitted = _fit(states, fold_of != fold, targets, chosen[:, fold, None], regress)
        scores = torch.where(fold_of == fold, fitted.scores(states)[:, 0], scores)
        of_fresh.append(fitted.scores(fresh)[:, 0])
    whole = penalties_of(inner_loss.mean(2, keepdim=True))
    of_all = _fit(
        states, torch.ones_like(fold_of, dtype=torch.bool), targets, whole, regress
    ).scores(states)[:, 0]
    found = (scores, of_all, torch.stack(of_fresh, 1), inner_loss)
    return Fits(*(part.unflatten(0, draws.states.shape[:2]) for part in found))


def by_site(parts: Tensor, draws: Draws) -> Tensor:
    """What belongs to draws, once for each of their sites."""
    return parts.repeat_interleave(draws.states.shape[1], 0)


class _Fitted(NamedTuple):
    """Coefficients `[draw, penalty, width]` of states less `mean` over `deviation`, and
    intercepts.
    """

    mean: Tensor
    deviation: Tensor
    coef: Tensor
    intercept: Tensor

    def scores(self, states: Tensor) -> Tensor:
        """`[draw, penalty, row]`."""
        plain = self.coef / self.deviation
        return plain @ states.mT + (
            self.intercept[..., None] - (plain * self.mean).sum(2, keepdim=True)
        )


def _scale(states: Tensor, train: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the deviation of the training rows, `[draw, 1, width]`."""
    weights = train.double() / train.sum(1, keepdim=True)
    mean = weights[:, None] @ states
    deviation = (weights[:, None] @ (states - mean).square()).sqrt()
    return mean, torch.where(deviation > 1e-6, deviation, 1.0)


def _fit(
    states: Tensor, train: Tensor, targets: Tensor, penalty: Tensor, regress: bool
) -> _Fitted:
    """Fit the targets of the training rows `[draw, row]` with penalties `[draw,
    penalty]`.
    """
    mean, deviation = _scale(states, train)
    scaled = (states - mean) / deviation
    features, factor = _in_row_space(scaled)
    solve = _ridge if regress else _newton
    coef, intercept = solve(features, train.double(), targets, penalty)
    if factor is not None:
        coef = torch.linalg.solve_triangular(factor.mT, coef.mT, upper=True).mT @ scaled
    return _Fitted(mean, deviation, coef, intercept)


def _in_row_space(states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows with the same products between them in no more dimensions than rows, and the
    factor that leads back.
    """
    rows, width = states.shape[-2:]
    if width <= rows:
        return states, None
    products = states @ states.mT
    products.diagonal(dim1=-2, dim2=-1).add_(
        JITTER * products.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    )
    factor = torch.linalg.cholesky(products)
    return factor, factor


def _ridge(
    features: Tensor, train: Tensor, targets: Tensor, penalty: Tensor
) -> tuple[Tensor, Tensor]:
    """In closed form; the features of training rows have mean 0."""
    level = (train * targets).sum(1, keepdim=True) / train.sum(1, keepdim=True)
    inner = (features * train[..., None]).mT @ features
    goal = features.mT @ (train * (targets - level))[..., None]
    shifted = inner[:, None] + penalty[..., None, None] * torch.eye(inner.shape[-1]).to(
        inner
    )
    coef = torch.cholesky_solve(
        goal[:, None].expand(-1, penalty.shape[1], -1, -1),
        torch.linalg.cholesky(shifted),
    )
    return coef[..., 0], level.expand(-1, penalty.shape[1])


def _newton(
    features: Tensor, train: Tensor, targets: Tensor, penalty: Tensor
) -> tuple[Tensor, Tensor]:
    """Logistic regressions by Newton's method, a step halved where it does not go down."""
    wide = torch.cat([features, torch.ones_like(features[..., :1])], 2)
    size = wide.shape[2]
    free = torch.ones(size, dtype=torch.float64, device=wide.device)
    free[-1] = 0  # the intercept has no penalty
    decay = penalty[..., None] * free
    goals, weights = targets[:, None], train[:, None]

    def value(point: Tensor) -> Tensor:
        losses = _losses(point @ wide.mT, goals, False) * weights
        return losses.sum(2) + 0.5 * (decay * point.square()).sum(2)

    point = torch.zeros(*penalty.shape, size, dtype=torch.float64, device=wide.device)
    least = value(point)
    for _ in range(NEWTON):
        likely = (point @ wide.mT).sigmoid()
        gradient = ((likely - goals) * weights) @ wide + decay * point
        if float(gradient.abs().max()) <= CLOSE:
            break
        curvature = likely * (1 - likely) * weights
        hessian = (wide[:, None] * curvature[..., None]).mT @ wide[:, None]
        hessian.diagonal(dim1=-2, dim2=-1).add_(decay + 1e-12)
        step = torch.cholesky_solve(
            gradient[..., None], torch.linalg.cholesky(hessian)
        )[..., 0]
        length = torch.ones_like(least)
        for _ in range(HALVINGS):
            reached = value(point - length[..., None] * step)
            if bool((reached <= least + 1e-9).all()):
                break
            length = torch.where(reached <= least + 1e-9, length, length / 2)
        point, least = point - length[..., None] * step, reached
    return point[..., :-1], point[..., -1]


def _losses(scores: Tensor, targets: Tensor, regress: bool) -> Tensor:
    return (
        0.5 * (scores - targets).square()
        if regress
        else softplus(scores) - targets * scores
    )


def fit_labellings(draws: Draws, labellings: Tensor) -> Tensor:
    """The held-out scores `[draw, site, row, labelling]` of labellings `[draw, site,
    labelling, row]`.

    They are fitted by one step of Newton's method, as in
    `hiddenscope.linear.crossvalidation`.
    """
    scaled = _standardised(draws.states.flatten(0, 1))
    scores = _under_labellings(
        scaled, labellings.flatten(0, 1), by_site(draws.folds, draws), draws.regress
    )
    return scores.unflatten(0, draws.states.shape[:2])


def fit_mean(draws: Draws, labellings: Tensor) -> Tensor:
    """The same of the mean of all sites, `[draw, row, labelling]`, for labellings
    `[draw, labelling, row]`.
    """
    return _under_labellings(_mean(draws), labellings, draws.folds, draws.regress)


def _mean(draws: Draws) -> Tensor:
    """The mean of standardised sites."""
    return (
        _standardised(draws.states.flatten(0, 1))
        .unflatten(0, draws.states.shape[:2])
        .mean(1)
    )


def _standardised(states: Tensor) -> Tensor:
    mean, deviation = _scale(
        states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    )
    return (states - mean) / deviation


def _under_labellings(
    states: Tensor, labellings: Tensor, fold_of: Tensor, regress: bool
) -> Tensor:
    folds, goals = int(fold_of.max()) + 1, labellings.double().mT
    features, _ = _in_row_space(states)
    losses = goals.new_zeros(len(goals), folds, len(PENALTIES), goals.shape[2])
    for pair in combinations(range(folds), 2) if folds > 2 else ():
        train = (fold_of != pair[0]) & (fold_of != pair[1])
        for number, scores in enumerate(_by_penalty(features, train, goals, regress)):
            by_row = _losses(scores, goals, regress)
            for tested, left_out in (pair, pair[::-1]):
                losses[:, left_out, number] += (
                    by_row * (fold_of == tested)[..., None]
                ).sum(1)
    chosen = len(PENALTIES) - 1 - losses.flip(2).argmin(2)
    if folds == 2:
        chosen = torch.full_like(chosen, PENALTIES.index(DEFAULT_PENALTY))
    held_out = torch.empty_like(goals)
    for fold in range(folds):
        for number, scores in enumerate(
            _by_penalty(features, fold_of != fold, goals, regress)
        ):
            here = (fold_of == fold)[..., None] & (chosen[:, fold] == number)[:, None]
            held_out = torch.where(here, scores, held_out)
    return held_out


def intercepts(folds: Tensor, labellings: Tensor) -> Tensor:
    """The intercepts in scores of classes, `[draw, row, labelling]`: the share of class
    1 outside the row's fold.
    """
    goals = labellings.double().mT
    found = torch.empty_like(goals)
    for fold in range(int(folds.max()) + 1):
        train = (folds != fold).double()[..., None]
        share = (train * goals).sum(1, keepdim=True) / train.sum(1, keepdim=True)
        found = torch.where(
            (folds == fold)[..., None],
            share.clamp(SMALLEST_SHARE, 1 - SMALLEST_SHARE).logit(),
            found,
        )
    return found


def _by_penalty(
    features: Tensor, train: Tensor, goals: Tensor, regress: bool
) -> Iterator[Tensor]:
    """The scores `[draw, row, labelling]` of all rows under each penalty."""
    weights = train.double()[..., None]
    count = weights.sum(1, keepdim=True)
    centred = features - (weights * features).sum(1, keepdim=True) / count
    level = (weights * goals).sum(1, keepdim=True) / count
    inner = CURVATURE[regress] * ((centred * weights).mT @ centred)
    goal = (centred * weights).mT @ (goals - level)
    start = (
        level if regress else level.clamp(SMALLEST_SHARE, 1 - SMALLEST_SHARE).logit()
    )
    for penalty in PENALTIES:
        shifted = inner.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(penalty)
        yield (
            centred @ torch.cholesky_solve(goal, torch.linalg.cholesky(shifted)) + start
        )


def fit_mix(draws: Draws, inner_loss: Tensor) -> tuple[Tensor, Tensor]:
    """The mix of all sites: held-out scores `[draw, row]`, and those of fresh rows
    `[draw, fold, row]`.
    """
    folds, sites = draws.fold_count, draws.states.shape[1]
    grid = torch.tensor(PENALTIES, dtype=torch.float64, device=inner_loss.device)
    best = grid[inner_loss.amin(1).argmin(1)]
    # [draw, fold].
    penalty = torch.where(inner_loss.isnan().any(1).any(1), DEFAULT_PENALTY, best)
    train = torch.stack([draws.folds != fold for fold in range(folds)], 1).flatten(0, 1)
    scaled, fresh = [], []
    for site in range(sites):
        own, new = (
            part[:, site].repeat_interleave(folds, 0)
            for part in (draws.states, draws.fresh)
        )
        mean, deviation = _scale(own, train)
        scaled.append((own - mean) / deviation)
        fresh.append((new - mean) / deviation)
    targets, every = (
        draws.targets.double().repeat_interleave(folds, 0),
        torch.stack(scaled, 1),
    )
    found = _descend(
        every, train.double(), targets, penalty.flatten(), _mean(draws), draws.regress
    )
    scores = _mixed_scores(every, *found).unflatten(0, (-1, folds))
    of_fresh = _mixed_scores(torch.stack(fresh, 1), *found).unflatten(0, (-1, folds))
    return scores.gather(1, draws.folds[:, None])[:, 0], of_fresh


def _mixed_scores(
    states: Tensor, coef: Tensor, intercept: Tensor, weights: Tensor
) -> Tensor:
    by_site = (states @ coef[:, None, :, None])[..., 0]
    return (weights[..., None] * by_site).sum(1) + intercept[:, None]


def _descend(
    states: Tensor,
    train: Tensor,
    targets: Tensor,
    penalty: Tensor,
    together: Tensor,
    regress: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """From states `[problem, site, row, width]`: coefficients, intercepts and weights
    of every problem.
    """
    problems, sites, _, width = states.shape
    counts = train.sum(1)
    decay, share, curvature = (
        penalty / counts,
        train / counts[:, None],
        CURVATURE[regress],
    )

    def evaluate(points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        here = slice(None) if len(which) == problems else which
        own, coef, intercept = states[here], points[:width].T, points[width]
        weights, goals = points[width + 1 :].T.softmax(1), targets[here]
        by_site = (own @ coef[:, None, :, None])[..., 0]
        scores = (weights[..., None] * by_site).sum(1) + intercept[:, None]
        slopes = ((scores if regress else scores.sigmoid()) - goals) * share[here]
        back = (slopes[:, None, None] @ own)[:, :, 0]
        slope = (slopes[:, None] * by_site).sum(2)
        gradient = (weights[..., None] * back).sum(1) + decay[here][:, None] * coef
        inputs = points[width + 1 :].T
        by_input = (
            weights * (slope - (weights * slope).sum(1, keepdim=True))
            + SOFTMAX_PENALTY * inputs
        )
        value = (_losses(scores, goals, regress) * share[here]).sum(1)
        value = (
            value
            + 0.5 * decay[here] * coef.square().sum(1)
            + 0.5 * SOFTMAX_PENALTY * inputs.square().sum(1)
        )
        return value, torch.cat([gradient.T, slopes.sum(1)[None], by_input.T])

    undo = _inverse_curvature(together, decay, curvature)

    def precondition(gradients: Tensor, which: Tensor) -> Tensor:
        here = undo if len(which) == problems else undo[which]
        step = (here @ gradients[:width].T[..., None])[..., 0].T
        return torch.cat(
            [
                step,
                gradients[width : width + 1] / curvature,
                gradients[width + 1 :] / (1 / sites + SOFTMAX_PENALTY),
            ]
        )

    start = torch.zeros(
        width + 1 + sites, problems, dtype=torch.float64, device=states.device
    )
    point = minimise(evaluate, start, precondition).point
    return point[:width].T, point[width], point[width + 1 :].T.softmax(1)


def _inverse_curvature(together: Tensor, decay: Tensor, curvature: float) -> Tensor:
    """The inverse of an approximate Hessian of every problem: as if it trained on all
    rows of the mean of the sites.
    """
    rows, width = together.shape[1:]
    inner = (curvature / rows * (together.mT @ together)).repeat_interleave(
        len(decay) // len(together), 0
    )
    inner.diagonal(dim1=-2, dim2=-1).add_(decay[:, None].expand(-1, width))
    inverse: Tensor = torch.cholesky_inverse(torch.linalg.cholesky(inner))
    return inverse
