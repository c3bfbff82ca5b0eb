"""Planted faults are what they say, harmless changes do no harm, and drift finds a
short list of the former.
"""

import copy
from dataclasses import replace

import pytest
import torch

from faults import oracle
from faults.__main__ import END, MARK, _written
from faults.models import FAMILIES, outputs, subject
from faults.pairs import SOUND, Spec, device_specs, specs
from faults.planted import HARMLESS, KINDS, UNNAMED
from faults.ports import PORTS
from faults.report import (
    BARS,
    device_rows,
    fault_rows,
    harmless_rows,
    met,
    misses,
    page,
    port_rows,
    shares,
)
from faults.trial import Outcome, attempt, level, plant
from hiddenscope.errors import ModuleError
from hiddenscope.testing import tiny_model
from tests.slices import sliced

# One place for every way in which a fault is planted: weights, attention, code,
# model-wide, unnamed.
SLICE = [
    *(
        Spec("gpt2", "named", kind)
        for kind in ("weight_transposed", "qkv_reordered", "position_off_by_one")
    ),
    *(
        Spec("gpt2", "named", kind)
        for kind in ("attention_scale", "layer_skipped", "final_norm_twice")
    ),
    *(
        Spec("llama", "named", kind)
        for kind in ("kv_heads_tiled", "rope_interleaved", "rope_base", "norm_eps")
    ),
    *(
        Spec("llama", "named", kind)
        for kind in ("mask_off_by_one", "mask_hides_token", "block_bf16", "bias_twice")
    ),
    *(
        Spec("gemma3_text", "named", kind)
        for kind in ("embedding_scale_missing", "window_ignored", "norm_mean")
    ),
    *(Spec("bert", "named", kind) for kind in ("activation", "norm_bias_missing")),
    *(Spec("t5", "named", kind) for kind in ("relative_buckets", "weight_int8")),
    *(Spec("mixtral", "named", kind) for kind in ("router_top_k", "experts_swapped")),
    *(Spec("qwen2_moe", "unnamed", kind) for kind in ("noise", "factor")),
]
HARMLESS_SLICE = [
    Spec("gpt2", "harmless", "attention_kernel"),
    Spec("llama", "harmless", "all_by_hand"),
    Spec("llama", "harmless", "bf16"),
    Spec("gemma3_text", "harmless", "norm_by_hand"),
    Spec("bert", "harmless", "linear_split"),
    Spec("t5", "harmless", "attention_plain"),
    Spec("mixtral", "harmless", "norm_folded"),
    Spec("llama", "run", "one_at_a_time"),
]


# One fault for every layout and every way to be wrong about it: a correct projection, a
# correct norm, own code.
PORT_SLICE = [
    Spec("split-gpt2", "port", "weight_scaled attn.key"),
    Spec("split-gpt2", "port", "activation ff.act"),
    Spec("split-phi3", "port", "rows_exchanged mlp.up"),
    Spec("fused-llama", "port", "kv_heads_tiled mix"),
    Spec("meta-llama", "port", "activation feed_forward"),
    Spec("meta-llama", "port", "weight_scaled att.wk"),
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
PORTS_WITHOUT_A_FAULT = [Spec(name, "port", SOUND, 1) for name in PORTS]


def identifier(spec: Spec) -> str:
    return f"{spec.subject}-{spec.kind}".replace(" ", "-")


def test_there_are_enough_kinds_families_and_pairs() -> None:
    everything = specs(real=False)
    assert len(KINDS) >= 24 and len(FAMILIES) >= 6
    assert sum(spec.fault for spec in everything) >= 500
    assert sum(not spec.fault for spec in everything) >= 200
    assert {spec.kind for spec in everything} >= {
        *KINDS,
        *UNNAMED,
        *HARMLESS,
    }, "a kind has no place in any family"


@pytest.mark.parametrize("spec", sliced(SLICE, 13), ids=identifier)
def test_what_a_fault_declares_is_true(spec: Spec) -> None:
    of, planted = subject(spec.subject), plant(spec)
    assert oracle.moved(of, planted.module) / level(spec.subject) > oracle.FACTOR
    assert oracle.objection(of, planted) == ""


def test_a_false_declaration_is_found() -> None:
    of, planted = (
        subject("llama"),
        KINDS["norm_eps"].plant(subject("llama").module, layer=1),
    )
    assert "declares layer.1, and layer.2 differs first" in oracle.objection(
        of, replace(planted, first_site="layer.1")
    )
    assert "are wrong" in oracle.objection(
        of, replace(planted, path="model.layers.1.mlp")
    )
    untouched = replace(planted, module=copy.deepcopy(of.module))
    assert "[] are wrong" in oracle.objection(of, untouched)
    assert oracle.moved(of, untouched.module) == 0


def test_a_fault_is_planted_in_a_copy_and_follows_from_its_seed() -> None:
    module = tiny_model("llama")
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    one, two, other = (
        KINDS["earlier_checkpoint"].plant(module, rng=seed) for seed in (3, 3, 4)
    )
    assert all(
        torch.equal(weight, before[name])
        for name, weight in module.state_dict().items()
    )
    assert (one.path, one.detail) == (two.path, two.detail)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.module.parameters(), two.module.parameters(), strict=True)
    )
    assert (one.path, one.detail) != (other.path, other.detail)


