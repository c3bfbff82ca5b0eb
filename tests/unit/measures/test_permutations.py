"""Permutations: labels change places as the design allows, and what cannot change is
said to.
"""

from math import comb
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenscope.measures.permutations import permuted, same_labelling


def test_a_minimal_pair_deals_its_labels_anew() -> None:
    """Whole pairs that change places change nothing: each has the same labels in the
    same order.
    """
    labels, pairs = torch.tensor([0, 1] * 20), np.repeat(np.arange(20), 2)
    found = permuted(labels, 199, 0, pairs)
    assert found.labellings.shape == (200, 40)
    assert torch.equal(found.labellings[0], labels)
    assert (found.labellings.view(200, 20, 2).sum(2) == 1).all()
    assert 0.4 < float((found.labellings[1:] == labels).double().mean()) < 0.6
    assert found.smallest_p == 1 / 200
    for few in (2, 6):
        found = permuted(labels[: 2 * few], 199, 0, pairs[: 2 * few])
        assert len(found.labellings) == len(found.labellings.unique(dim=0)) == 2**few
        # All labels the other way round part the texts alike.
        assert found.smallest_p == 2 / 2**few


def test_few_texts_have_every_order_once() -> None:
    found = permuted(torch.tensor([0, 0, 0, 1, 1, 1, 1]), 199, 0)
    assert len(found.labellings.unique(dim=0)) == len(found.labellings) == comb(7, 3)
    assert found.smallest_p == 1 / comb(7, 3)
    # As many as are asked for, and the true one.
    assert len(permuted(torch.tensor([0, 0, 1, 1]), 5, 0).labellings.unique(dim=0)) == 6


def test_groups_of_one_label_exchange_it_whole() -> None:
    groups = np.repeat(np.arange(10), 4)
    found = permuted(torch.from_numpy(groups % 2), 99, 0, groups)
    drawn = found.labellings.view(-1, 10, 4)
    assert (drawn == drawn[..., :1]).all()
    assert (drawn[..., 0].sum(1) == 5).all()


def test_pairs_beside_single_texts_do_each_as_they_can() -> None:
    labels = torch.tensor([0, 1, 0, 1, 0, 0, 1, 1])
    drawn = permuted(labels, 99, 0, [0, 0, 1, 1, 2, 3, 4, 5]).labellings
    assert len(drawn) == len(drawn.unique(dim=0)) == 4 * comb(4, 2)
    for part, ones in ((slice(2), 1), (slice(2, 4), 1), (slice(4, None), 2)):
        assert (drawn[:, part].sum(1) == ones).all()


def test_the_smallest_p_counts_the_orders_that_part_the_rows_alike() -> None:
    smallest = [
        (permuted(torch.tensor([0, 0, 1, 1]), 99, 0, ["a", "a", "b", "b"]), None),
        (permuted(torch.tensor([0, 1]), 99, 0, strata=[0, 1]), None),
        (permuted(torch.tensor([0, 0, 1, 1, 2, 2]), 99, 0), 6 / 90),
        # A regression explains mirrored numbers as well.
        (permuted(torch.tensor([0.0, 1.0, 2.0]), 99, 0), 2 / 6),
        (permuted(torch.tensor([0.0, 1.0, 3.0]), 99, 0), 1 / 6),
        (permuted(torch.tensor([0.0, 1.0]), 99, 0), None),
        # Classes only change names.
        (permuted(torch.arange(6), 199, 0), None),
        (permuted(torch.arange(8), 199, 0, strata=[0, 0, 1, 1, 2, 2, 3, 3]), None),
    ]
    for found, expected in smallest:
        assert found.smallest_p == pytest.approx(expected)


def test_few_sequences_cannot_give_a_smaller_p_than_their_number() -> None:
    labels, units = torch.tensor([0, 1, 1, 2, 0, 0]), np.array([0, 0, 0, 1, 1, 1])
    found = permuted(labels, 199, 0, units=units)
    alike = [same_labelling(labels, other) for other in found.labellings]
    assert found.smallest_p == pytest.approx(np.mean(alike))
    assert found.smallest_p >= 0.03
    # Interleaved texts are permuted like texts in a row.
    mixed = np.array([0, 3, 1, 4, 2, 5])
    moved = permuted(labels[mixed], 199, 0, units=units[mixed])
    assert torch.equal(moved.labellings, found.labellings[:, mixed])


def test_names_may_be_long_texts() -> None:
    names = ["x" * 10**7, *(str(number) for number in range(999))]
    assert len(permuted(torch.arange(1000) % 2, 9, 0, names).labellings) == 10


def test_one_label_for_each_position_is_rotated() -> None:
    """Whole texts that change places change nothing where all have the same labels in
    the same order.
    """
    sequence = [0, 0, 0, 1, 1, 2]
    labels, units = torch.tensor(sequence * 5), np.repeat(np.arange(5), 6)
    found = permuted(labels, 99, 0, units, units=units)
    turned = {tuple(np.roll(sequence, k).tolist()) for k in range(6)}
    assert {tuple(row) for row in found.labellings.reshape(-1, 6).tolist()} == turned
    assert found.smallest_p == 0.01 and len(found.labellings.unique(dim=0)) > 90


def test_texts_keep_one_label_and_pairs_of_texts_deal_theirs() -> None:
    texts = np.repeat(np.arange(8), 3)
    found = permuted(torch.from_numpy(texts % 2), 99, 0, texts // 2, units=texts)
    drawn = found.labellings.view(-1, 4, 2, 3)
    assert (drawn == drawn[..., :1]).all()
    assert (drawn[..., 0].sum(2) == 1).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 1)),
        min_size=2,
        max_size=14,
    ),
    st.integers(0, 99),
    st.randoms(),
)
def test_the_order_of_rows_means_nothing_and_strata_keep_their_labels(
    rows: list[tuple[int, int, int]], seed: int, shuffler: Random
) -> None:
    labels = torch.tensor([label for label, _, _ in rows])
    groups = [f"group {stratum} {group}" for _, group, stratum in rows]
    strata = [stratum for *_, stratum in rows]
    units = [f"text {k:02}" for k in range(len(rows))]
    found = permuted(labels, 30, seed, groups, strata, units)
    assert torch.equal(found.labellings[0], labels)
    for stratum in set(strata):
        inside = [row for row, own in enumerate(strata) if own == stratum]
        sizes = {groups.count(groups[row]) for row in inside}
        if len(sizes) == 1:
            kept = found.labellings[:, inside].sort(1).values
            assert (kept == labels[inside].sort().values).all()
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    columns = ([column[row] for row in order] for column in (groups, strata, units))
    moved = permuted(labels[order], 30, seed, *columns)
    assert torch.equal(moved.labellings, found.labellings[:, order])
    assert moved.smallest_p == found.smallest_p


def test_two_labellings_are_the_same_whatever_classes_are_called() -> None:
    one = torch.tensor([0, 0, 1, 2])
    for other, same in (([2, 2, 0, 1], True), ([0, 1, 1, 2], False)):
        assert same_labelling(one, torch.tensor(other)) == same
    assert not same_labelling(one, torch.tensor([0, 0, 1, 1]))
    assert not same_labelling(torch.tensor([0, 0]), torch.tensor([1, 2]))
    assert same_labelling(one.double(), 2 - one.double())
    assert not same_labelling(one.double(), one.double() + 1)
