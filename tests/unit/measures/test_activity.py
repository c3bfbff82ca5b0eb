"""Activity equals a full sort and a full count, however the rows are cut."""

import numpy as np
import pytest
import torch

from hiddenscope.measures.activity import Activity, sample_rows


@pytest.mark.parametrize("sizes", [[1] * 600, [600], [7, 300, 293]])
def test_a_stream_gives_what_a_full_sort_gives(sizes: list[int]) -> None:
    # Few distinct numbers: many are equal, and the first of them counts.
    generator = torch.Generator().manual_seed(0)
    activations = torch.randint(-9, 9, (600, 5), generator=generator).float()
    sample = sample_rows(np.arange(600), 2**24 // 50)
    activity = Activity(5, 8, sample, threshold=2.0)
    for part in activations.split(sizes):
        activity.see(part)
    order = activations.sort(dim=0, descending=True, stable=True).indices
    assert activity.numbers.tolist() == order[:8].T.tolist()
    assert activity.active.tolist() == (activations > 2).sum(0).tolist()
    assert len(sample) == 50 and torch.equal(activity.sampled, activations[sample])


def test_what_is_not_above_the_lowest_is_no_example() -> None:
    activity = Activity(1, 3, np.array([], dtype=int), lowest=0.0)
    activity.see(torch.tensor([[0.0], [5.0], [-torch.inf]]))
    assert activity.numbers.tolist() == [[1, -1, -1]]
    assert activity.active.tolist() == [1]


def test_a_run_longer_than_a_byte_counts_is_counted() -> None:
    activity = Activity(1, 1, np.array([], dtype=int))
    activity.see(torch.ones(1000, 1))
    assert activity.active.tolist() == [1000]
