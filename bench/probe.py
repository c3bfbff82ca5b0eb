"""Linear probes of every layer, against a loop of scikit-learn's over layers and folds.

The states are drawn: channels that go together, with the long tail of small directions
that states have, and a class that some of them tell, the more so the deeper the layer.
"""

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

from bench import measure
from bench.measure import Row
from hiddenscope.linear import Problems, logistic, ridge, standardised

LAYERS, ROWS, WIDTH, FOLDS = 31, 2_000, 576, 5
PENALTY = 1.0  # scikit-learn's own: C = 1, alpha = 1
LOGISTIC_BAR, RIDGE_BAR = 3.0, 3.5
WHAT = f"{LAYERS} layers x {ROWS:,} rows x {WIDTH}, {FOLDS} folds, standardised in each"
Labels = NDArray[np.int64]


def states() -> tuple[torch.Tensor, Labels, NDArray[np.float32]]:
    """States `[layer, row, width]`, classes, and numbers."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    spread = torch.arange(1, WIDTH + 1) ** -0.7
    hidden = torch.randn(ROWS, generator=generator)
    layers = []
    for layer in range(LAYERS):
        own = torch.randn(ROWS, WIDTH, generator=generator)
        own[:, :40] += 0.4 * layer / LAYERS * hidden[:, None]
        layers.append((own * spread) @ turn.T + torch.randn(WIDTH, generator=generator))
    classes = (hidden + 0.3 * torch.randn(ROWS, generator=generator) > 0).long()
    return torch.stack(layers), classes.numpy(), hidden.numpy()


def rows(repeats: int) -> list[Row]:
    """Logistic and ridge probes: how many times the CPU time of ours a loop of theirs
    takes; accuracies are checked.
    """
    values, classes, numbers = states()
    folds = np.arange(ROWS) % FOLDS
    few = max(1, repeats // 3)
    found = {}
    for kind, (targets, dtype) in {
        "logistic": (classes, "float32"),
        "ridge": (numbers, "float64"),
    }.items():
        own = ours(values, targets, folds, kind)
        their = theirs(values, targets, folds, kind, dtype)
        assert abs(own - their) < 0.01, f"{kind}: {own} is not {their}"
        ways = {
            "ours": lambda kind=kind, targets=targets: ours(
                values, targets, folds, kind
            ),
            "theirs": lambda kind=kind, targets=targets, dtype=dtype: theirs(
                values, targets, folds, kind, dtype
            ),
        }
        found[kind] = measure.ratios(
            measure.interleaved(ways, few, warm=False), "ours"
        )["theirs"]
    fit, solve = found["logistic"], found["ridge"]
    said = "C = 1, tol 1e-4, float32: LogisticRegression, its defaults"
    return [
        Row(
            "probe",
            f"{WHAT}, {said} / ours",
            fit.cpu,
            fit.wall,
            LOGISTIC_BAR,
            at_least=True,
        ),
        Row(
            "probe",
            f"{WHAT}, alpha = 1, float64: Ridge / ours",
            solve.cpu,
            solve.wall,
            RIDGE_BAR,
            at_least=True,
        ),
    ]


def ours(
    values: torch.Tensor, targets: NDArray[np.generic], folds: Labels, kind: str
) -> float:
    """The mean score over layers and folds: the accuracy, or R²."""
    train = torch.from_numpy(folds[None] != np.arange(FOLDS)[:, None])
    penalty = torch.full((FOLDS,), PENALTY, dtype=torch.float64)
    problems = Problems(train, torch.from_numpy(targets).expand(FOLDS, -1), penalty)
    learner = logistic(2) if kind == "logistic" else ridge()
    scores = []
    for layer in values:
        own, *_ = standardised(layer)
        made = learner.fit(own, problems).scores(own)[:, 0].numpy()
        scores += [
            _score(made[folds == k, k], targets[folds == k], kind) for k in range(FOLDS)
        ]
    return float(np.mean(scores))


def theirs(
    values: torch.Tensor,
    targets: NDArray[np.generic],
    folds: Labels,
    kind: str,
    dtype: str,
) -> float:
    """The same by scikit-learn, one fit after another."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.preprocessing import StandardScaler

    scores = []
    for layer in values:
        own = layer.numpy().astype(dtype)
        for fold in range(FOLDS):
            scaler = StandardScaler().fit(own[folds != fold])
            model = (
                LogisticRegression(C=1 / PENALTY)
                if kind == "logistic"
                else Ridge(PENALTY)
            )
            with warnings.catch_warnings():
                # A hundred steps, its default, do not always suffice.
                warnings.simplefilter("ignore")
                model.fit(scaler.transform(own[folds != fold]), targets[folds != fold])
            given = scaler.transform(own[folds == fold])
            made = (
                model.decision_function(given)
                if kind == "logistic"
                else model.predict(given)
            )
            scores.append(_score(made, targets[folds == fold], kind))
    return float(np.mean(scores))


def _score(made: NDArray[np.floating], wanted: NDArray[np.generic], kind: str) -> float:
    if kind == "logistic":
        return float(((made > 0) == wanted).mean())
    true = wanted.astype(np.float64)
    return float(1 - ((made - true) ** 2).sum() / ((true - true.mean()) ** 2).sum())
