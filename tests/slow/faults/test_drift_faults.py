"""Drift finds every kind of planted fault, in models and in ports, and is silent about
harmless changes; and what the lab declares of them is true.
"""

import pytest

from labs.faults import oracle
from labs.faults.models import subject
from labs.faults.pairs import SOUND, Spec
from labs.faults.planted import HARMLESS
from labs.faults.ports import PORTS
from labs.faults.trial import attempt, plant
from tests.slices import sliced
from tests.unit.analyses.planted import (
    HINTS,
    assert_blamed_rightly,
    compared,
    families_for,
)


@pytest.mark.parametrize("kind", HINTS)
def test_every_kind_of_fault_is_found_where_it_is_and_called_by_its_name(
    kind: str,
) -> None:
    found = []
    for family in families_for(kind)[:2]:
        outcome = compared(family, kind)
        found.append(outcome.drifted)
        if outcome.effective:
            assert outcome.drifted, outcome.detail
            assert oracle.objection(subject(family), plant(outcome.spec)) == ""
    # Rotary positions are relative: a shift of all of them moves nothing.
    assert any(found) == (kind != "rope_positions_shifted")


CHANGED = [
    Spec("gpt2", "harmless", "attention_kernel"),
    Spec("llama", "harmless", "all_by_hand"),
    Spec("llama", "harmless", "bf16"),
    Spec("gemma3_text", "harmless", "norm_by_hand"),
    Spec("bert", "harmless", "linear_split"),
    Spec("t5", "harmless", "attention_plain"),
    Spec("mixtral", "harmless", "norm_folded"),
    Spec("llama", "run", "one_at_a_time"),
]


def identifier(spec: Spec) -> str:
    return f"{spec.subject}-{spec.kind}".replace(" ", "-")


SOUND_PORTS = [Spec(name, "port", SOUND, 1) for name in PORTS]


@pytest.mark.parametrize("spec", [*CHANGED, *sliced(SOUND_PORTS, 6)], ids=identifier)
def test_a_harmless_change_or_a_sound_port_is_no_drift(spec: Spec) -> None:
    outcome = attempt(spec)
    assert not outcome.error
    assert not outcome.drifted, (outcome.first_site, outcome.module, outcome.beyond)
    if spec.group == "harmless" and not HARMLESS[spec.kind].other_dtype:
        assert outcome.moved <= oracle.FACTOR / 2


# Every layout, and every way to be wrong about it: a correct projection, a correct
# norm, own code.
PORT_FAULTS = [
    Spec("split-gpt2", "port", "activation ff.act"),
    Spec("split-phi3", "port", "rows_exchanged mlp.up"),
    Spec("split-gpt2", "port", "bias_missing attn.out"),
    Spec("meta-llama", "port", "activation feed_forward"),
    Spec("meta-llama", "port", "scale_missing att everywhere"),
    Spec("folded-llama", "port", "norm_eps n2"),
    Spec("folded-gpt2", "port", "bias_missing mlp.wide"),
    Spec("meta-folded-llama", "port", "rows_exchanged feed_forward.w3"),
    Spec("own-llama", "port", "activation ff.act"),
    Spec("own-llama", "port", "bias_missing sa.o"),
    Spec("loop-mixtral", "port", "activation moe.experts.1"),
    Spec("loop-qwen2-moe", "port", "router_normalisation moe.router"),
    Spec("packed-gpt2", "port", "values_scaled mha"),
    Spec("packed-bert", "port", "queries_keys_exchanged mha"),
]


@pytest.mark.parametrize("spec", PORT_FAULTS, ids=identifier)
def test_a_port_in_another_layout_is_blamed_rightly(spec: Spec) -> None:
    assert_blamed_rightly(spec)
