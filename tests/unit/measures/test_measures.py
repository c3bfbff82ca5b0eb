"""Measures: held against their definitions, written out in numpy, and against the laws
that they must keep.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hiddenscope.measures import (
    RunningStatistics,
    chunks,
    cka,
    effective_rank,
    linear_cka,
    two_nn,
)

Numbers = NDArray[np.float64]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def turn(width: int) -> torch.Tensor:
    return torch.linalg.qr(drawn(width, width, seed=9))[0]


def statistics_of(*blocks: torch.Tensor) -> RunningStatistics:
    seen = RunningStatistics()
    for block in blocks:
        seen.add(block)
    return seen


def cka_by_definition(x: Numbers, y: Numbers) -> float:
    """HSIC with linear kernels, centred by the matrix H."""
    n = len(x)
    h = np.eye(n) - np.ones((n, n)) / n

    def hsic(k: Numbers, m: Numbers) -> float:
        return float(np.trace(k @ h @ m @ h))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / (hsic(k, k) * hsic(m, m)) ** 0.5


def two_nn_by_definition(points: Numbers) -> float:
    """The ratios of second to first distances against how many points have a smaller
    one, without the top tenth.
    """
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    distances.sort(axis=1)
    ratios = np.sort(distances[:, 2] / distances[:, 1])
    kept = int(0.9 * len(ratios))
    x, y = np.log(ratios[:kept]), -np.log(1 - np.arange(1, kept + 1) / len(ratios))
    return float(np.linalg.lstsq(x[:, None], y, rcond=None)[0][0])


@pytest.mark.parametrize(("tokens", "at_once"), [(3, cka.CHUNK), (90, 1000)])
def test_cka_is_what_its_definition_says(
    tokens: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cka, "CHUNK", at_once)
    x, y = drawn(3, tokens, 20) + 2, drawn(2, tokens, 33, seed=1)
    expected = [[cka_by_definition(a, b) for b in y.numpy()] for a in x.numpy()]
    np.testing.assert_allclose(linear_cka(x, y)[0], expected, rtol=1e-9)
    own = [[cka_by_definition(a, b) for b in x.numpy()] for a in x.numpy()]
    np.testing.assert_allclose(linear_cka(list(x))[0], own, rtol=1e-9)
    assert (linear_cka(x)[0].diagonal() == 1).all()


def test_cka_of_equal_states_is_not_a_number() -> None:
    x = torch.stack([torch.full((9, 4), 0.1), drawn(9, 4).float()])
    found = linear_cka(x)[0]
    assert found.isnan().tolist() == [[True, True], [True, False]]


def test_two_nn_finds_the_dimension_of_a_cube_and_of_a_gaussian() -> None:
    generator = torch.Generator().manual_seed(3)
    for dimension in (2, 5):
        cube = torch.rand(2000, dimension, generator=generator, dtype=torch.float64)
        for points in (cube, drawn(2000, dimension)):
            # A turn into more dimensions adds none.
            found = two_nn(3 * points @ turn(20)[:dimension] + 10)
            assert found == pytest.approx(dimension, rel=0.12)
            assert found == pytest.approx(two_nn(points), rel=1e-6)


def test_two_nn_is_what_its_definition_says() -> None:
    near = drawn(300, 5) * 1e-5
    # In two clumps far apart, products lose what subtraction keeps.
    clumps = torch.cat([near, near + 1e4])
    for seen, exact in (
        (drawn(20, 3), 1e-9),
        (drawn(77, 50), 1e-9),
        (drawn(600, 4), 1e-9),
        (clumps, 1e-3),
    ):
        expected = two_nn_by_definition(seen.numpy())
        assert two_nn(seen) == pytest.approx(expected, rel=exact)


def test_two_nn_counts_equal_points_once_and_says_nothing_of_few() -> None:
    seen = drawn(100, 6)
    assert two_nn(seen.repeat(3, 1)) == pytest.approx(two_nn(seen), rel=1e-9)
    nearly = torch.cat([seen, seen[:9] * (1 + 1e-7), seen[:9] * (1 - 1e-7)])
    assert two_nn(nearly, 1e-5) == pytest.approx(two_nn(seen), rel=1e-5)
    assert two_nn(nearly) < 0.7 * two_nn(seen), "near copies hold no dimension"
    assert np.isnan(two_nn(seen[:19]))
    assert np.isnan(two_nn(torch.ones(500, 6)))
    assert np.isnan(two_nn(seen[:0]))
    lattice = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
    assert np.isnan(two_nn(lattice)), "all neighbours are equally far"


def rank_of(rows: torch.Tensor) -> float:
    return effective_rank(statistics_of(rows).variances)


def test_the_effective_rank_of_an_even_spread_is_its_dimension_and_of_a_line_one() -> (
    None
):
    assert rank_of(drawn(40_000, 12)) == pytest.approx(12, rel=0.002)
    line = torch.linspace(-1, 2, 50, dtype=torch.float64)[:, None] * drawn(1, 12) + 3
    for rows in (line, line[:5]):
        assert rank_of(rows) == pytest.approx(1, abs=1e-9)
    # Without variance there is no rank.
    for few in (torch.full((4, 12), 0.1), torch.full((40, 12), 0.1), drawn(1, 12)):
        assert np.isnan(rank_of(few))


@pytest.mark.parametrize("count", [2, 8, 9, 200])
def test_running_statistics_are_the_same_however_states_are_split(count: int) -> None:
    rows = drawn(count, 8) * 3 + 1000
    spectrum = np.linalg.eigvalsh(np.cov(rows.numpy(), rowvar=False, bias=True))
    shares = spectrum.clip(min=0) / spectrum.clip(min=0).sum()
    shares = shares[shares > 1e-12]
    rank = float(np.exp(-(shares * np.log(shares)).sum()))
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T)[~torch.eye(count, dtype=torch.bool)].mean().item()
    whole, none = statistics_of(rows), RunningStatistics()
    halves = statistics_of(rows[: count // 2]) + statistics_of(rows[count // 2 :])
    pieces = statistics_of(*rows.split(3))
    for seen in (whole, pieces, halves, whole + none, none + whole):
        assert seen.count == count
        np.testing.assert_allclose(seen.mean, rows.mean(0), rtol=1e-12)
        assert effective_rank(seen.variances) == pytest.approx(rank, rel=1e-6)
        assert seen.anisotropy == pytest.approx(cosines, rel=1e-9)


def test_zeros_have_no_direction() -> None:
    seen = statistics_of(torch.tensor([[1.0, 0], [0, 0], [1, 1]]))
    assert seen.anisotropy == pytest.approx(0.5**0.5)
    assert np.isnan(statistics_of(torch.zeros(5, 2)).anisotropy)
    assert np.isnan(statistics_of(torch.ones(1, 2)).anisotropy)
    assert np.isnan(RunningStatistics().anisotropy)
    assert statistics_of(torch.full((7, 3), 0.3)).anisotropy == pytest.approx(1)


def test_chunks_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenscope.measures.running.CHUNK", 20)
    rows = torch.arange(46.0).reshape(23, 2)
    for lengths in ([1] * 23, [23], [7, 0, 16]):
        made = list(chunks(rows.split(lengths)))
        assert [len(chunk) for chunk in made] == [10, 10, 3]
        assert torch.equal(torch.cat(made), rows)
    assert list(chunks([])) == []
