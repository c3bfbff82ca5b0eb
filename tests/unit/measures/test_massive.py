"""Massive states are told from others, and change nothing that is fitted to the rest."""

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.measures.massive import is_massive, length_limit


def drawn(*, with_massive: bool) -> hs.States:
    """Thirty texts of eight tokens; one in the middle may be a hundred times as long."""
    values = torch.randn(1, 240, 16, generator=torch.Generator().manual_seed(0))
    if with_massive:
        values[0, 100] = 300.0
    text = np.repeat(np.arange(30), 8)
    tokens = hs.Tokens(None, text, np.tile(np.arange(8), 30), text, ["t"] * 240)
    return hs.States((hs.Site(1),), values, tokens, hs.Source("drawn"))


def test_how_states_are_cut_sets_no_other_limit() -> None:
    rows = torch.randn(9000, 5, generator=torch.Generator().manual_seed(0))
    whole = length_limit([rows])
    assert whole == 4 * rows[:4096].norm(dim=1).median()
    for size in (1, 100, 5000):
        few = rows if size > 1 else rows[:200]
        assert length_limit(few.split(size)) == length_limit([few])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_left_to_be_refused(value: float) -> None:
    rows = torch.ones(5, 3)
    rows[2] = value
    assert not is_massive(rows, length_limit([rows])).any()


def test_a_massive_state_in_the_middle_of_a_text_fits_nothing() -> None:
    plain, spoiled = drawn(with_massive=False), drawn(with_massive=True)
    for make in (
        lambda states: hs.Dictionary.pca(states, 3),
        lambda states: hs.Dictionary.random(states, 20, 4),
    ):
        one, other = make(plain), make(spoiled)
        alike = torch.nn.functional.cosine_similarity(one.directions, other.directions)
        assert alike.abs().min() > 0.9
        assert (one.bias - other.bias).abs().max() < 0.05
