"""Drift leaves both models alone: no weight, no hook, no setting is changed, not even
for an instant.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import hiddenscope as hs
from hiddenscope.testing.untouched import (
    assert_interrupts_leave_nothing,
    assert_never_changed,
    assert_others_get_their_numbers,
)
from labs.fuzz.questions import asked_model
from tests.registry import IDS, faulty
from tests.slices import THOROUGH
from tests.unit.analyses.planted import plain_llama

PLAIN: Any = plain_llama()


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


def asked(case: str) -> tuple[Callable[[], hs.Result], list[nn.Module], hs.Model]:
    """Return a question, the modules that it is about, and the reference."""
    model = asked_model()
    candidate = CANDIDATES[case](model)
    side: Any = candidate
    if case.startswith("states"):
        side = hs.load((candidate, None)).capture(IDS)
    low = case.startswith("low memory")
    modules = [model.module, candidate]
    return lambda: hs.drift(model, side, IDS, low_memory=low), modules, model


def thirds(number: int) -> list[str]:
    """Return every third candidate, or all: each law below has another third."""
    return list(CANDIDATES) if THOROUGH else list(CANDIDATES)[number::3]


@pytest.mark.parametrize("case", thirds(2))
def test_nothing_is_changed_for_an_instant(case: str) -> None:
    ask, modules, _ = asked(case)
    ask()
    assert_never_changed(ask, modules)


@pytest.mark.parametrize("case", thirds(1))
def test_another_thread_gets_its_own_numbers(case: str) -> None:
    ask, modules, _ = asked(case)
    ask()
    assert_others_get_their_numbers(ask, modules)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", thirds(0))
def test_an_interrupt_leaves_both_models_as_they_were(case: str) -> None:
    ask, modules, model = asked(case)
    assert_interrupts_leave_nothing(ask, modules, model)


def test_the_port_is_paired_by_its_blocks() -> None:
    """Otherwise the cases above would compare whole passes only."""
    ask, _, _ = asked("port")
    facts = ask().facts
    assert (facts["pairing"]["by"], facts["first_site"]) == ("blocks", "layer.2")
