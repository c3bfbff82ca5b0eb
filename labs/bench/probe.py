"""Fit linear probes of every layer, against a loop of scikit-learn's.

The states are drawn: channels that go together, with the long tail of small directions
that states have, and a class that some of them tell, the more so the deeper the layer.
"""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.linear import Problems, logistic, ridge, standardised
from labs.bench import measure
from labs.bench.measure import Cost, Row

LAYERS, ROWS, WIDTH, FOLDS = 31, 2_000, 576, 5
PENALTY = 1.0  # scikit-learn's own: C = 1, alpha = 1
LOGISTIC_BAR, RIDGE_BAR = 3.0, 3.5
WHAT = f"{LAYERS} layers x {ROWS:,} rows x {WIDTH}, {FOLDS} folds, standardised in each"
Labels = NDArray[np.int64]
Targets = NDArray[np.generic]


def folds(rows: int) -> Labels:
    """Return the fold of every row."""
    numbers: Labels = np.arange(rows) % FOLDS
    return numbers


def states(
    layers: int = LAYERS, rows: int = ROWS, width: int = WIDTH
) -> tuple[torch.Tensor, Labels, NDArray[np.float32]]:
    """Draw states `[layer, row, width]`, classes, and numbers."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    spread = torch.arange(1, width + 1) ** -0.7
    hidden = torch.randn(rows, generator=generator)
    drawn = []
    for layer in range(layers):
        own = torch.randn(rows, width, generator=generator)
        own[:, :40] += 0.4 * layer / layers * hidden[:, None]
        drawn.append((own * spread) @ turn.T + torch.randn(width, generator=generator))
    classes = (hidden + 0.3 * torch.randn(rows, generator=generator) > 0).long()
    return torch.stack(drawn), classes.numpy(), hidden.numpy()


def rows(repeats: int) -> list[Row]:
    """Compare logistic and ridge probes with scikit-learn's; accuracies are checked."""
    few = max(1, repeats // 3)
    values, classes, numbers = states()
    fit = _ratio(values, classes, "logistic", "float32", few)
    solve = _ratio(values, numbers, "ridge", "float64", few)
    logistic_text = "C = 1, tol 1e-4, float32: LogisticRegression, its defaults"
    ridge_text = "alpha = 1, float64: Ridge"
    return [
        _row(f"{WHAT}, {logistic_text} / ours", fit, LOGISTIC_BAR),
        _row(f"{WHAT}, {ridge_text} / ours", solve, RIDGE_BAR),
    ]


def _row(what: str, cost: Cost, bar: float) -> Row:
    return Row("probe", what, cost.cpu, cost.wall, bar, at_least=True)


def _ratio(
    values: torch.Tensor, targets: Targets, kind: str, dtype: str, repeats: int
) -> Cost:
    """Return what scikit-learn costs for one of ours, once both scores agree."""
    parts = folds(len(targets))
    ways = {
        "ours": lambda: ours(values, targets, parts, kind),
        "theirs": lambda: theirs(values, targets, parts, kind, dtype),
    }
    left, right = ways["ours"](), ways["theirs"]()
    assert abs(left - right) < 0.01, f"{kind}: {left} is not {right}"
    costs = measure.interleaved(ways, repeats, warm=False)
    return measure.ratios(costs, "ours")["theirs"]


def ours(values: torch.Tensor, targets: Targets, parts: Labels, kind: str) -> float:
    """Return the mean score over layers and folds: the accuracy, or R²."""
    train = torch.from_numpy(parts[None] != np.arange(FOLDS)[:, None])
    penalty = torch.full((FOLDS,), PENALTY, dtype=torch.float64)
    problems = Problems(train, torch.from_numpy(targets).expand(FOLDS, -1), penalty)
    learner = logistic(2) if kind == "logistic" else ridge()
    scores = []
    for layer in values:
        scaled, *_ = standardised(layer)
        predicted = learner.fit(scaled, problems).scores(scaled)[:, 0].numpy()
        for fold in range(FOLDS):
            held_out = parts == fold
            score = _score(predicted[held_out, fold], targets[held_out], kind)
            scores.append(score)
    return float(np.mean(scores))


def theirs(
    values: torch.Tensor, targets: Targets, parts: Labels, kind: str, dtype: str
) -> float:
    """Return the same by scikit-learn, one fit after another."""
    from sklearn.preprocessing import StandardScaler

    scores = []
    for layer in values:
        states = layer.numpy().astype(dtype)
        for fold in range(FOLDS):
            held_out = parts == fold
            scaler = StandardScaler().fit(states[~held_out])
            model = _learner(kind)
            with warnings.catch_warnings():
                # A hundred steps, its default, do not always suffice.
                warnings.simplefilter("ignore")
                model.fit(scaler.transform(states[~held_out]), targets[~held_out])
            scaled = scaler.transform(states[held_out])
            if kind == "logistic":
                predicted = model.decision_function(scaled)
            else:
                predicted = model.predict(scaled)
            scores.append(_score(predicted, targets[held_out], kind))
    return float(np.mean(scores))


def _learner(kind: str) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge

    if kind == "logistic":
        return LogisticRegression(C=1 / PENALTY)
    return Ridge(PENALTY)


def _score(made: NDArray[np.floating], wanted: NDArray[np.generic], kind: str) -> float:
    if kind == "logistic":
        return float(((made > 0) == wanted).mean())
    true = wanted.astype(np.float64)
    return float(1 - ((made - true) ** 2).sum() / ((true - true.mean()) ** 2).sum())
