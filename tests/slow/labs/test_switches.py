"""Every switch that conformance lists changes what its model gives back."""

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenscope.testing import build
from tests.places import TESTS

sys.path.insert(0, str(TESTS / "conformance"))

import oracle
import run
import switches

SWITCHES = switches.switches()
REPORTS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def outputs(row: dict[str, Any], config: dict[str, Any]) -> list[Tensor]:
    """Return the logits and the states that transformers reports."""
    module: Any = build({**row, "config": config}, most=run.MOST_WEIGHTS)
    names = inspect.signature(module.forward).parameters
    two = module.config.is_encoder_decoder and "decoder_input_ids" in names
    inputs = oracle.trial_inputs(module, two)
    with torch.no_grad():
        output = module(**inputs, output_hidden_states=True)
    found = [output.get("logits"), output.get("last_hidden_state")]
    for name in REPORTS:
        found += output.get(name) or ()
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def differ(some: list[Tensor], others: list[Tensor]) -> bool:
    """Tell whether any tensor differs by more than rounding, or has another shape."""
    if [a.shape for a in some] != [b.shape for b in others]:
        return True
    pairs = zip(some, others, strict=True)
    return any((a - b).abs().max() > 1e-3 * a.abs().max() for a, b in pairs)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model_type", sorted(SWITCHES))
def test_switches_show(model_type: str) -> None:
    rows = [row for row in run.rows() if row["model_type"] == model_type]
    # What is done to logits shows in models with a head alone.
    row = max(rows, key=lambda row: row["task"] != "base")
    whole = outputs(row, row["config"])
    assert all(tensor.isfinite().all() for tensor in whole)
    for name, switch in SWITCHES[model_type].items():
        config = switches.switched(row["config"], switch["hidden"])
        assert differ(whole, outputs(row, config)), name
