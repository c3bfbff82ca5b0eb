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


def test_one_label_for_each_position_is_mirrored_to_and_fro() -> None:
    """Whole texts that change places change nothing where all have the same labels in
    the same order.
    """
    sequence = [0, 0, 0, 1, 1, 2]
    labels, units = torch.tensor(sequence * 5), np.repeat(np.arange(5), 6)
    found = permuted(labels, 99, 0, units, units=units)
    mirrored = sequence + sequence[::-1]
    turned = {tuple(np.roll(mirrored, k)[:6].tolist()) for k in range(12)}
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


@pytest.mark.parametrize("sizes", [(4, 10, 20, 2), (10, 4, 20, 2), (6, 5, 12, 3)])
@pytest.mark.parametrize("kind", ["class", "number"])
def test_nothing_is_permuted_where_labels_go_with_the_size_of_groups(
    sizes: tuple[int, int, int, int], kind: str
) -> None:
    few, large, many, small = sizes
    groups = np.repeat(np.arange(few + many), [large] * few + [small] * many)
    labels = torch.from_numpy((groups >= few).astype(int))
    if kind == "number":
        labels = labels.double()
    found = permuted(labels, 99, 0, groups)
    assert found.smallest_p is None and len(found.labellings) == 1


def test_classes_keep_their_rows_where_groups_differ_in_size() -> None:
    draw = np.random.default_rng(0)
    sizes = draw.integers(2, 20, size=40)
    # Large groups are more often of the first class.
    labels = (draw.random(40) < 1 / (1 + np.exp((sizes - 11) / 5))).astype(int)
    groups = np.repeat(np.arange(40), sizes)
    found = permuted(torch.from_numpy(labels[groups]), 199, 0, groups)
    drawn = found.labellings
    rows = drawn.sum(1).double()
    assert float((rows[1:] - rows[0]).abs().max()) <= 0.05 * len(groups)
    changed = drawn[1:] != drawn[0]
    assert float(changed.double().mean()) > 0.3 and found.smallest_p == 1 / 200
    assert len(drawn.unique(dim=0)) == 200


def test_a_sequence_of_labels_stays_in_its_text_and_makes_no_jump() -> None:
    """A text of one run of labels has at most two runs under any other sequence."""
    lengths = [5, 9, 14, 7]
    units = np.repeat(np.arange(4), lengths)
    half = np.concatenate([np.arange(n) * 2 // n for n in lengths])
    found = permuted(torch.from_numpy(half), 99, 0, units, units=units).labellings
    jumps = np.diff(found.numpy(), axis=1) != 0
    inside = np.diff(units) == 0
    for text, length in enumerate(lengths):
        of_text = jumps[:, inside & (units[1:] == text)].sum(1)
        # A short sequence that fills a long text turns on the way.
        assert of_text.max() <= 1 + length // min(lengths)


def test_what_drifts_with_what_drifts_is_not_permuted() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, 80, 16, generator=generator)
    walk = torch.randn(80, generator=generator).cumsum(0)
    in_order = torch.arange(80) // 40
    planted = noise.clone()
    planted[:, :, 0] += 3 * in_order
    cases = [
        (walk, noise.cumsum(1), True),
        ((walk > walk.median()).long(), noise.cumsum(1), True),
        (walk, noise, False),
        (in_order, noise, False),
        (in_order, planted, False),
        (walk.sort().values, noise, False),
        (walk[torch.randperm(80, generator=generator)], noise.cumsum(1), False),
    ]
    for labels, states, drifts in cases:
        found = permuted(labels, 19, 0, states=states)
        assert (found.serial is not None) == drifts
        assert (found.smallest_p is None) == drifts
