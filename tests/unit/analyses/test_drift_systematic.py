"""The test for systematic differences finds them below the rounding of a token, and is
silent about rounding alone.
"""

import math

import pytest
import torch
from torch import Tensor

from hiddenscope.analyses.drift.systematic import FEWEST_ROWS, Finding, SystematicTest
from labs.faults.small import Trial, measure

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH = 96


def rows(count: int = 300, width: int = WIDTH, seed: int = 0) -> Tensor:
    """Draw rows of an output with a mean, a few strong directions and channels of
    unequal size.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    low_rank = draw(count, 5) @ draw(5, width)
    return (draw(count, width) + low_rank + draw(width)) * draw(width).exp()


def stochastically_rounded(exact: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Round after a shift by up to half a unit: another program whose rounding errors
    are its own.
    """
    generator = torch.Generator().manual_seed(seed)
    shift = torch.rand(exact.shape, generator=generator, dtype=torch.float64) - 0.5
    return (exact * (1 + shift * torch.finfo(dtype).eps)).to(dtype)


def finding_of(reference: Tensor, candidate: Tensor, exact: Tensor) -> Finding:
    test = SystematicTest(exact.shape[1])
    test.add(reference, candidate, exact)
    return test.result()


def test_rounding_alone_is_not_systematic() -> None:
    for dtype in DTYPES:
        for seed in range(20):
            exact = rows(120, seed=seed)
            candidate = stochastically_rounded(exact, dtype, seed)
            assert finding_of(exact.to(dtype), candidate, exact).beyond < 1


def test_a_scale_below_one_unit_of_rounding_is_found_with_its_sign() -> None:
    exact = rows()
    for dtype in DTYPES:
        unit = torch.finfo(dtype).eps / 2
        # float32 is accumulated in float32, so that its bar is higher.
        factor = 32 * unit if dtype == torch.float32 else unit / 3
        for sign in (-1, 1):
            candidate = stochastically_rounded(exact * (1 + sign * factor), dtype, 1)
            finding = finding_of(exact.to(dtype), candidate, exact)
            assert finding.beyond > 1
            assert finding.strongest.name == "scale"
            assert finding.size == pytest.approx(sign * factor, rel=0.2)
            # No single entry tells it: rounding alone moves entries by more.
            assert abs(finding.size) > finding.smallest


def test_each_kind_of_difference_is_found() -> None:
    """Of states as models have them: what all tokens share is their leading part."""
    exact = rows()
    exact += 2 * exact.square().mean(0).sqrt()
    generator = torch.Generator().manual_seed(7)
    size = exact.square().mean(0).sqrt()
    direction = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    _, _, components = torch.linalg.svd(exact / size)
    leading = exact / size @ components[0]
    leading /= leading.square().mean().sqrt()
    differences = {
        "bias": 0.01 * size * direction,
        "gain": 0.01 * exact * direction,
        "linear": 0.01 * leading.unsqueeze(1) * size * direction,
    }
    for name, difference in differences.items():
        candidate = stochastically_rounded(exact + difference, torch.bfloat16, 2)
        finding = finding_of(exact.bfloat16(), candidate, exact)
        beyond = {pattern.name: pattern.beyond for pattern in finding.patterns}
        assert beyond["bias" if name == "bias" else "linear"] > 1, name


def test_batches_change_nothing() -> None:
    exact = rows(301)
    reference, candidate = exact.bfloat16(), (exact * 1.003).bfloat16()
    whole = finding_of(reference, candidate, exact)
    for size in (7, 200):
        test = SystematicTest(WIDTH)
        parts = (tensor.split(size) for tensor in (reference, candidate, exact))
        for batch in zip(*parts, strict=True):
            test.add(*batch)
        patterns = test.result().patterns
        for pattern, expected in zip(patterns, whole.patterns, strict=True):
            assert pattern.size == pytest.approx(expected.size, rel=1e-9)
            assert pattern.bar == pytest.approx(expected.bar, rel=1e-9)


def test_rows_that_repeat_count_once() -> None:
    exact = rows(64)
    candidate = stochastically_rounded(exact, torch.bfloat16, 3)
    alone = finding_of(exact.bfloat16(), candidate, exact)
    repeated = finding_of(
        exact.bfloat16().repeat(50, 1), candidate.repeat(50, 1), exact.repeat(50, 1)
    )
    assert repeated == alone
    assert repeated.rows == 64
    assert repeated.beyond < 1


