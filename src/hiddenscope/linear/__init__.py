"""Linear regressions of states, many problems over the same states solved at once.

problems         many fits of one set of states; ridge regression
logistic         logistic regression, and the minimiser of many problems at once
mix              a probe of a weighted sum of sites
crossvalidation  folds, nested cross-validation, of many labellings too
jackknife        how much a cross-validated R² varies when texts are left out
intervals        confidence intervals and permutation tests of cross-validated scores
centre           the centre of gravity of a label over layers
trend            whether the last of some numbers is where the others lead
probe            a fitted probe with scikit-learn's interface

>>> import torch
>>> targets = torch.tensor([[0, 0, 1, 1]])
>>> problems = Problems(torch.ones(1, 4, dtype=torch.bool), targets, torch.ones(1))
>>> states, *_ = standardised(torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
>>> (logistic(2).fit(states, problems).scores(states)[:, 0, 0] > 0).tolist()
[False, False, True, True]
"""

from hiddenscope.linear.crossvalidation import (
    CrossValidated,
    assign_folds,
    cross_validate,
)
from hiddenscope.linear.logistic import logistic
from hiddenscope.linear.mix import mix
from hiddenscope.linear.probe import Probe
from hiddenscope.linear.problems import Fitted, Learner, Problems, ridge, standardised

__all__ = [
    "CrossValidated",
    "Fitted",
    "Learner",
    "Probe",
    "Problems",
    "assign_folds",
    "cross_validate",
    "logistic",
    "mix",
    "ridge",
    "standardised",
]
