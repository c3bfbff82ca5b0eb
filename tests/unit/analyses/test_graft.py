"""Graft: a donor's blocks make the donor's mistakes where they are, and passes run by
hand say the same.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import texts
from hiddenscope.analyses.graft.findings import graft_facts, sign_flip_p
from hiddenscope.cli.main import app
from hiddenscope.errors import ModuleError, SiteError, TextError
from hiddenscope.linear.intervals import wilson
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.kinds.graft import findings
from hiddenscope.views.values import Lines

Tiny = Callable[..., hs.Model]


def perturbed(
    block: int, seed: int = 3, dtype: torch.dtype = torch.float32, tokenizer: Any = None
) -> hs.Model:
    """The tiny llama with one block drawn anew."""
    module: Any = tiny_model("llama")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.model.layers[block].parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.5)
    return hs.load((module.to(dtype), tokenizer or tiny_tokenizer()))


def answered(model: hs.Model, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    return [
        (ids, int(hs.record(model, [ids], "layer.0", logits=True).logits[-1].argmax()))
        for ids in prompts
    ]  # type: ignore[index]


PROMPTS = [
    [7, 99, 23],
    [8, 45, 77, 60],
    [50, 51],
    [61, 62, 63, 64, 65],
    [30, 31, 32],
    [40, 90, 91],
]


def test_a_donors_blocks_make_the_donors_mistakes_where_they_are(tiny: Tiny) -> None:
    model, donor = tiny("llama"), perturbed(1)
    result = hs.graft(model, donor, answered(model, PROMPTS))
    accuracy = result.data["accuracy"].values
    assert result.facts["model_alone"]["accuracy"] == 1
    assert accuracy[0] == accuracy[2] == 1, "these blocks are the same in both"
    assert accuracy[1] == pytest.approx(result.facts["donor_alone"]["accuracy"])
    assert accuracy[1] < 1
    whole = hs.graft(model, donor, answered(donor, PROMPTS), layers=3)
    assert whole.data["accuracy"].values.tolist() == [1.0], (
        "all of the blocks are the donor"
    )
    low, high = (float(result.data[f"accuracy_{end}"][1]) for end in ("low", "high"))
    assert low < accuracy[1] < high


@pytest.mark.parametrize("sites", ["layer.*", "*.attn", "*.mlp", "*.mid", "final"])
def test_a_donors_states(tiny: Tiny, sites: str) -> None:
    model, donor = tiny("llama"), perturbed(1)
    data = answered(model, PROMPTS)
    result = hs.graft(model, donor, data, sites=sites)
    for row, site in enumerate(map(str, model.anatomy.select(sites))):
        assert result.data["site"].values[row] == site
        right = []
        for ids, answer in data:
            change: dict[Any, Any] = {
                site: hs.Replace(hs.record(donor, [ids], site).states[site])
            }
            right.append(
                int(
                    hs.edit(model, [ids], change, "layer.0", logits=True)
                    .logits[-1]
                    .argmax()
                )
                == answer
            )  # type: ignore[index]
        assert float(result.data["accuracy"][row]) == pytest.approx(np.mean(right))


def test_what_a_donor_cannot_give(tiny: Tiny) -> None:
    model, data, larger = (
        tiny("llama"),
        answered(tiny("llama"), PROMPTS[:2]),
        tiny_tokenizer(),
    )
    larger.add_tokens(["zebra"])
    for donor, given, kind, words in [
        (tiny("gpt2"), {}, ModuleError, "differ in shape"),
        (model, {}, ModuleError, "they are the same module"),
        (
            perturbed(0),
            {"layers": 4},
            TextError,
            "layers must be an integer from 1 to 3: got 4",
        ),
        (perturbed(0), {"layers": True}, TextError, "got True"),
        (perturbed(0), {"sites": "*.cross"}, SiteError, "cross"),
        (perturbed(0), {"data": ["a"]}, TextError, "they have no labels"),
        (perturbed(0), {"data": []}, TextError, "the list is empty"),
        (
            perturbed(0),
            {"sites": "layer.*", "layers": 2},
            TextError,
            "only the last layer would count",
        ),
        (
            perturbed(0, dtype=torch.bfloat16),
            {},
            ModuleError,
            "in torch.float32 and torch.bfloat16",
        ),
        (perturbed(0, tokenizer=larger), {}, ModuleError, "different vocabularies"),
        (
            perturbed(0, tokenizer=tiny_tokenizer(bos=False)),
            {"data": [("The", " a")]},
            TextError,
            "differently",
        ),
    ]:
        with pytest.raises(kind) as caught:
            hs.graft(model, donor, **{"data": data, **given})
        assert words in str(caught.value)


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
    right = []
    for ids, answer in data:
        change: dict[Any, Any] = {
            "layer.2": hs.Replace(hs.record(donor, [ids], "layer.2").states["layer.2"])
        }
        right.append(
            int(
                hs.edit(model, [ids], change, "layer.0", logits=True)
                .logits[-1]
                .argmax()
            )
            == answer
        )  # type: ignore[index]
    assert float(result.data["accuracy"].sel(site="layer.2")) == pytest.approx(
        np.mean(right)
    )


def test_a_prompt_given_again_is_no_further_evidence(tiny: Tiny) -> None:
    model, donor = tiny("llama"), perturbed(1)
    data = answered(model, PROMPTS)
    once, often = (
        hs.graft(model, donor, data),
        hs.graft(model, donor, [*data * 3, data[0]]),
    )
    assert often.data.equals(once.data)
    counts = {
        "copies": 2 * len(PROMPTS) + 1,
        "notes": ["13 prompts are copies of others and were left out."],
    }
    assert often.facts == {**once.facts, **counts}
    alone = hs.graft(model, donor, data[:1] * 12)
    assert (
        alone.facts["prompts"],
        alone.facts["groups"],
        alone.facts["middle_less_late"]["p"],
    ) == (1, 1, 1.0)
    assert alone.facts["model_alone"]["low"] == pytest.approx(wilson(1.0, 1)[0])


def test_prompts_of_a_group_count_as_one(tiny: Tiny) -> None:
    model, donor = tiny("llama"), perturbed(1)
    prompts = ["The cat", "The hat", "A cat", "A hat", "A dog ", "The dog"]
    pairs = (prompts, [" a", " c", " a", " c", " a", " c"])
    apart, grouped = (
        hs.graft(model, donor, texts.read(pairs, group=group))
        for group in (None, [0, 0, 0, 1, 1, 1])
    )
    assert (apart.facts["groups"], grouped.facts["groups"]) == (6, 2)
    assert grouped.data["accuracy"].equals(apart.data["accuracy"])
    assert grouped.facts["middle_less_late"]["p"] in (0.5, 1.0), (
        "two groups have four signs"
    )
    share = grouped.facts["donor_alone"]
    assert (share["low"], share["high"]) == pytest.approx(wilson(share["accuracy"], 2))
    assert (
        "6 prompts in 2 groups" in grouped.summary()
        and "over 2 groups of prompts" in grouped.summary()
    )


def test_one_prompt_with_two_answers_is_one_group(tiny: Tiny) -> None:
    model = tiny("llama")
    facts = hs.graft(
        model, perturbed(1), [([5, 6, 7], 11), ([5, 6, 7], 12), ([8, 9], 11)]
    ).facts
    assert (facts["prompts"], facts["copies"], facts["groups"]) == (3, 0, 2)


def test_wilson_covers_what_it_promises() -> None:
    generator = np.random.default_rng(0)
    for share in (0.1, 0.5, 0.9):
        counts = generator.binomial(40, share, 2000)
        inside = [
            low <= share <= high
            for low, high in (wilson(int(count) / 40, 40) for count in counts)
        ]
        assert 0.92 < np.mean(inside) < 0.98


def test_the_command(tiny: Tiny, tmp_path: Path) -> None:
    models = {"own": tiny("llama"), "donor": perturbed(1)}
    for name, model in models.items():
        model.module.save_pretrained(tmp_path / name)  # type: ignore[operator]
        model.tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "prompts.csv").write_text('text,label\nThe cat," a"\nThe hat," c"\n')
    (tmp_path / "bare.txt").write_text("The cat\n")
    given = ["graft", str(tmp_path / "donor"), "--model", str(tmp_path / "own")]
    out = tmp_path / "graft.json"
    done = CliRunner().invoke(
        app, [*given, str(tmp_path / "prompts.csv"), "--layers", "2", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    data = [("The cat", " a"), ("The hat", " c")]
    expected = hs.graft(models["own"], models["donor"], data, layers=2)
    np.testing.assert_allclose(
        hs.Result.load(out).data["probability"], expected.data["probability"], rtol=1e-5
    )
    (tmp_path / "grouped.csv").write_text(
        'prompt,say,city\nThe cat," a",x\nThe hat," c",x\n'
    )
    columns = ["--text", "prompt", "--label", "say", "--group", "city"]
    done = CliRunner().invoke(
        app,
        [*given, str(tmp_path / "grouped.csv"), *columns, "--layers", "2", "--json"],
    )
    assert json.loads(done.stdout)["facts"]["groups"] == 1
    for wrong, words in (
        (str(tmp_path / "bare.txt"), "they have no labels"),
        (str(out), "graft.json"),
    ):
        done = CliRunner().invoke(app, [*given, wrong])
        assert done.exit_code == 2 and words in done.stderr
    for labelled in (
        str(tmp_path / "prompts.csv"),
        texts.read(tmp_path / "prompts.csv"),
    ):
        assert hs.graft(models["own"], models["donor"], labelled, layers=2).data.equals(
            expected.data
        )


@pytest.mark.real
def test_a_donor_that_cannot_read_the_country(smollm2: hs.Model) -> None:
    donor = hs.load("smollm2")
    with torch.no_grad():
        for block in donor.module.model.layers[22:25]:  # type: ignore[union-attr, index]
            block.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
    data = [
        ("The capital of France is", " Paris"),
        ("The capital of Italy is", " Rome"),
    ]
    result = hs.graft(smollm2, donor, data, layers=15)
    assert result.facts["model_alone"]["accuracy"] == 1
    assert result.facts["donor_alone"]["accuracy"] == 0
    accuracy = result.data["accuracy"].values
    assert (accuracy[:8] == 1).all(), "windows below block 23"
    assert (accuracy[10:] == 0).all(), "windows that hold blocks 23 to 25 are the donor"
    assert (
        result.facts["middle"]["from"] == "layer.4"
        and result.facts["late"]["from"] == "layer.14"
    )
    assert "not significant" in result.summary(), "two prompts show nothing"


def test_its_view_and_its_findings(tiny: Tiny, tmp_path: Path) -> None:
    result = hs.graft(tiny("llama"), perturbed(1), answered(tiny("llama"), PROMPTS))
    (lines,) = views_of(result)
    assert isinstance(lines, Lines) and lines.series[0].band == "95% interval"
    assert [series.name for series in lines.series[1:]] == [
        "the model alone",
        "the donor alone",
    ]
    (section,) = sections_of(result)
    assert "LlamaForCausalLM answers 100% of 6 prompts right" in section.prose
    assert "the fewest answers are right for layer.2" in result.summary()
    result.save(tmp_path / "graft.json")
    assert hs.Result.load(tmp_path / "graft.json").equals(result)
    assert {
        "middle",
        "late",
        "middle_less_late",
        "lowest",
        "prompts",
        "donor",
        "notes",
    } <= set(result.facts)


def test_the_sign_flip_test_keeps_its_level_for_any_number_of_prompts() -> None:
    generator = np.random.default_rng(1)
    for count in (2, 5, 12, 30):
        noise = generator.integers(-3, 4, (1000, count)) / 3
        assert np.mean([sign_flip_p(row) <= 0.05 for row in noise]) <= 0.065
    assert sign_flip_p(np.full(30, 0.2)) < 0.001
    assert sign_flip_p(np.zeros(8)) == 1


def test_windows_are_grouped_by_the_third_of_the_depth_that_their_centre_is_in() -> (
    None
):
    windows = [
        tuple(hs.Site(k) for k in range(start, start + 15)) for start in range(1, 17)
    ]
    right = np.ones((16, 4), dtype=bool)
    facts = graft_facts(
        windows, right, {"model": right[0], "donor": right[0]}, 30, np.arange(4)
    )
    assert (facts["middle"]["from"], facts["middle"]["to"]) == ("layer.4", "layer.27")
    assert (facts["late"]["from"], facts["late"]["to"]) == ("layer.14", "layer.30")


def test_no_sentence_claims_a_difference_in_noise_more_often_than_its_level(
    tiny: Tiny,
) -> None:
    result = hs.graft(tiny("llama"), perturbed(1), answered(tiny("llama"), PROMPTS))
    generator, windows = np.random.default_rng(0), [(hs.Site(k),) for k in range(1, 13)]
    claims = 0
    for _ in range(400):
        right = generator.random((12, 10)) < 0.6
        facts = graft_facts(
            windows,
            right,
            {"model": right[0], "donor": right[1]},
            12,
            np.arange(right.shape[1]),
        )
        told = " ".join(
            findings(
                hs.Result(
                    "graft", result.data, {**result.facts, **facts, "prompts": 10}, {}
                )
            )
        )
        claims += "they differ by" in told
        assert ("they differ by" in told) != ("not significant" in told)
    assert claims <= 0.05 * 400 + 2 * (0.05 * 0.95 * 400) ** 0.5


def test_the_interval_of_the_lowest_window_allows_for_choosing_it(tiny: Tiny) -> None:
    facts = hs.graft(
        tiny("llama"), perturbed(1), answered(tiny("llama"), PROMPTS)
    ).facts
    share = facts["lowest"]["accuracy"]
    assert (facts["lowest"]["low"], facts["lowest"]["high"]) == pytest.approx(
        wilson(share, 6, comparisons=3)
    )
