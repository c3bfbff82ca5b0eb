"""An error or an interrupt in the middle of any question leaves the module alone."""

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from hiddenscope.testing.untouched import state_of
from labs.fuzz.questions import QUESTIONS, asked_model
from tests.slices import sliced

BLOCK = "model.layers.1"


class _Tearing:
    """A hook that raises an error at the so-manyth call, and counts the calls."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls, self.at = error, 0, 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


@pytest.mark.parametrize("name", sliced(list(QUESTIONS), 12))
def test_after_an_error_or_an_interrupt_in_any_question(name: str) -> None:
    """Whether the question is answered nevertheless is its own affair: some try what
    may fail.
    """
    model = asked_model()
    QUESTIONS[name](model)  # what is tried once is tried now
    for error in (RuntimeError("torn"), KeyboardInterrupt()):
        tear = _Tearing(error)
        handle = model.module.get_submodule(BLOCK).register_forward_hook(tear)
        before = state_of(model.module)
        QUESTIONS[name](model)
        calls = tear.calls
        for at in sorted({1, calls // 3 + 1, calls}):
            tear.calls, tear.at = 0, at
            with suppress(RuntimeError, KeyboardInterrupt, ValueError):
                QUESTIONS[name](model)
            assert state_of(model.module) == before, (
                f"{error!r} in call {at} of {calls}"
            )
        handle.remove()


SLOW_DTYPES = """
import torch
import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.modules import operations
from hiddenscope.testing import tiny_model

progress.show(True)
for dtype in (torch.bfloat16, torch.float16):
    for family in ("gpt2", "llama"):
        hs.load((tiny_model(family).to(dtype), None)).capture([[5, 6, 7, 8] * 10])
    hs.drift(tiny_model("gpt2"), tiny_model("gpt2").to(dtype), [[5, 6, 7, 8] * 10])
    print(operations.slowdown(dtype) >= operations.SLOW)
"""


def test_a_dtype_that_this_cpu_is_slow_in_is_told_in_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SLOW_DTYPES],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "frame #" not in done.stderr and "Warning" not in done.stderr
    slow = dict(zip(("bfloat16", "float16"), done.stdout.split(), strict=True))
    for dtype, is_slow in slow.items():
        told = [
            line
            for line in done.stderr.splitlines()
            if f"matrix product in {dtype} may take about" in line
        ]
        assert len(told) == (3 if is_slow == "True" else 0)
