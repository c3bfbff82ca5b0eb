"""Graft: a donor's blocks make the donor's mistakes where they are, and passes run by
hand say the same.
"""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import texts
from hiddenscope.analyses.graft.compute import compare_windows, sign_flip_p
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    ModuleError,
    SiteError,
    TextError,
)
from hiddenscope.linear.intervals import wilson
from hiddenscope.results import story_of, views_of
from hiddenscope.results.export import to_plain
from hiddenscope.results.pictures import Lines
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.unit.analyses.refused import check_refused

Tiny = Callable[..., hs.Model]
Data = list[tuple[list[int], int]]

PROMPTS = [
    [7, 99, 23],
    [8, 45, 77, 60],
    [50, 51],
    [61, 62, 63, 64, 65],
    [30, 31, 32],
    [40, 90, 91],
]


@pytest.fixture(scope="module")
def donor() -> hs.Model:
    """The tiny llama with its second block drawn anew."""
    module: Any = tiny_model("llama")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in module.model.layers[1].parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.5)
    return hs.load((module, tiny_tokenizer()))


def answered(model: hs.Model, prompts: list[list[int]] = PROMPTS) -> Data:
    """Return the prompts, each with what the model answers."""
    made: list[Any] = [hs.record(model, [ids], (), logits=True) for ids in prompts]
    return [
        (ids, int(one.logits[-1].argmax()))
        for ids, one in zip(prompts, made, strict=True)
    ]


@pytest.fixture(scope="module")
def grafted(donor: hs.Model) -> tuple[hs.Model, Data, hs.Result]:
    """A model, the prompts with its answers, and one block of the donor at a time."""
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    data = answered(model)
    return model, data, hs.graft(model, donor, data)


def assert_as_by_hand(
    model: hs.Model, donor: hs.Model, data: Data, result: hs.Result, site: str
) -> None:
    """Hold a result against passes with the donor's states at one site."""
    right, probability = [], []
    for ids, answer in data:
        states: Any = hs.record(donor, [ids], site).states
        change: dict[Any, Any] = {site: hs.Replace(states[site])}
        made: Any = hs.edit(model, [ids], change, (), logits=True)
        right.append(int(made.logits[-1].argmax()) == answer)
        probability.append(float(made.logits[-1].double().softmax(-1)[answer]))
    here = result.data.sel(site=site)
    assert float(here["accuracy"]) == pytest.approx(np.mean(right))
    assert float(here["probability"]) == pytest.approx(np.mean(probability), rel=1e-4)


def test_a_donors_blocks_make_the_donors_mistakes_where_they_are(
    grafted: tuple[hs.Model, Data, hs.Result], donor: hs.Model
) -> None:
    model, _, result = grafted
    data, facts = result.data, result.facts
    accuracy = data["accuracy"].values
    assert facts["model_alone"]["accuracy"] == 1
    assert accuracy[0] == accuracy[2] == 1, "these blocks are the same in both"
    assert accuracy[1] == pytest.approx(facts["donor_alone"]["accuracy"])
    assert accuracy[1] < 1
    whole = hs.graft(model, donor, answered(donor), layers=3)
    assert whole.data["accuracy"].values.tolist() == [1.0], "all blocks are the donor's"
    low, high = wilson(float(accuracy[1]), 6)
    assert float(data["accuracy_low"][1]) == pytest.approx(low)
    assert float(data["accuracy_high"][1]) == pytest.approx(high)
    # The interval of the lowest window allows for choosing it.
    lowest = facts["lowest"]
    joint = wilson(lowest["accuracy"], 6, comparisons=3)
    assert (lowest["low"], lowest["high"]) == pytest.approx(joint)
    assert (lowest["from"], lowest["to"]) == ("layer.2", "layer.2")


def test_a_donor_that_favours_no_word_is_never_right(tiny: Tiny) -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        module.lm_head.weight.zero_()
    donor = hs.load((module, None))
    # The first of equal words is no answer.
    result = hs.graft(tiny("llama"), donor, [([7, 99, 23], 0), ([8, 45], 0)])
    assert result.facts["donor_alone"]["accuracy"] == 0