def test_a_massive_channel_and_a_massive_token_do_not_hide_a_fault() -> None:
    exact = rows(200, seed=4)
    exact[:, 5] *= 3000
    exact[0] *= 3000
    # The channel and the token that dwarf all others are right.
    factors = torch.full_like(exact, 1.01)
    factors[:, 5] = 1
    factors[0] = 1
    finding = finding_of(exact.bfloat16(), (exact * factors).bfloat16(), exact)
    assert finding.beyond > 1
    assert finding.strongest.size == pytest.approx(0.01, rel=0.2)


def test_equal_programs_differ_by_nothing_and_say_what_they_could_have_shown() -> None:
    exact = rows()
    finding = finding_of(exact.bfloat16(), exact.bfloat16(), exact)
    assert finding.size == finding.beyond == 0
    assert 0 < finding.smallest < torch.finfo(torch.bfloat16).eps / 2
    few = finding_of(
        *(tensor[:100] for tensor in (exact.bfloat16(), exact.bfloat16(), exact))
    )
    assert few.smallest >= finding.smallest


def test_a_program_that_is_exact_where_the_reference_rounds_is_not_blamed() -> None:
    exact = rows()
    # The reference cuts digits off, which is a scale: the exact candidate differs by
    # that, and is right.
    bits = exact.float().view(torch.int32)
    reference = (bits & ~0xFFFF).view(torch.float32).bfloat16()
    finding = finding_of(reference, exact.bfloat16(), exact)
    assert abs(finding.size) > 1e-3
    assert finding.beyond < 1


def test_weights_that_were_rounded_once_more_are_not_a_scale() -> None:
    width = 16
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        weight = 1 + 0.1 * torch.randn(width, generator=generator, dtype=torch.float64)
        normed = torch.randn(200, width, generator=generator, dtype=torch.float64)
        exact = normed * weight
        candidate = (normed * weight.bfloat16().double()).bfloat16()
        assert finding_of(exact.bfloat16(), candidate, exact).beyond < 1, seed


def test_too_few_rows_show_nothing() -> None:
    exact = rows(FEWEST_ROWS - 1)
    finding = finding_of(exact.bfloat16(), 2 * exact.bfloat16(), exact)
    assert finding.patterns == ()
    assert finding.beyond == 0
    assert math.isinf(finding.smallest)


def test_rows_of_zeros_and_of_no_number_are_left_out() -> None:
    exact = rows(200)
    exact[3] = 0
    exact[7] = torch.nan
    candidate = (exact * 1.01).bfloat16()
    finding = finding_of(exact.bfloat16(), candidate, exact)
    assert finding.rows == 198
    assert finding.size == pytest.approx(0.01, rel=0.2)
    silent = torch.zeros(200, WIDTH, dtype=torch.float64)
    assert finding_of(silent.bfloat16(), silent.bfloat16(), silent).beyond == 0


def test_wide_outputs_are_tested_on_some_channels() -> None:
    exact = rows(100, width=6000)
    finding = finding_of(exact.bfloat16(), (exact * 1.01).bfloat16(), exact)
    assert finding.beyond > 1


TRIALS = [
    Trial("llama", "weight x1.02", "bfloat16"),
    Trial("llama", "residual x1.001", "bfloat16"),
    Trial("gpt2", "MLP output x1.005", "float16"),
    Trial("gpt2", "norm x1.01", "float32"),
    Trial("gemma3_text", "norm_by_hand", "bfloat16", sound=True),
    Trial("llama", "norm_folded", "bfloat16", sound=True),
    Trial("bert", "linear_split", "bfloat16", sound=True),
    Trial("t5", "padding", "float32", sound=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_small_faults_in_models_are_found_and_sound_models_are_not(
    trial: Trial,
) -> None:
    if trial.sound:
        (outcome,) = measure(trial)
        assert outcome.beyond < 1
        assert outcome.module_beyond < 1
        return
    (outcome,) = measure(trial, most=100)
    assert outcome.tokens == 100
    assert outcome.beyond > 1
