"""Linear: probes of states, many problems over the same states solved at once.

>>> import torch
>>> problems = Problems(torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]]), torch.ones(1))
>>> states, *_ = standardised(torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
>>> (logistic(2).fit(states, problems).scores(states)[:, 0, 0] > 0).tolist()
[False, False, True, True]
"""

from hiddenscope.linear.folds import deal, drawn
from hiddenscope.linear.logistic import logistic
from hiddenscope.linear.probe import Probe
from hiddenscope.linear.problems import Fitted, Learner, Problems, standardised
from hiddenscope.linear.ridge import ridge

__all__ = ["Fitted", "Learner", "Probe", "Problems", "deal", "drawn", "logistic", "ridge", "standardised"]
