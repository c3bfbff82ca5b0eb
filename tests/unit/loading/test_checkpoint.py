"""The dtype: the checkpoint's on a GPU, float32 on a CPU unless bfloat16 is fast there."""

from pathlib import Path

import pytest
import torch

from hiddenscope.loading import checkpoint, open_source
from hiddenscope.loading.checkpoint import bfloat16_cost, choose_dtype, parse_dtype
from tests.folders import tiny_llama

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_gpu_computes_in_the_checkpoints_dtype() -> None:
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        assert choose_dtype(stored, GPU)[0] == stored


def test_a_cpu_computes_in_bfloat16_where_that_is_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = {0.5: torch.bfloat16, 1.0: torch.bfloat16, 273.0: torch.float32}
    for cost, want in costs.items():
        monkeypatch.setattr(checkpoint, "bfloat16_cost", lambda cost=cost: cost)
        chosen, note = choose_dtype(torch.bfloat16, CPU)
        assert chosen == want
        assert f"{cost:.2g} times as long" in note
        # Rounding the weights to bfloat16 would change the model: speed does not
        # decide that.
        for stored in (torch.float16, torch.float32):
            assert choose_dtype(stored, CPU)[0] == torch.float32


def test_the_cost_is_measured_once() -> None:
    assert bfloat16_cost() == bfloat16_cost() > 0
    assert bfloat16_cost.cache_info().misses == 1


def test_a_dtype_has_many_names() -> None:
    for name in ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16):
        assert parse_dtype(name) == torch.bfloat16


def test_the_choice_is_said_and_done(tmp_path: Path) -> None:
    tiny_llama().bfloat16().save_pretrained(tmp_path / "bf16")
    loaded = open_source(tmp_path / "bf16", device="cpu")
    want = torch.bfloat16 if bfloat16_cost() <= 1 else torch.float32
    assert {value.dtype for value in loaded.module.parameters()} == {want}
    assert "times as long as a float32 one on this CPU" in loaded.notes[0]
    tiny_llama().half().save_pretrained(tmp_path / "f16")
    loaded = open_source(tmp_path / "f16", device="cpu")
    assert {value.dtype for value in loaded.module.parameters()} == {torch.float32}
    assert "float16" in loaded.notes[0]
