"""The conformance run is only as good as its oracle: it must see what is wrong, and say
when something got worse.
"""

import json
import os
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from hiddenscope.discovery import Anatomy, find
from hiddenscope.discovery.blocks import Block
from hiddenscope.testing import SUBJECTS, Subject, tiny_model
from tests.places import TESTS
from tests.registry import ENTRIES

sys.path.insert(0, str(TESTS / "conformance"))

import analyses
import laws
import oracle
import page
import run


def other_stack(anatomy: Anatomy, **changed: object) -> Anatomy:
    return replace(anatomy, stacks=(replace(anatomy.stacks[0], **changed),))  # type: ignore[arg-type]


def swapped_layers(anatomy: Anatomy) -> Anatomy:
    proof = anatomy.stacks[0].proof
    first, second, third, *rest = proof.taps
    return other_stack(
        anatomy, proof=replace(proof, taps=(first, third, second, *rest))
    )


def final_as_last_layer(anatomy: Anatomy) -> Anatomy:
    proof = anatomy.stacks[0].proof
    return other_stack(
        anatomy, proof=replace(proof, taps=(*proof.taps[:-1], proof.final))
    )


def no_final(anatomy: Anatomy) -> Anatomy:
    return other_stack(
        anatomy, proof=replace(anatomy.stacks[0].proof, final=None, exit=())
    )


def swapped_parts(anatomy: Anatomy) -> Anatomy:
    def swap(block: Block) -> Block:
        return replace(
            block,
            parts={
                **block.parts,
                "attn": block.parts["mlp"],
                "mlp": block.parts["attn"],
            },
        )

    return other_stack(
        anatomy, blocks=tuple(swap(block) for block in anatomy.stacks[0].blocks)
    )


def other_kind(anatomy: Anatomy) -> Anatomy:
    blocks = tuple(
        replace(block, kind="parallel") for block in anatomy.stacks[0].blocks
    )
    return other_stack(anatomy, blocks=blocks)


def not_causal(anatomy: Anatomy) -> Anatomy:
    return other_stack(anatomy, causal=False)


def other_head(anatomy: Anatomy) -> Anatomy:
    assert anatomy.head is not None
    return replace(anatomy, head=replace(anatomy.head, reads_final=False))


LIES = [
    swapped_layers,
    final_as_last_layer,
    no_final,
    swapped_parts,
    other_kind,
    not_causal,
    other_head,
]


@pytest.mark.parametrize("lie", LIES)
def test_the_oracle_sees_through_a_lie(lie: object) -> None:
    module = tiny_model("llama")
    anatomy = find(module)
    assert oracle.wrongs(module, anatomy) == []
    assert oracle.wrongs(module, lie(anatomy)) != []  # type: ignore[operator]


@pytest.mark.parametrize("family", ["gpt2", "t5", "xlnet", "deepseek_v4", "mamba"])
def test_the_oracle_agrees_with_the_proof(family: str) -> None:
    module = tiny_model(family)
    assert oracle.wrongs(module, find(module)) == []


def outcome(name: str, verdict: str) -> run.Outcome:
    return run.Outcome(name, name.lower(), ("base", "causal-lm"), verdict)


def test_the_run_says_what_got_worse() -> None:
    recorded = {"pairs": 600, "types": 300, "refused": {"Known": "a reason"}}
    outcomes = [
        outcome("Good", "proved"),
        outcome("Known", "refused"),
        outcome("Gone", "missing"),
    ]
    assert list(run.worse(outcomes, recorded, whole=False)) == []
    for verdict in ("refused", "wrong", "crashed"):
        assert list(
            run.worse([*outcomes, outcome("New", verdict)], recorded, whole=False)
        ) == [f"New is {verdict}"]
    assert len(list(run.worse(outcomes, recorded, whole=True))) == 2
    many = [outcome(f"Good{i}", "proved") for i in range(299)]
    assert list(run.worse([*many, *outcomes], recorded, whole=True)) == []
    assert (
        run.last_line(outcomes)
        == "2 of 6 pairs and 1 of 3 types proved, 2 refused, 0 wrong, 2 missing"
    )


def test_the_record_is_above_the_bar() -> None:
    recorded = json.loads(run.RECORD.read_text("utf-8"))
    assert all(recorded[name] >= run.BAR[name] for name in run.BAR)
    assert all(recorded["refused"].values())


def test_the_page_shows_the_record() -> None:
    recorded, tally = run.read(run.RECORD), run.read(run.ANALYSES)
    assert page.shows(recorded, tally), "run tests/conformance/run.py --record"
    assert not page.shows({**recorded, "pairs": recorded["pairs"] + 1}, tally)
    assert not page.shows(recorded, {**tally, "types": tally["types"] + 1})


def test_a_run_that_the_page_does_not_show_is_a_fault() -> None:
    recorded = json.loads(run.RECORD.read_text("utf-8"))
    outcomes = [outcome("Good", "proved"), outcome("Known", "refused")]
    names = [fault.split()[0] for fault in run.stale(outcomes, recorded)]
    assert names[:3] == ["all_pairs", "all_types", "tasks"]
    assert names[-3:] == ["refused", "without_parts", "without_heads"]
    new = run.record(outcomes)
    shown = "docs/conformance.md does not show the record"
    assert [fault.split(":")[0] for fault in run.stale(outcomes, new)] == [shown]
    # Another transformers has other classes.
    assert len(list(run.stale(outcomes, {**new, "transformers": "0.1"}))) == 1
    assert new["tasks"] == {
        "base": {"proved": 1, "refused": 1},
        "causal-lm": {"proved": 1, "refused": 1},
    }
    assert (new["pairs"], new["all_pairs"], new["types"], new["all_types"]) == (
        2,
        4,
        1,
        2,
    )


@pytest.mark.filterwarnings(
    "ignore:Initializing zero-element tensors:UserWarning"
    # Torch, on building a MobileBERT.
)
@pytest.mark.parametrize(
    "name",
    [
        "MobileBertForMaskedLM",
        "BartForConditionalGeneration",
        "Gemma3nForCausalLM",
    ],
)
def test_every_analysis_keeps_its_laws(name: str) -> None:
    """All classes: python tests/conformance/run.py --analyses."""
    row = next(row for row in run.rows() if row["model_class"] == name)
    came = {one.analysis: one for one in analyses.tried(row, run.MOST_WEIGHTS)}
    assert set(came) == set(ENTRIES)
    # The last layer of these is no sum of parts that are known.
    assert came["contributions"].verdict == "refused"
    assert [one for one in came.values() if one.verdict == "fault"] == []


def test_the_laws_of_analyses_are_broken_by_another_model() -> None:
    other = Subject("other", lambda seed: tiny_model("llama", seed=1))
    vars(other)["model"] = SUBJECTS["llama"].model
    trial = laws.Trial(other)
    for word in ("lens", "contributions", "patch", "steer"):
        assert laws.LAWS[word](trial), word


def test_a_process_that_is_killed_ends_the_run_with_an_error() -> None:
    """And is not waited for; memory that runs out kills one."""
    with pytest.raises(BrokenProcessPool):
        list(run.tried([9], os._exit))  # type: ignore[list-item]
