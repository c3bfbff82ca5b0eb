"""Ports in other layouts agree with their references, and what their faults declare is
true: plain torch throughout.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenscope.errors import ModuleError
from labs.faults.port_oracle import IDS, logits, objection
from labs.faults.ports import PORTS, faults_of, plant
from labs.faults.ports.plant import TRUE_HINTS
from tests.slices import sliced


def reference_logits(reference: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = reference(IDS, use_cache=False).logits
    return out


@pytest.mark.parametrize("name", PORTS)
def test_a_port_agrees_with_its_reference_and_its_faults_are_as_declared(
    name: str,
) -> None:
    """In float32 to its rounding; in float64 to that of norms and rotary tables, which
    references keep in float32; in bfloat16 it is as exact as its reference.
    """
    layout = PORTS[name]
    reference: Any = layout.reference()
    expected = reference_logits(reference)
    error = (logits(layout.port(reference), IDS) - expected).abs()
    assert error.max() < 1e-5 * expected.abs().max()
    wide: Any = copy.deepcopy(reference).double()
    if getattr(wide.config, "_experts_implementation", None):
        # The grouped product of experts has no kernel in float64.
        wide.set_experts_implementation("eager")
    exact = reference_logits(wide)
    error = (logits(layout.port(wide), IDS) - exact).abs()
    assert error.max() < 1e-6 * exact.abs().max()
    narrow: Any = copy.deepcopy(reference).bfloat16()
    theirs = (reference_logits(narrow).float() - expected).abs().mean()
    ours = (logits(layout.port(narrow), IDS).float() - expected).abs().mean()
    assert ours < 2 * theirs
    # Some kinds, each in its last place, in one block or in all; `python -m labs.faults
    # --check port` checks every place of every kind.
    faults = faults_of(layout)
    kinds = {(fault.kind, fault.every): fault for fault in faults}
    for fault in sliced(list(kinds.values()), 5):
        assert objection(layout, reference, plant(layout, reference, fault)) == ""
    assert len({fault.kind for fault in faults}) >= 12
    assert len({fault.name for fault in faults}) == len(faults)


def test_a_false_declaration_of_a_port_is_found() -> None:
    layout = PORTS["meta-llama"]
    reference = layout.reference()
    planted = plant(layout, reference, "activation feed_forward")
    block = planted.path.rpartition(".")[0]
    other = f"{block}.att.wq"
    for declared, words in (
        (replace(planted, path=other, repaired=(other,)), "does not make it sound"),
        (replace(planted, path=block, repaired=(block,)), "is enough"),
        (replace(planted, first_site="layer.1"), "differs first"),
        (replace(planted, also=(other,)), "is correct"),
    ):
        assert words in objection(layout, reference, declared)
    with pytest.raises(ModuleError, match="Cannot plant 'rope_base attn' in split"):
        plant(PORTS["split-gpt2"], reference, "rope_base attn")


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
    hints = ["activation", "missing_bias", "not_compared"]
    assert planted.false_hints(hints) == ["missing_bias"]
    kinds = {fault.kind for layout in PORTS.values() for fault in faults_of(layout)}
    assert TRUE_HINTS.keys() <= kinds