def test_what_a_donor_cannot_give(tiny: Tiny, donor: hs.Model) -> None:
    model, larger = tiny("llama"), tiny_tokenizer()
    larger.add_tokens(["zebra"])
    half: Any = tiny_model("llama")
    data = answered(model, PROMPTS[:2])
    other_vocabulary = hs.load((donor.module, larger))
    other_start = hs.load((donor.module, tiny_tokenizer(bos=False)))
    low = hs.load((half.bfloat16(), None))
    whole = {"sites": "layer.*", "layers": 2}
    for of, given, kind, words in (
        (tiny("gpt2"), {}, ModuleError, "differ in shape"),
        (model, {}, ModuleError, "they are the same module"),
        (donor, {"layers": 4}, TextError, "must be an integer from 1 to 3: got 4"),
        (donor, {"sites": "*.cross"}, SiteError, "cross"),
        (donor, {"data": [("a", " b"), "a"]}, TextError, "1 of 2 have an answer"),
        (donor, whole, TextError, "only the last layer would count"),
        (low, {}, ModuleError, "in torch.float32 and torch.bfloat16"),
        (other_vocabulary, {}, ModuleError, "different vocabularies"),
        (other_start, {"data": [("The", " a")]}, TextError, "differently"),
    ):
        check_refused(kind, words, hs.graft, model, of, **{"data": data, **given})


def test_a_block_called_again_and_again_gives_its_states() -> None:
    def looped(seed: int) -> hs.Model:
        module: Any = tiny_model("gpt2", seed=seed)
        module.transformer.h = nn.ModuleList([module.transformer.h[0]] * 3)
        module.config.use_cache = False
        return hs.load((module.eval(), None))

    model, donor = looped(0), looped(1)
    data = answered(model, PROMPTS[:3])
    with pytest.raises(ModuleError, match="Graft states: sites='layer"):
        hs.graft(model, donor, data)
    result = hs.graft(model, donor, data, sites="layer.*")
    assert_as_by_hand(model, donor, data, result, "layer.2")


def test_copies_of_one_prompt_are_one_group(tiny: Tiny, donor: hs.Model) -> None:
    model = tiny("llama")
    facts = hs.graft(model, donor, answered(model, PROMPTS[:1]) * 12).facts
    assert (facts["prompts"], facts["groups"]) == (1, 1)
    assert facts["middle_less_late"]["p"] == 1.0
    assert facts["model_alone"]["low"] == pytest.approx(wilson(1.0, 1)[0])
    # One prompt with two answers is one group.
    pairs: Data = [([5, 6, 7], 11), ([5, 6, 7], 12), ([8, 9], 11)]
    facts = hs.graft(model, donor, pairs).facts
    assert (facts["prompts"], facts["copies"], facts["groups"]) == (3, 0, 2)


def test_prompts_of_a_group_count_as_one(tiny: Tiny, donor: hs.Model) -> None:
    prompts = ["The cat", "The hat", "A cat", "A hat", "A dog ", "The dog"]
    pairs = (prompts, [" a", " c", " a", " c", " a", " c"])
    apart, grouped = (
        hs.graft(tiny("llama"), donor, texts.read(pairs, group=group))
        for group in (None, [0, 0, 0, 1, 1, 1])
    )
    assert (apart.facts["groups"], grouped.facts["groups"]) == (6, 2)
    assert grouped.data["accuracy"].equals(apart.data["accuracy"])
    p = grouped.facts["middle_less_late"]["p"]
    assert p in (0.5, 1.0), "two groups have four signs"
    share = grouped.facts["donor_alone"]
    assert (share["low"], share["high"]) == pytest.approx(wilson(share["accuracy"], 2))
    assert "6 prompts in 2 groups" in grouped.summary()
    assert "over 2 groups of prompts" in grouped.summary()


def test_wilson_covers_what_it_promises() -> None:
    generator = np.random.default_rng(0)
    for share in (0.1, 0.5, 0.9):
        shares = generator.binomial(40, share, 2000) / 40
        intervals = [wilson(float(one), 40) for one in shares]
        inside = [low <= share <= high for low, high in intervals]
        assert 0.92 < np.mean(inside) < 0.98


