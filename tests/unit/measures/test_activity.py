"""Activity equals a full sort and a full count, however the rows are cut."""

import numpy as np
import torch

from hiddenscope.measures.activity import Activity


def test_what_is_not_above_the_lowest_is_no_example() -> None:
    activity = Activity(1, 3, np.array([], dtype=int), lowest=0.0)
    activity.see(torch.tensor([[0.0], [5.0], [-torch.inf]]))
    assert activity.numbers.tolist() == [[1, -1, -1]]
    assert activity.active.tolist() == [1]


def test_a_run_longer_than_a_byte_counts_is_counted() -> None:
    activity = Activity(1, 1, np.array([], dtype=int))
    activity.see(torch.ones(1000, 1))
    assert activity.active.tolist() == [1000]
