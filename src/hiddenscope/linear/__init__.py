"""Linear: regressions of states, many problems over the same states solved at once.

problems         many fits of one set of states; ridge regression
logistic         logistic regression, and a probe of a mix of sites
crossvalidation  folds, nested cross-validation
permutations     the whole cross-validation under many labellings of the same states
jackknife        how much a cross-validated R² varies when texts are left out
intervals        how uncertain a cross-validated score is, and whether chance explains it
probe            a fitted probe with scikit-learn's interface

>>> import torch
>>> problems = Problems(torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]]), torch.ones(1))
>>> states, *_ = standardised(torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
>>> (logistic(2).fit(states, problems).scores(states)[:, 0, 0] > 0).tolist()
[False, False, True, True]
"""

from hiddenscope.linear.crossvalidation import (
    CrossValidated,
    assign_folds,
    cross_validate,
)
from hiddenscope.linear.logistic import logistic, mix
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
