"""Linear: many problems at once come to what scikit-learn comes to one by one."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import ttest_1samp
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from hiddenscope.linear import (
    Learner,
    Problems,
    assign_folds,
    cross_validate,
    logistic,
    ridge,
    standardised,
)
from hiddenscope.linear.centre import centre_of_gravity
from hiddenscope.linear.crossvalidation import PENALTIES, cross_validate_labellings
from hiddenscope.linear.logistic import minimise, predicted_classes

Floats = NDArray[np.float64]


def made(
    rows: int, width: int, classes: int = 2
) -> tuple[Floats, NDArray[np.int64], Floats]:
    """States with correlated channels, large means and one constant channel; classes;
    and numbers.
    """
    rng = np.random.default_rng(0)
    states = rng.normal(size=(rows, width)) @ rng.normal(size=(width, width))
    states += 30 * rng.normal(size=width)
    states[:, 3] = 7.5
    scores = states @ rng.normal(size=(width, classes)) / np.sqrt(width)
    noise = rng.gumbel(size=scores.shape) * scores.std()
    classed = np.argmax(scores - scores.mean(0) + noise, 1)
    classed[:classes] = range(classes)
    numbers = scores[:, 0] + rng.normal(size=rows)
    return states.astype(np.float32).astype(np.float64), classed, numbers


def test_equal_states_teach_the_shares_of_the_classes_and_no_more() -> None:
    states, *_ = standardised(torch.full((40, 6), 0.1))
    assert (states == 0).all()
    targets = torch.tensor([0] * 30 + [1] * 10)
    every = Problems(torch.ones(1, 40, dtype=torch.bool), targets[None], torch.ones(1))
    chance = logistic(2).fit(states, every).scores(states).sigmoid()
    torch.testing.assert_close(chance, torch.full_like(chance, 0.25), atol=1e-3, rtol=0)
    mean = ridge().fit(states, every).scores(states)
    torch.testing.assert_close(mean, torch.full_like(mean, 0.25), atol=1e-6, rtol=0)


def test_a_channel_that_is_constant_where_it_is_learnt_has_no_say() -> None:
    rng = np.random.default_rng(2)
    states = rng.normal(size=(50, 4)).astype(np.float32)
    states[:, 2] = 1.0
    states[49, 2] = 5_000.0  # far out, and held out
    targets = torch.from_numpy((states[:, 0] > 0).astype(np.int64))[None]
    train = torch.arange(50)[None] < 40
    own, *_ = standardised(torch.from_numpy(states))
    for learner in (logistic(2), ridge()):
        coef = learner.fit(own, Problems(train, targets, torch.ones(1))).coef
        assert abs(float(coef[2])) < 1e-3 * float(coef.abs().max())


def test_rounding_of_a_channel_has_no_say_where_a_far_row_is_held_out() -> None:
    # The channel is on in two rows alone; elsewhere it holds the rounding of a model.
    # Scaled by that rounding, the two rows are 10,000 deviations away where they are
    # held out, and their loss alone would choose the penalty.
    rng = np.random.default_rng(2)
    states = rng.normal(size=(100, 4)).astype(np.float32)
    targets = torch.from_numpy((states[:, 0] > 0).astype(np.int64))[None]
    states[:, 2] = 1e-4 * states[:, 0]
    states[:2, 2] = (1.0, -1.0)
    folds = np.arange(100) // 20
    own, *_ = standardised(torch.from_numpy(states))
    fit = cross_validate(own, targets, folds, logistic(2))
    predicted = (fit.scores[0, :, 0] > 0).long()
    assert float((predicted == targets[0]).double().mean()) > 0.9
    assert float(fit.penalty.max()) <= 100


def test_a_row_goes_to_the_same_fold_wherever_it_stands_and_groups_stay_whole() -> None:
    rng = np.random.default_rng(3)
    classes = rng.integers(0, 2, 200)
    groups = [f"text {k}" for k in rng.integers(0, 30, 200)]
    folds, order = assign_folds(classes, groups, 5), rng.permutation(200)
    moved = assign_folds(classes[order], [groups[k] for k in order], 5)
    assert (moved == folds[order]).all()
    assert len(set(zip(groups, folds, strict=True))) == len(set(groups))
    shares = [classes[folds == fold].mean() for fold in range(5)]
    assert max(shares) - min(shares) < 0.2
    assert (assign_folds(classes, groups, 5, seed=1) != folds).any()


def nested_ridge(
    states: Floats, targets: Floats, folds: NDArray[np.int64], scale: bool
) -> tuple[Floats, Floats]:
    """Return the mean inner losses [penalty, fold], and every row predicted without its
    fold, standardised anew for each fit if that is asked for.
    """

    def predicted(train: NDArray[np.bool_], penalty: float) -> Floats:
        scaler = StandardScaler(with_mean=scale, with_std=scale).fit(states[train])
        fitted = Ridge(penalty).fit(scaler.transform(states[train]), targets[train])
        found: Floats = fitted.predict(scaler.transform(states))
        return found

    count = int(folds.max()) + 1
    losses = np.zeros((len(PENALTIES), count))
    scores = np.zeros(len(states))
    for fold in range(count):
        for place, penalty in enumerate(PENALTIES):
            for inner in set(range(count)) - {fold}:
                off = predicted((folds != fold) & (folds != inner), penalty) - targets
                losses[place, fold] += 0.5 * np.square(off[folds == inner]).sum()
        losses[:, fold] /= (folds != fold).sum()
        best = PENALTIES[int(losses[:, fold].argmin())]
        scores[folds == fold] = predicted(folds != fold, best)[folds == fold]
    return losses, scores


def labelled_scores(
    own: torch.Tensor,
    labellings: torch.Tensor,
    folds: NDArray[np.int64],
    learner: Learner,
) -> torch.Tensor:
    """Return the held-out scores [row, output, labelling] of many labellings."""

    def keep(
        scores: torch.Tensor, _: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (scores.movedim(-1, 0),)

    (kept,) = cross_validate_labellings(own, labellings, folds, learner, keep)
    return kept.movedim(0, -1)


@pytest.mark.parametrize("shape", [(40, 6), (24, 60)])
def test_cross_validation_is_a_plain_nested_loop(shape: tuple[int, int]) -> None:
    states, _, numbers = made(*shape)
    own = standardised(torch.from_numpy(states))[0]
    folds = np.arange(len(states)) % 4
    found = cross_validate(own, torch.from_numpy(numbers)[None], folds, ridge())
    losses, scores = nested_ridge(states, numbers, folds, scale=True)
    np.testing.assert_allclose(found.inner_loss, losses, rtol=1e-6)
    np.testing.assert_allclose(found.scores[0, :, 0], scores, rtol=1e-5, atol=1e-6)
    # States under many labellings are standardised once.
    labellings = np.stack([numbers, np.roll(numbers, 1), np.roll(numbers, 7)])
    many = labelled_scores(own, torch.from_numpy(labellings), folds, ridge())
    for number, targets in enumerate(labellings):
        _, expected = nested_ridge(own.numpy(), targets, folds, scale=False)
        np.testing.assert_allclose(many[:, 0, number], expected, rtol=1e-6, atol=1e-8)


def test_what_needs_many_steps_comes_to_rest_and_says_so() -> None:
    """Rosenbrock's valley, from two places, one of them at rest already."""

    def valley(
        places: torch.Tensor, which: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = places.clone().requires_grad_()
        value = (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    start = torch.tensor([[-1.2, 1.0], [1.0, 1.0]], dtype=torch.float64)

    def undo(gradients: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return gradients.clone()

    found = minimise(valley, start, undo, 1e-8, most_steps=200)
    torch.testing.assert_close(
        found.point, torch.ones(2, 2, dtype=torch.float64), atol=1e-6, rtol=0
    )
    assert found.converged.all()


def test_two_folds_leave_nothing_to_choose_by() -> None:
    states, targets, _ = made(40, 5)
    own, *_ = standardised(torch.from_numpy(states))
    labels = torch.from_numpy(targets)[None]
    found = cross_validate(own, labels, np.arange(40) % 2, logistic(2))
    assert found.inner_loss.isnan().all()
    assert found.penalty.tolist() == [100.0, 100.0]


@pytest.mark.parametrize("classes", [2, 3])
def test_permuted_classes_are_predicted_nearly_as_by_whole_fits(classes: int) -> None:
    """The first step of Newton's method: on labels that mean nothing, nearly the last
    one.
    """
    rng = np.random.default_rng(0)
    own = standardised(torch.from_numpy(rng.normal(size=(120, 30))))[0]
    labellings = torch.from_numpy(
        np.stack([rng.permutation(np.arange(120) % classes) for _ in range(8)])
    )
    folds = assign_folds(np.arange(120) % classes, [f"text {k}" for k in range(120)], 5)
    steps = labelled_scores(own, labellings, folds, logistic(classes))
    agree = []
    for number, targets in enumerate(labellings):
        whole = cross_validate(own, targets[None], folds, logistic(classes))
        chosen = [
            predicted_classes(one) for one in (whole.scores[0], steps[..., number])
        ]
        agree.append((chosen[0] == chosen[1]).double().mean().item())
    assert np.mean(agree) > 0.85


# --- The centre of gravity over layers


def right(shares: list[float], rows: int = 120, seed: int = 0) -> Floats:
    """Rows that are predicted right this often at each layer."""
    drawn = np.random.default_rng(seed).random((len(shares), rows))
    return (drawn < np.array(shares)[:, None]).astype(float)


def test_the_interval_of_a_centre_is_every_centre_that_a_t_test_accepts() -> None:
    correct = right([0.6, 0.65, 0.75, 0.9])
    layers = [0, 2, 4, 6]
    centre = centre_of_gravity(correct, 0.5, layers, np.arange(120), 1.0)
    assert centre is not None
    gains = correct.mean(1) - 0.5
    assert centre.layer == pytest.approx(gains @ layers / gains.sum())
    for place in np.linspace(0, 6, 61):
        by_row = (np.array(layers) - place) @ (correct - 0.5)
        accepted = ttest_1samp(by_row, 0).pvalue > 0.05
        assert accepted == (centre.low <= place <= centre.high)
    # The best so far rises from 0.5 to each score in turn.
    best = np.maximum.accumulate([0.5, *correct.mean(1)])
    assert centre.gained == pytest.approx(np.diff(best) @ layers / (best[-1] - 0.5))


def test_copies_of_rows_widen_nothing_less_as_groups_and_a_factor_widens() -> None:
    correct = right([0.6, 0.8, 0.7])
    layers, rows = [0, 1, 2], np.arange(120)
    once = centre_of_gravity(correct, 0.5, layers, rows, 1.0)
    twice = centre_of_gravity(np.tile(correct, 2), 0.5, layers, np.tile(rows, 2), 1.0)
    assert once is not None
    assert twice == pytest.approx(once)
    wider = centre_of_gravity(correct, 0.5, layers, rows, 1.6)
    assert wider is not None
    assert wider.low < once.low < once.layer < once.high < wider.high


def test_a_label_that_no_layer_reads_has_no_centre_and_a_flat_one_lies_amid() -> None:
    groups = np.arange(120)
    assert centre_of_gravity(right([0.5] * 5), 0.5, range(5), groups, 1.6) is None
    flat = centre_of_gravity(right([0.8] * 5), 0.5, range(5), groups, 1.6)
    assert flat is not None
    assert flat.low < 2 < flat.high
    # The deviation of 0, 1, 2, 3, 4.
    assert flat.spread == pytest.approx(2**0.5, abs=0.1)
    # Every rise by chance counts, so it is not 0.
    assert 0 < flat.gained < 1


def test_a_label_that_is_always_read_has_a_centre_that_is_not_certain() -> None:
    always = centre_of_gravity(np.ones((5, 120)), 0.5, range(5), np.arange(120), 1.6)
    assert always is not None
    assert 1.9 < always.low < always.layer == 2 < always.high < 2.1
