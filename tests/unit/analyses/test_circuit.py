"""Laws of circuits: what is told is what was computed, groups are never split, and
intervals hold. How faithful circuits are is held to `tests/oracles`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.circuit.compute import SHARES, _split
from hiddenscope.causes.encoding import ask_contrasts
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    TextError,
)
from hiddenscope.measures.grouped import estimate
from hiddenscope.results.story import report_of
from hiddenscope.states.arrays import Floats
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.slices import with_slow
from tests.unit.analyses.refused import check_refused

Tiny = Callable[..., hs.Model]
CLEAN, CORRUPT = [7, 99, 23, 64], [7, 45, 23, 60]
CONTRAST = hs.Contrast(CLEAN, CORRUPT, answer=60, other=70)


def several(count: int) -> list[hs.Contrast]:
    """Return contrasts of two tokens that differ, each with prompts of its own."""
    contrasts = []
    for number in range(count):
        clean, corrupt = [7, 20 + number, 23], [7, 60 + number, 23]
        contrasts.append(hs.Contrast(clean, corrupt, 11, 12))
    return contrasts


@cache
def small() -> hs.Model:
    """Return a model of two blocks, on which edges take little time."""
    return hs.load((tiny_model("llama", layers=2), tiny_tokenizer()))


@cache
def held_out() -> hs.Result:
    """Return the circuits that three contrasts chose and eight others tested."""
    return hs.circuit(small(), several(11), random=1)


def test_what_is_told_is_what_was_computed() -> None:
    result = held_out()
    data, facts = result.data, result.facts
    assert (facts["chosen_on"], facts["tested_on"], facts["groups"]) == (3, 8, 11)
    assert facts["held_out"] and len(facts["answers"]) == facts["contrasts"] == 11
    assert "There is no interval" not in result.summary()
    for row, size in enumerate(facts["sizes"]):
        of_size = data.isel(share=row)
        assert size["share"] == of_size["share"].item() == SHARES[row]
        edges = Fraction(str(SHARES[row])) * facts["edges"]
        assert size["edges"] == math.ceil(edges)
        assert size["where_chosen"] == of_size["where_chosen"].item()
        others = [other["way"] for other in size["others"]]
        assert others == [*data["way"].values[1:]]
        for other in [{"way": "circuit", "value": size["value"]}, *size["others"]]:
            expected = of_size["faithfulness"].sel(way=other["way"]).item()
            assert other["value"] == expected
        low, high = (of_size[end].sel(way="circuit").item() for end in ("low", "high"))
        if size["low"] is None:
            # Prompts that agree, as with all edges, tell nothing of others.
            assert np.isnan([low, high]).all()
            continue
        assert low == size["low"] and high == size["high"]
        assert low <= size["value"] <= high
    effects = data["effect"].values
    for edge in facts["strongest"]:
        place = {"writer": edge["writer"], "reader": edge["reader"]}
        assert data["effect"].sel(place).item() == edge["effect"]
    assert abs(facts["strongest"][0]["effect"]) == np.nanmax(np.abs(effects))
    summary = result.summary()
    assert "3 pairs of prompts chose the edges, and 8 others tested them" in summary
    # The answers of one contrast are not those of all.
    assert "On average over 8 pairs of prompts, the logit of the answer is" in summary


def test_where_no_circuit_is_faithful_it_is_said() -> None:
    result = held_out()
    report: Any = report_of(result)
    low = [replace(size, value=0.5) for size in report.sizes[:-1]]
    changed = replace(report, sizes=[*low, report.sizes[-1]])
    told = hs.Result("circuit", result.data, changed, {}).summary()
    assert "Of the circuits of up to 50% of the edges, none keeps 0.8" in told
    assert "100" not in told and "Others of that size" not in told
    # One without random circuits has others all the same.
    alone = hs.circuit(small(), CONTRAST, random=0)
    assert [*alone.data["way"].values] == ["circuit", "plain gradient", "complement"]


def test_areas_are_those_of_trapezoids() -> None:
    data = held_out().data
    for area in held_out().facts["areas"]:
        curve = data["faithfulness"].sel(way=area["way"]).values
        for prefix, axis in (("", SHARES), ("log_", [math.log(x) for x in SHARES])):
            below = between = 0.0
            for k in range(len(SHARES) - 1):
                width = axis[k + 1] - axis[k]
                below += width * (curve[k] + curve[k + 1]) / 2
                between += width * (abs(1 - curve[k]) + abs(1 - curve[k + 1])) / 2
            whole = axis[-1] - axis[0]
            assert area[f"{prefix}cpr"] == pytest.approx(below / whole)
            assert area[f"{prefix}cmd"] == pytest.approx(between / whole)


@pytest.mark.parametrize(
    ("groups", "few"), [(1, 1), (2, 1), (5, 2), (10, 5), (11, 3), (12, 4), (17, 8)]
)
def test_groups_are_never_split(tiny: Tiny, groups: int, few: int) -> None:
    """Half of them choose; from eleven on, eight or more test."""
    contrasts = []
    for number, contrast in enumerate(several(2 * groups)):
        contrasts.append(replace(contrast, group=f"group {number % groups}"))
    asked = ask_contrasts(tiny("llama"), contrasts)
    seen = set()
    for seed in range(5):
        choosing, testing = _split(asked, np.random.default_rng(seed))
        seen.add(tuple(choosing))
        both = [{number % groups for number in side} for side in (choosing, testing)]
        assert len(both[0]) == few and (groups == 1 or not both[0] & both[1])
        assert len(both[0] | both[1]) == groups
        if groups > 1:
            assert sorted([*choosing, *testing]) == [*range(2 * groups)]
    assert len(seen) > 1 or groups == 1


def biased_gpt2() -> Any:
    """Build a GPT-2 whose biases are not 0, as those of a trained one."""
    module: Any = tiny_model("gpt2", layers=2)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
    return module


def test_zeros_leave_what_no_edge_carries() -> None:
    """That is what attention adds besides its heads: its bias."""
    module = biased_gpt2()
    result = hs.circuit((module, None), CONTRAST, ablation="zero", random=0)
    with torch.no_grad():
        stream = sum(block.attn.c_proj.bias for block in module.transformer.h)
        logits = module.lm_head(module.transformer.ln_f(stream))
    expected = pytest.approx(float(logits[60] - logits[70]), abs=1e-4)
    assert result.facts["ablated"] == expected != pytest.approx(0)
    ends = result.data["faithfulness"].sel(share=1.0).values
    np.testing.assert_allclose(ends, [1, 1, 0], atol=1e-4)
    # A llama has no bias, and the head of nothing is nothing.
    llama = hs.circuit(small(), CONTRAST, ablation="zero", random=0)
    assert llama.facts["ablated"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("two prompts that do not align", {"corrupt": [7, 45, 31]}),
        # The answers are read before the first token that differs.
        ("tell the answers apart", {"at": 0}),
    ],
)
def test_what_cannot_be_told_is_refused(words: str, changes: dict[str, Any]) -> None:
    contrast = replace(CONTRAST, **changes)
    check_refused(TextError, words, hs.circuit, small(), contrast)


def test_an_ablation_that_changes_nothing_is_refused() -> None:
    """Where no bias is, both answers have a logit of 0 without any edge."""
    model, contrasts = small(), several(2)
    # Two contrasts whose clean runs prefer the answer as much the other way round.
    turned = replace(contrasts[0], answer=12, other=11, group="a")
    both = [replace(contrasts[0], group="a"), turned]
    told = "Use ablation='resample'"
    for ablation in ("zero", "mean"):
        check_refused(TextError, told, hs.circuit, model, both, ablation=ablation)


@pytest.mark.parametrize("ablation", ["resample", "zero"])
def test_half_precision_is_close(ablation: Any) -> None:
    half = (tiny_model("llama", layers=2).to(torch.bfloat16), None)
    result = hs.circuit(half, CONTRAST, random=0, ablation=ablation)
    full = hs.circuit(small(), CONTRAST, random=0, ablation=ablation)
    for fact in ("clean", "ablated"):
        assert result.facts[fact] == pytest.approx(full.facts[fact], abs=0.05)


def test_contrasts_that_cancel_are_refused() -> None:
    """Turned round a contrast has the difference with the other sign."""
    forth = replace(CONTRAST, group="a")
    back = hs.Contrast(CORRUPT, CLEAN, answer=60, other=70, group="a")
    told = "with no edge kept the answer is preferred by"
    check_refused(TextError, told, hs.circuit, small(), [forth, back])


def samples(
    generator: np.random.Generator, count: int, kind: str
) -> tuple[Floats, Floats]:
    """Draw the differences that circuits keep of those of skewed contrasts.

    Both are [contrast, size]. Each contrast has a curve of its own, or one of two, or
    its shift of a curve that all have.
    """
    places = np.linspace(-2, 2, 8)
    small = generator.normal(0, 0.01, (count, 8))
    if kind == "kinds":
        kinds = np.where(generator.random((count, 1)) < 1 / 3, 1.5, -1.5)
        shares = 1 / (1 + np.exp(-3 * (places + kinds))) + small
    elif kind == "shifts":
        shares = 0.3 * generator.lognormal(0, 0.7, (count, 1)) + small
    elif kind == "curves":
        own = generator.gumbel(0, 1, (count, 1)) + 0.3 * generator.normal(
            size=(count, 8)
        )
        shares = 1 / (1 + np.exp(-(2 * places + own)))
    else:
        own = generator.lognormal(0, 0.7, (count, 1))
        shares = own * generator.lognormal(0, 0.2, (count, 8)) * (places + 3) / 5
    spans = np.repeat(generator.lognormal(0.5, 0.5, (count, 1)), 8, axis=1)
    return spans * shares, spans


@pytest.mark.parametrize("kind", ["curves", "factors", "kinds", "shifts"])
def test_intervals_of_few_groups_hold_skewed_ratios(kind: str) -> None:
    """Of five groups a third of which is of another kind, 82% were held."""
    groups = 8
    above, below = samples(np.random.default_rng(99), 200_000, kind)
    truth = above.sum(0) / below.sum(0)
    held = []
    for seed in range(100):
        above, below = samples(np.random.default_rng(seed), groups, kind)
        found = estimate(above, np.arange(groups), below)
        lows = np.array([size.low for size in found], dtype=float)
        highs = np.array([size.high for size in found], dtype=float)
        held.append((lows <= truth) & (truth <= highs))
    each = np.mean(held)
    together = np.mean(np.all(held, axis=1))
    assert each >= 0.93 and together >= 0.82
    few = estimate(above[:7], np.arange(7), below[:7])
    assert few[0].low is None, "of seven groups there is none"


def test_an_interval_of_differences_below_zero_holds_the_estimate() -> None:
    """A model may prefer the other answer: both signs turn, and the ratio stays."""
    above, below = samples(np.random.default_rng(0), 8, "factors")
    expected = estimate(above, np.arange(8), below)
    for size in expected:
        assert size.low is not None and size.low < size.value
    assert estimate(-above, np.arange(8), -below) == expected


FIELDS = "clean,corrupt,answer,other,group\n"
TABLES = {
    "none.csv": (None, "there is no such file"),
    "short.csv": ("clean,corrupt,answer,group\na b,a c,x,1\n", "'other'"),
    "same.csv": (
        FIELDS + "a b,a c,x,y,1\na b,a b,x,y,2\n",
        "both prompts are the same",
    ),
    "one.csv": (FIELDS + "a b,a c,x,x,1\n", "both answers are 'x'"),
    "gap.csv": (FIELDS + "a b,a c,x,,1\n", "no label"),
    "empty.csv": (FIELDS, "it holds none"),
    "cut.csv": (FIELDS + "a b,a c,x\n", "it has 3 columns"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_contrasts_is_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of the command is none, and it is not looked for."""
    monkeypatch.chdir(tmp_path)
    text, told = TABLES[name]
    if text is not None:
        Path(name).write_text(text, "utf-8")
    words = ["circuit", "a b", "a c", "--answer", "x", "--other", "y", "--more", name]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("word", with_slow(["circuit"], ["edges", "patch"]))
def test_further_contrasts_come_from_a_table(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module: Any = tiny_model("llama", layers=2)
    module.save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    rows = ["the bat sat,the hat sat,a,e,1", "the rat sat,the bat sat,a,e,1"]
    rows.append("the mat sat,the rat sat,a,e,")
    Path("more.csv").write_text("\n".join([FIELDS.strip(), *rows]), "utf-8")
    words = [word, "the mat sat", "the hat sat", "--answer", "a", "--other", "e"]
    words += ["--model", "model", "--more", "more.csv", "--out", "found.nc"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    facts = hs.Result.load("found.nc").facts
    assert (facts["contrasts"], facts["groups"]) == (4, 3)
    same = ["a", "e"]
    assert [[*answers.values()] for answers in facts["answers"]] == [same] * 4
