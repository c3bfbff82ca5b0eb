"""Problems: linear fits of one set of states, each with its own rows to learn from, targets and penalty.

The states are standardised on the rows that a problem learns from, without a copy of them for each: what belongs to
the scale of a problem is done to its coefficients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAME = 1e-14  # the deviation, for one of the mean, that is the rounding of equal numbers
TINY = 1e-12  # the variance, of states of variance 1, below which a channel counts as constant


@dataclass(frozen=True, eq=False)
class Problems:
    """`train` flags and `targets` (numbers of classes, or values) `[problem, row]`, and a `penalty` `[problem]`.

    A problem minimises the sum of its rows' losses plus half the penalty times the squared length of its coefficients,
    which are those of states standardised on its own rows; the intercept is free. So the penalty is scikit-learn's
    `alpha` of a ridge regression, and 1 / `C` of a logistic one.
    """

    train: Tensor
    targets: Tensor
    penalty: Tensor

    def __len__(self) -> int:
        return len(self.penalty)

    @property
    def counts(self) -> Tensor:
        """How many rows each learns from."""
        return self.train.sum(1)

    @property
    def sets(self) -> tuple[Tensor, Tensor]:
        """The different sets of rows that are learnt from `[set, row]`, and which of them each problem has."""
        flags = np.packbits(self.train.numpy(), axis=1)
        _, first, which = np.unique(alike(flags), return_index=True, return_inverse=True)
        return self.train[torch.from_numpy(first)], torch.from_numpy(which.reshape(-1))


class Fitted(NamedTuple):
    """What was learnt: scores are `states @ coef + intercept`, `coef` `[width, output, problem]`."""

    coef: Tensor
    intercept: Tensor
    converged: Tensor

    def scores(self, states: Tensor) -> Tensor:
        """The scores `[row, output, problem]`."""
        width, outputs, problems = self.coef.shape
        made = states @ self.coef.reshape(width, -1).to(states)
        return made.view(len(states), outputs, problems) + self.intercept.to(states)


class Learner(NamedTuple):
    """A way to learn: how problems are fitted, and what each row loses (`[row, problem]`) under some scores.

    `typical` is how much its loss is bent by a score, about.
    """

    fit: Callable[[Tensor, Problems], Fitted]
    losses: Callable[[Tensor, Tensor], Tensor]
    head: "Head"
    outputs: int
    typical: float


Head: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Scores `[row, output, problem]`, targets and weights `[row, problem]` to losses `[problem]` and their slopes."""


def standardised(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States `[row, width]` with mean 0 and deviation 1 in every channel, as float32 (float64 stays); mean, deviation.

    A channel that is the same in all rows becomes 0.

    >>> standardised(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))[0].tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """
    given = states.detach().cpu()
    rows = given.to(given.dtype if given.dtype == torch.float64 else torch.float32).numpy()
    near = rows.mean(0, dtype=np.float64).astype(rows.dtype)
    off = rows - near  # centred twice: near is rounded, and what it is off by counts where deviations are small
    rest = off.mean(0, dtype=np.float64)
    off -= rest.astype(rows.dtype)
    deviation = np.sqrt(np.square(off).mean(0, dtype=np.float64))
    mean = near.astype(np.float64) + rest
    constant = deviation <= SAME * np.abs(mean)
    off[:, constant] = 0
    deviation[constant] = 1
    off /= deviation.astype(rows.dtype)
    return torch.from_numpy(off), torch.from_numpy(mean), torch.from_numpy(deviation)


def moments(states: Tensor, problems: Problems) -> tuple[Tensor, Tensor]:
    """Mean and deviation `[width, problem]` of standardised states over the rows that each problem learns from.

    They are taken in float64: one row that is far out leaves a channel a variance near nothing where it is held out.
    """
    sets, which = problems.sets
    wide = states.to(torch.float64, copy=True)
    weights = (sets / sets.sum(1, keepdim=True)).double()
    mean = (weights @ wide).T
    variance = (weights @ wide.square_()).T - mean.square()
    deviation = torch.where(variance <= TINY, torch.ones_like(variance), variance.clamp_min(TINY).sqrt())
    return mean.to(states)[:, which], deviation.to(states)[:, which]


def product(states: Tensor) -> Tensor:
    """`states.T @ states`, by numpy, which knows that it is symmetric and takes half the time."""
    rows = states.numpy()
    return torch.from_numpy(rows.T @ rows)


def alike(flags: NDArray[np.uint8]) -> NDArray[np.void]:
    """Rows of bytes as one value each, which can be told apart at once."""
    rows = np.ascontiguousarray(flags)
    return rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1)