def test_the_sign_flip_test_is_that_of_all_signs_by_hand() -> None:
    """Of more sums than twelve, random signs stand for all of them."""
    generator = np.random.default_rng(1)
    for count, tolerance in ((2, 0), (5, 0), (12, 0), (14, 0.02)):
        sums = generator.integers(-3, 5, count) / 3
        signs = np.array([*product((1, -1), repeat=count)])
        totals = np.abs(signs @ sums)
        expected = np.mean(totals >= abs(sums.sum()) - 1e-9)
        assert sign_flip_p(sums) == pytest.approx(expected, abs=tolerance)
        # The differences of a group have one sign together.
        halves = np.repeat(sums / 2, 2)
        groups = np.repeat(np.arange(count), 2)
        assert sign_flip_p(halves, groups) == sign_flip_p(sums)
    assert sign_flip_p(np.full(30, 0.2)) < 0.001
    assert sign_flip_p(np.zeros(8)) == 1


def test_windows_are_grouped_by_the_third_of_the_depth_that_their_centre_is_in() -> (
    None
):
    windows = [
        tuple(hs.Site(k) for k in range(start, start + 15)) for start in range(1, 17)
    ]
    right = np.ones((16, 4), dtype=bool)
    # Of the windows in the last third, one answer in four is wrong.
    right[13:, 0] = False
    alone = {"model": right[0], "donor": right[0]}
    parts = compare_windows(windows, right, alone, 30, np.arange(4))
    facts: Any = to_plain(parts, "facts")
    assert (facts["middle"]["from"], facts["middle"]["to"]) == ("layer.4", "layer.27")
    assert (facts["late"]["from"], facts["late"]["to"]) == ("layer.14", "layer.30")
    assert facts["middle"]["accuracy"] == 1
    assert facts["late"]["accuracy"] == 0.75
    assert facts["middle_less_late"] == {"value": 0.25, "p": 1.0}


def test_the_command(
    tiny: Tiny, donor: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"own": tiny("llama"), "donor": donor}
    monkeypatch.setattr("hiddenscope.load", lambda name, *_, **options: models[name])
    prompts, grouped = tmp_path / "prompts.csv", tmp_path / "grouped.csv"
    empty, out = tmp_path / "empty.txt", tmp_path / "graft.json"
    prompts.write_text('text,label\nThe cat," a"\nThe hat," c"\n')
    grouped.write_text('prompt,say,city\nThe cat," a",x\nThe hat," c",x\n')
    empty.write_text("\n")

    def run(*words: object) -> Any:
        given = ["graft", "donor", *map(str, words), "--model", "own", "--layers", "2"]
        return CliRunner().invoke(app, given)

    done = run(prompts, "--out", out)
    assert done.exit_code == 0, done.output
    pairs = [("The cat", " a"), ("The hat", " c")]
    expected = hs.graft(models["own"], donor, pairs, layers=2)
    assert hs.Result.load(out).data.equals(expected.data)
    for labelled in (str(prompts), texts.read(prompts)):
        found = hs.graft(models["own"], donor, labelled, layers=2)
        assert found.data.equals(expected.data)
    columns = ["--text", "prompt", "--label", "say", "--group", "city"]
    done = run(grouped, *columns, "--json")
    assert json.loads(done.stdout)["facts"]["groups"] == 1
    for wrong, words in ((empty, "it holds none"), (out, "graft.json")):
        done = run(wrong)
        assert done.exit_code == 2 and words in done.stderr


def test_its_view_and_its_findings(
    grafted: tuple[hs.Model, Data, hs.Result],
) -> None:
    result = grafted[2]
    (lines,) = views_of(result)
    assert isinstance(lines, Lines) and lines.series[0].band == "95% interval"
    names = [series.name for series in lines.series[1:]]
    assert names == ["the model alone", "the donor alone"]
    (section,) = story_of(result)
    assert "LlamaForCausalLM answers 100% of 6 prompts right" in section.prose
    assert "the fewest answers are right for layer.2" in result.summary()
    for p, said in ((0.05, "they differ by"), (0.051, "not significant")):
        difference = {"middle_less_late": {"value": 0.5, "p": p}}
        facts = {**result.facts, **difference}
        told = hs.Result("graft", result.data, facts, result.source).summary()
        assert said in told
        assert ("they differ by" in told) != ("not significant" in told)
