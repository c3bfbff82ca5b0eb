"""Laws of rewired runs: rows, kinds of blocks and rounding do not matter. What the runs
give is held to `tests/oracles`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.causes.encoding import ask_contrasts
from hiddenscope.causes.rewire import check_restored, rewire
from hiddenscope.causes.wiring import Runs, Wiring
from hiddenscope.errors import PassError
from hiddenscope.passes.stepping import Stepper
from hiddenscope.states.arrays import Bools
from hiddenscope.testing import tiny_model
from tests.configurations import configured
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]
CLEAN, CORRUPT = [7, 99, 23, 64, 31], [7, 45, 23, 60, 31]
CONTRAST = hs.Contrast(CLEAN, CORRUPT, answer=60, other=70)


def prepared(
    model: hs.Model, contrast: hs.Contrast = CONTRAST, into: Any = "corrupt"
) -> tuple[Stepper, Runs]:
    wiring = Wiring.of(model)
    (encoded,) = ask_contrasts(model, contrast).encodings
    runs = Runs.of(model, wiring, encoded, into)
    return Stepper(model, runs.base.inputs), runs


def drawn(wiring: Wiring, rows: int, share: float, seed: int = 0) -> Bools:
    """Draw edges that are changed, in every row others."""
    generator = np.random.default_rng(seed)
    changed = generator.random((rows, *wiring.possible.shape)) < share
    return changed & wiring.possible


def closely(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_rows_tell_nothing_of_each_other(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    stepper, runs = prepared(model)
    changed = drawn(runs.wiring, 5, 0.3)
    together = rewire(model, stepper, runs, changed)
    # As with a text so long that two rows are a batch.
    monkeypatch.setattr(Stepper, "rows_at_a_time", 6)
    amounts: list[int] = []
    closely(rewire(model, stepper, runs, changed, amounts.append), together)
    assert amounts == [2, 2, 1]
    closely(rewire(model, stepper, runs, changed[[3]]), together[[3]])


def test_blocks_that_do_not_give_the_runs_back_are_refused(tiny: Tiny) -> None:
    model = tiny("llama")
    stepper, runs = prepared(model)
    wrong = replace(runs, base=replace(runs.base, logits=1.01 * runs.base.logits))
    with pytest.raises(PassError, match="called one by one, do not give back its runs"):
        check_restored(model, stepper, wrong)


# A table of the text's own; a mask for each row; a module of experts behind the middle;
# a cache that is always kept; and branches that are added times a number.
OTHERS = ["MptForCausalLM", "XGLMForCausalLM", "FlexOlmoForCausalLM"]
OTHERS += ["MossTranscribeDiarizeForConditionalGeneration", "MiniCPM3ForCausalLM"]


@pytest.mark.parametrize("name", with_slow(OTHERS[:2], OTHERS[2:]))
def test_blocks_of_many_kinds_are_called_one_by_one(name: str) -> None:
    model = hs.load((configured(name), None))
    result = hs.edges(model, CONTRAST, exact=2, sample=2)
    assert 0 <= result.facts["restored"] < 0.2


def kept_of_nothing(name: str, dtype: torch.dtype) -> Tensor:
    """Return logits of runs that keep 2 to 70% of the edges, and nothing elsewhere."""
    # The weights are those of bfloat16, so that only what is computed differs.
    module = configured(name).to(torch.bfloat16).to(dtype)
    model = hs.load((module, None))
    stepper, runs = prepared(model)
    assert check_restored(model, stepper, runs) < 1
    runs = replace(runs, other_written=torch.zeros_like(runs.written))
    cut = [drawn(runs.wiring, 4, 1 - kept) for kept in (0.02, 0.2, 0.7)]
    return rewire(model, stepper, runs, np.concatenate(cut)).double()


@pytest.mark.parametrize(
    "name", with_slow(["Gemma2ForCausalLM"], ["Glm4ForCausalLM", "LlamaForCausalLM"])
)
def test_what_is_kept_of_nothing_is_no_rounding(name: str) -> None:
    """Norms would make much of what is left of a stream less all that it is made of."""
    expected = kept_of_nothing(name, torch.float64)
    spread = expected.std(-1)
    assert (spread == 0).any() and (spread > 0.01).any()
    for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        off = (kept_of_nothing(name, dtype) - expected).std(-1)
        assert (off <= allowed * spread).all(), dtype


@pytest.mark.slow
def test_half_precision_is_held_to_its_own_rounding() -> None:
    model = hs.load((tiny_model("llama").to(torch.bfloat16), None))
    stepper, runs = prepared(model)
    assert runs.differences.dtype == torch.float32
    assert check_restored(model, stepper, runs) < 1
