"""Drift leaves both models alone: no weight, no hook, no setting is changed, not even
for an instant.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import hiddenscope as hs
from fuzz.questions import asked_model
from tests.registry import IDS, faulty
from tests.slices import THOROUGH
from tests.unit.analyses.planted import plain_llama
from tests.untouched import (
    assert_interrupts_leave_nothing,
    assert_never_changed,
    assert_others_get_their_numbers,
)

PLAIN: Any = plain_llama()
Pair = tuple[hs.Model, nn.Module]


class _Port(PLAIN.PlainLlama):  # type: ignore[misc]
    """The same model under other names, with a forward of its own."""

    def forward(self, input_ids: Tensor) -> Any:
        return CausalLMOutput(logits=super().forward(input_ids))


def _eager(model: hs.Model) -> nn.Module:
    module: Any = faulty(model)
    module.set_attn_implementation("eager")
    return module


CANDIDATES: dict[str, Callable[[hs.Model], nn.Module]] = {
    "same tree": faulty,
    "itself": lambda model: model.module,
    "port": lambda model: _Port(faulty(model)).eval(),
    "states": lambda model: model.module,
    "states of another": faulty,
    "low memory": faulty,
    "low memory, itself": lambda model: model.module,
    "wider": lambda model: faulty(model).double(),
    "narrower": lambda model: faulty(model).bfloat16(),
    "eager": _eager,
}


def _question(
    case: str, model: hs.Model, candidate: nn.Module
) -> Callable[[], hs.Result]:
    if case.startswith("states"):
        states = hs.load((candidate, None)).capture(IDS)
        return lambda: hs.drift(model, states, IDS)
    return lambda: hs.drift(
        model, candidate, IDS, low_memory=case.startswith("low memory")
    )


def thirds(number: int) -> list[str]:
    """Return every third candidate, or all: each law below has another third."""
    if THOROUGH:
        return list(CANDIDATES)
    return list(CANDIDATES)[number::3]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[Callable[[], hs.Result], Pair]:
    """A question, and the model and the module that it is about."""
    model = asked_model()
    candidate = CANDIDATES[request.param](model)
    return _question(request.param, model, candidate), (model, candidate)


Asked = tuple[Callable[[], hs.Result], Pair]


@pytest.mark.parametrize("pair", thirds(2), indirect=True)
def test_nothing_is_changed_for_an_instant(pair: Asked) -> None:
    ask, (model, candidate) = pair
    ask()
    assert_never_changed(ask, [model.module, candidate])


@pytest.mark.parametrize("pair", thirds(1), indirect=True)
def test_another_thread_gets_its_own_numbers(pair: Asked) -> None:
    ask, (model, candidate) = pair
    ask()
    assert_others_get_their_numbers(ask, [model.module, candidate])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pair", thirds(0), indirect=True)
def test_an_interrupt_leaves_both_models_as_they_were(pair: Asked) -> None:
    ask, (model, candidate) = pair
    assert_interrupts_leave_nothing(ask, [model.module, candidate], model)


def test_the_port_is_paired_by_its_blocks() -> None:
    """Otherwise the cases above would compare whole passes only."""
    model = asked_model()
    facts = hs.drift(model, _Port(faulty(model)).eval(), IDS).facts
    assert (facts["pairing"]["by"], facts["first_site"]) == ("blocks", "layer.2")
