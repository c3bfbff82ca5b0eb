"""The registry has every analysis, and no verb changes a module.

The laws that analyses inherit are in `hiddenscope.testing`, and `tests/checks` runs
them; `make conformance ANALYSES=1` holds some of them on every text model.
"""

from functools import cache
from typing import Any

import pytest
import torch

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES, ANALYSIS
from hiddenscope.testing.untouched import state_of
from labs.fuzz.questions import QUESTIONS, asked_model
from tests.registry import ENTRIES, IDS


def test_the_registry_has_every_analysis() -> None:
    assert set(ENTRIES) == set(ANALYSIS)
    for analysis in ANALYSES:
        entry = ENTRIES[analysis.word]
        assert bool(entry.results) == analysis.result, analysis.word
        assert (entry.request is not None) == analysis.in_app, analysis.word


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_leaves_the_users_module_as_it_was(name: str) -> None:
    model = _shared_model()
    before, gradients = state_of(model.module), torch.is_grad_enabled()
    expected: Any = _expected()
    QUESTIONS[name](model)
    assert state_of(model.module) == before
    assert torch.is_grad_enabled() == gradients
    assert torch.equal(model.capture(IDS).values, expected)


@cache
def _shared_model() -> hs.Model:
    return asked_model()


@cache
def _expected() -> torch.Tensor:
    return _shared_model().capture(IDS).values
