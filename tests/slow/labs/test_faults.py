"""The lab of planted faults does not lie: false declarations are found, and verdicts are
counted as they are. tests/slow/faults holds what drift says of the faults.
"""

import copy
from dataclasses import replace
from typing import Any

from labs.faults import oracle
from labs.faults.__main__ import END, MARK, _written
from labs.faults.models import FAMILIES, subject
from labs.faults.pairs import SOUND, Spec, specs
from labs.faults.planted import HARMLESS, KINDS, UNNAMED
from labs.faults.report import (
    BARS,
    fault_rows,
    harmless_rows,
    met,
    misses,
    page,
    port_rows,
    shares,
)
from labs.faults.trial import Outcome
from tests.unit.analyses.planted import HINTS


def test_every_kind_has_a_place_and_a_hint() -> None:
    everything = specs(real=False)
    assert len(FAMILIES) >= 6
    assert sum(spec.fault for spec in everything) >= 500
    assert sum(not spec.fault for spec in everything) >= 200
    assert {spec.kind for spec in everything} >= {*KINDS, *UNNAMED, *HARMLESS}
    assert HINTS.keys() == {*KINDS, *UNNAMED}


def test_a_false_declaration_is_found() -> None:
    of = subject("llama")
    planted = KINDS["norm_eps"].plant(of.module, layer=1)
    untouched = replace(planted, module=copy.deepcopy(of.module))
    for declared, words in (
        (replace(planted, first_site="layer.1"), "declares layer.1, and layer.2"),
        (replace(planted, path="model.layers.1.mlp"), "are wrong"),
        (untouched, "[] are wrong"),
    ):
        assert words in oracle.objection(of, declared)
    assert oracle.moved(of, untouched.module) == 0


def assert_read_as_written(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert type(outcome).from_json(outcome.to_json()) == outcome


def test_a_verdict_on_a_port_is_counted() -> None:
    spec = Spec("meta-llama", "port", "activation feed_forward")
    silent = Outcome(spec, 10.0, "layer.2", ("layers.1.feed_forward",))
    found = replace(silent, drifted=True, first_site="layer.2")
    right = replace(found, module="layers.1.feed_forward", blame="right")
    larger = replace(found, module="layers.1", blame="larger")
    claiming = replace(larger, own_code=True, false_claim=True)
    hints = ("permuted_weight",)
    wrong = replace(found, module="layers.1.att.wq", blame="wrong", false_hints=hints)
    sound = replace(spec, kind=SOUND)
    alarm = Outcome(sound, 1.0, drifted=True, first_site="layer.2")
    elsewhere = replace(right, spec=replace(spec, dtype="bfloat16", device="cuda"))
    everything = [right, larger, claiming, wrong, silent, alarm, elsewhere]
    assert_read_as_written(everything)
    rows = {tuple(row[:3]): row[3:] for row in port_rows(everything)}
    assert rows["meta", "float32", "cpu"] == [5, 5, 4, 1, 2, 1, 1, 1, 1, 1, 1]
    assert rows["all", "float32", "cpu"] == rows["meta", "float32", "cpu"]
    assert rows["meta", "bfloat16", "cuda"] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    counted = shares(everything)
    assert counted["correct modules blamed"] == counted["false claims"] == 1
    assert len(misses(everything)) == 4
    assert met([right, larger, elsewhere]) and not met([claiming]) and not met([wrong])


def test_a_miss_is_counted_and_named() -> None:
    found = {"drifted": True, "first_site": "layer.1", "module": "a"}
    right = Outcome(Spec("x", "named", "one"), 10.0, "layer.1", ("a",), **found)
    wrong = Outcome(Spec("x", "named", "two"), 10.0, "layer.2", ("b",), **found)
    quiet = Outcome(Spec("x", "named", "two"), 1.0, "layer.2", ("b",))
    alarm = Outcome(Spec("x", "harmless", "three"), 1.0, **found)
    failed = Outcome(Spec("x", "harmless", "three"), 1.0, error="ValueError: no")
    everything = [right, wrong, quiet, alarm, failed]
    assert_read_as_written(everything)
    assert shares(everything) == {
        "first layer exact": 0.5,
        "module exact": 0.5,
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
    named = ["x, two, seed 0", "x, three, seed 0", "x, three, seed 0"]
    assert [row[0] for row in misses(everything)] == named
    assert not met(everything) and met([right]) and not met([right, alarm])
    told = page(everything)
    assert all(name in told for name in ("first layer exact: 50.00%", *BARS))
    # Writing the tables leaves the rest of the page alone.
    written = _written(f"before\n{MARK}old{END}after\n", everything)
    assert written.startswith(f"before\n{MARK}") and written.endswith(f"{END}after\n")
    assert "old" not in written and _written(written, everything) == written
