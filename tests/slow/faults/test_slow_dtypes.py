"""A dtype that this CPU is slow in is told of, once a model."""

import subprocess
import sys

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
