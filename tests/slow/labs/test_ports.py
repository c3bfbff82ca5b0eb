"""Ports in other layouts agree with their references, and what their faults declare is
true: plain torch throughout.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from faults.port_oracle import IDS, logits, objection
from faults.ports import PORTS, faults_of, plant
from faults.ports.plant import TRUE_HINTS
from hiddenscope.errors import ModuleError
from tests.slices import sliced


def reference_logits(reference: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = reference(ids, use_cache=False).logits
    return out


@pytest.mark.parametrize("name", PORTS)
def test_a_port_without_a_fault_agrees_with_its_reference(name: str) -> None:
    """In float32 to its rounding; in float64 to that of norms and rotary tables, which
    references keep in float32.
    """
    layout = PORTS[name]
    for seed in (0, 1):
        reference: Any = layout.reference(seed)
        expected = reference_logits(reference, IDS)
        assert (
            logits(layout.port(reference), IDS) - expected
        ).abs().max() < 1e-5 * expected.abs().max()
        wide: Any = copy.deepcopy(reference).double()
        if getattr(wide.config, "_experts_implementation", None):
            # The grouped product of experts has no kernel in float64.
            wide.set_experts_implementation("eager")
        exact = reference_logits(wide, IDS)
        assert (
            logits(layout.port(wide), IDS) - exact
        ).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("name", PORTS)
def test_a_port_in_bfloat16_is_as_exact_as_its_reference(name: str) -> None:
    layout = PORTS[name]
    reference = layout.reference()
    exact = reference_logits(reference, IDS)
    narrow = reference.bfloat16()
    theirs = (reference_logits(narrow, IDS).float() - exact).abs().mean()
    ours = (logits(layout.port(narrow), IDS).float() - exact).abs().mean()
    assert ours < 2 * theirs


@pytest.mark.parametrize("name", PORTS)
def test_what_the_faults_of_a_port_declare_is_true(name: str) -> None:
    """With the declared module exchanged for a sound one the port is sound, and with
    nothing smaller.
    """
    layout = PORTS[name]
    reference = layout.reference()
    # Some kinds, each in its last place, in one block or in all; `python -m faults
    # --check port` checks every place of every kind.
    kinds = {(fault.kind, fault.every): fault for fault in faults_of(layout)}
    objections = [
        objection(layout, reference, plant(layout, reference, fault))
        for fault in sliced(list(kinds.values()), 5)
    ]
    assert [message for message in objections if message] == []


def test_a_false_declaration_of_a_port_is_found() -> None:
    layout = PORTS["meta-llama"]
    reference = layout.reference()
    planted = plant(layout, reference, "activation feed_forward")
    assert objection(layout, reference, planted) == ""
    block = planted.path.rpartition(".")[0]
    other = f"{block}.att.wq"
    blamed = replace(planted, path=other, repaired=(other,))
    assert "does not make it sound" in objection(layout, reference, blamed)
    larger = replace(planted, path=block, repaired=(block,))
    assert "is enough" in objection(layout, reference, larger)
    assert "differs first" in objection(
        layout, reference, replace(planted, first_site="layer.1")
    )
    assert "is correct" in objection(layout, reference, replace(planted, also=(other,)))


def test_a_named_module_is_right_larger_or_wrong() -> None:
    layout = PORTS["loop-mixtral"]
    planted = plant(layout, layout.reference(), "activation moe.experts.1")
    block = planted.path.split(".moe")[0]
    assert planted.names(planted.path) == "right"
    assert planted.names(f"{block}.moe") == "right", (
        "the reference computes all experts in one module"
    )
    assert planted.names(block) == "larger"
    assert planted.names("") == "wrong", "that would be outside all parts"
    assert planted.names(f"{block}.moe.experts.1.w1") == "wrong"
    assert planted.names(f"{block}.moe.router") == "wrong"
    assert planted.names(None) == "none"
    assert planted.false_hints(["activation", "missing_bias", "not_compared"]) == [
        "missing_bias"
    ]


def test_a_fault_that_is_not_there_is_an_error() -> None:
    layout = PORTS["split-gpt2"]
    with pytest.raises(
        ModuleError, match="Cannot plant 'rope_base attn' in split-gpt2"
    ):
        plant(layout, layout.reference(), "rope_base attn")


def test_every_layout_has_many_kinds_and_every_true_hint_is_of_one() -> None:
    planted = set()
    for layout in PORTS.values():
        faults = faults_of(layout)
        planted |= {fault.kind for fault in faults}
        assert len({fault.kind for fault in faults}) >= 12
        assert len({fault.name for fault in faults}) == len(faults)
        assert any(fault.every for fault in faults)
    assert TRUE_HINTS.keys() <= planted