def test_a_layer_may_be_chosen_and_one_that_is_not_there_is_an_error() -> None:
    module = tiny_model("llama")
    assert KINDS["norm_eps"].plant(module, layer=1).first_site == "layer.2"
    with pytest.raises(
        ModuleError, match="Cannot plant norm_eps in block 9 of LlamaForCausalLM"
    ):
        KINDS["norm_eps"].plant(module, layer=9)
    assert not KINDS["router_top_k"].applies(module)


@pytest.mark.parametrize(
    "family", sliced(["gpt2", "llama", "gemma3_text", "bert", "t5", "mixtral"], 3)
)
def test_harmless_changes_move_the_output_by_rounding_alone(family: str) -> None:
    of = subject(family)
    changes = [
        change
        for change in HARMLESS.values()
        if change.applies(of.module) and change.name != "compiled"
    ]
    changes = [change for change in changes if not change.other_dtype]
    moved = {
        change.name: oracle.moved(of, change.make(of.module)) / level(family)
        for change in changes
    }
    assert {
        name: ratio for name, ratio in moved.items() if ratio > oracle.FACTOR / 2
    } == {}
    assert outputs(of.module, of).isfinite().all()


@pytest.mark.parametrize("spec", sliced(SLICE, 8), ids=identifier)
def test_drift_names_the_layer_and_the_module(spec: Spec) -> None:
    outcome = attempt(spec)
    assert not outcome.error
    assert outcome.drifted
    assert outcome.first_site == outcome.site
    assert outcome.module in outcome.paths


@pytest.mark.parametrize("spec", HARMLESS_SLICE, ids=identifier)
def test_drift_raises_no_false_alarm(spec: Spec) -> None:
    outcome = attempt(spec)
    assert not outcome.error
    assert not outcome.drifted, (
        f"{outcome.first_site}, {outcome.module}, {outcome.beyond:.3g} times the noise"
    )


@pytest.mark.parametrize("spec", sliced(PORT_SLICE, 3), ids=identifier)
def test_a_port_in_another_layout_is_blamed_rightly(spec: Spec) -> None:
    """The module may be larger than need be, and never a correct one."""
    outcome = attempt(spec)
    assert not outcome.error
    assert outcome.effective and outcome.drifted
    assert outcome.site_exact, f"{outcome.first_site} and not {outcome.site}"
    assert outcome.blame in (
        "right",
        "larger",
    ), f"{outcome.module} and not {outcome.paths}"
    assert not outcome.false_claim, (
        f"the fault is not in the own code of {outcome.module}"
    )
    assert outcome.false_hints == ()


@pytest.mark.parametrize("spec", sliced(PORTS_WITHOUT_A_FAULT, 4), ids=identifier)
def test_a_port_without_a_fault_raises_no_alarm(spec: Spec) -> None:
    outcome = attempt(spec)
    assert not outcome.error
    assert not outcome.drifted, (
        f"{outcome.first_site}, {outcome.module}, {outcome.beyond:.3g} times the noise"
    )


def test_a_verdict_on_a_port_is_counted() -> None:
    spec = Spec("meta-llama", "port", "activation feed_forward")
    truth = {"moved": 10.0, "site": "layer.2", "paths": ("layers.1.feed_forward",)}
    verdict = {"drifted": True, "first_site": "layer.2"}
    right = Outcome(
        spec, **truth, **verdict, module="layers.1.feed_forward", blame="right"
    )
    larger = Outcome(spec, **truth, **verdict, module="layers.1", blame="larger")
    claiming = replace(larger, own_code=True, false_claim=True)
    wrong = Outcome(
        spec,
        **truth,
        **verdict,
        module="layers.1.att.wq",
        blame="wrong",
        false_hints=("permuted_weight",),
    )
    silent = Outcome(spec, **truth)
    alarm = Outcome(replace(spec, kind=SOUND), 1.0, **verdict)
    elsewhere = replace(right, spec=replace(spec, dtype="bfloat16", device="cuda"))
    everything = [right, larger, claiming, wrong, silent, alarm, elsewhere]
    assert [
        Outcome.from_json(outcome.to_json()) for outcome in everything
    ] == everything
    rows = {tuple(row[:3]): row[3:] for row in port_rows(everything)}
    assert rows["meta", "float32", "cpu"] == [5, 5, 4, 1, 2, 1, 1, 1, 1, 1, 1]
    assert rows["all", "float32", "cpu"] == rows["meta", "float32", "cpu"]
    assert rows["meta", "bfloat16", "cuda"] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert [
        shares(everything)[name] for name in ("correct modules blamed", "false claims")
    ] == [1, 1]
    assert len(misses(everything)) == 4
    assert met([right, larger, elsewhere]) and not met([claiming]) and not met([wrong])


def test_another_device_has_pairs_and_a_table_of_its_own() -> None:
    pairs = device_specs("cuda")
    assert {spec.device for spec in pairs} == {"cuda", "cpu-cuda"}
    assert {spec.group for spec in pairs} == {"named", "unnamed", "harmless", "port"}
    assert {spec.reference[2] for spec in pairs if spec.device == "cpu-cuda"} == {"cpu"}
    assert {spec.candidate_device for spec in pairs} == {"cuda"}
    fault = Outcome(
        Spec("llama", "named", "norm_eps", device="cuda"),
        10.0,
        error="RuntimeError: no",
    )
    assert device_rows([fault]) == [["cuda", 1, 1, 0, 0, 0, 0, 1]]
    assert fault_rows([], lambda outcome: outcome.spec.kind) == [["all", 0, 0, 0, 0]]
    assert "## Other devices\n\n| reference" in page([fault])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "mixtral"])
def test_a_fault_that_was_planted_on_the_cpu_runs_on_a_gpu(family: str) -> None:
    """What a fault or a harmless change keeps beside the weights goes along with them."""
    of = subject(family)
    kinds = [
        kind for kind in (*KINDS.values(), *UNNAMED.values()) if kind.applies(of.module)
    ]
    changes = [
        change
        for change in HARMLESS.values()
        if change.applies(of.module) and change.name != "compiled"
    ]
    for module in (
        *(kind.plant(of.module).module for kind in kinds),
        *(change.make(of.module) for change in changes),
    ):
        assert outputs(module.cuda(), of).isfinite().all()


def test_writing_the_tables_leaves_the_rest_of_the_page_alone() -> None:
    fault = Outcome(Spec("x", "named", "one"), 10.0, "layer.1", ("a",))
    written = _written(f"before\n{MARK}old{END}after\n", [fault])
    assert written.startswith(f"before\n{MARK}") and written.endswith(f"{END}after\n")
    assert "old" not in written
    assert _written(written, [fault]) == written


def test_a_miss_is_counted_and_named() -> None:
    found = {"drifted": True, "first_site": "layer.1", "module": "a"}
    right = Outcome(Spec("x", "named", "one"), 10.0, "layer.1", ("a",), **found)
    wrong = Outcome(Spec("x", "named", "two"), 10.0, "layer.2", ("b",), **found)
    quiet = Outcome(Spec("x", "named", "two"), 1.0, "layer.2", ("b",))
    alarm = Outcome(Spec("x", "harmless", "three"), 1.0, **found)
    failed = Outcome(Spec("x", "harmless", "three"), 1.0, error="ValueError: no")
    everything = [right, wrong, quiet, alarm, failed]
    assert [Outcome.from_json(one.to_json()) for one in everything] == everything
    exact = {"first layer exact": 0.5, "module exact": 0.5}
    assert shares(everything) == {
        **exact,
        "correct modules blamed": 0,
        "false claims": 0,
        "false alarms": 2,
    }
    assert fault_rows(everything, lambda one: one.spec.kind) == [
        ["one", 1, 1, 1, 1],
        ["two", 2, 1, 0, 0],
        ["all", 3, 2, 1, 1],
    ]
    assert harmless_rows(everything)[-1][:3] == ["all", 2, 2]
    assert [row[0] for row in misses(everything)] == [
        "x, two, seed 0",
        "x, three, seed 0",
        "x, three, seed 0",
    ]
    assert not met(everything) and met([right]) and not met([right, alarm])
    assert all(
        name in page(everything) for name in ("first layer exact: 50.00%", *BARS)
    )
