"""Patch: exact zeros where nothing differs, all of the answer where everything does, and
what is told. A pass for each cell is in `tests/oracles`.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.patch.cells import Effects, Plan
from hiddenscope.analyses.patch.compute import clear_sites, joint_intervals
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    PassError,
    SiteError,
    TextError,
)
from hiddenscope.passes.text_encoder import token_after
from hiddenscope.results import story_of, views_of
from hiddenscope.results.dataset import to_dataset
from hiddenscope.results.pictures import Grid, Lines
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.unit.analyses.refused import check_refused

Tiny = Callable[..., hs.Model]
CLEAN, CORRUPT = [7, 99, 23, 64, 31, 50], [7, 99, 45, 64, 31, 50]
CONTRAST = hs.Contrast(CLEAN, CORRUPT, answer=60, other=70)


@pytest.mark.parametrize("family", ["llama", "mamba", "bert", "t5"])
def test_equal_states_have_no_effect_and_all_states_have_all_of_it(
    tiny: Tiny, family: str
) -> None:
    contrast = replace(
        CONTRAST,
        at=-1 if family == "bert" else None,
        targets=[5, 9] if family == "t5" else None,
    )
    result = hs.patch(tiny(family), contrast)
    effect = result.data["effect"]
    assert (effect.values[0][[0, 1, 3, 4, 5]] == 0).all(), "the same embeddings"
    cells = result.facts["cells"]
    assert cells["total"] == int(np.isfinite(effect).sum())
    assert 0 < cells["equal"] <= int((effect == 0).sum())
    if family != "t5":
        whole = hs.patch(tiny(family), contrast, window=6).data
        np.testing.assert_allclose(whole["effect"].values[:, 0], 1, atol=1e-4)
        np.testing.assert_allclose(whole["kl"].values[:, 0], 0, atol=1e-5)


def test_an_answer_is_one_token_after_both_texts_up_to_where_it_is_read(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    (e,) = model.tokenizer("e", add_special_tokens=False).input_ids
    texts = ("the mat of h", "the mat on h")
    # Before the space and the h, with which it would be "he".
    place = len(model.encode(texts[0]).ids[0]) - 3
    early, by_id = (
        hs.patch(model, hs.Contrast(*texts, one, " a", at=place), layers=0).data
        for one in ("e", e)
    )
    np.testing.assert_array_equal(early["effect"], by_id["effect"])
    for sides in (texts, ("the mat s", "the mat h"), ("the mat h", "the mat s")):
        for answers in (("e", " a"), (" a", "e")):
            with pytest.raises(TextError, match="merges with the text before it"):
                hs.patch(model, hs.Contrast(*sides, *answers))
    encoder: Any = SimpleNamespace(single=lambda answer, name, before: len(before))
    assert token_after(encoder, "x", ["ab", None, "cd"]) == 2
    assert token_after(encoder, "x", [None]) == 0
    with pytest.raises(TextError, match="2 after 'ab' and it is token 3 after 'abc'"):
        token_after(encoder, "x", ["ab", "abc"])


def test_the_agreement_is_that_of_cells_whose_states_differ(tiny: Tiny) -> None:
    result = hs.patch(tiny("gpt2"), CONTRAST, method="both")
    x, y = (result.data[name].values for name in ("effect", "attribution"))
    changed = np.zeros(x.shape, dtype=bool)
    for row, site in enumerate(map(str, result.data["site"].values)):
        changed[row, 2:] = [True, *[site != "layer.0"] * 3]
    agreement = result.facts["agreement"]
    assert agreement["cells"] == changed.sum()
    expected = np.corrcoef(x[changed], y[changed])[0, 1]
    assert agreement["correlation"] == pytest.approx(expected, abs=1e-3)
    error = np.abs(x[changed] - y[changed]).mean()
    assert agreement["mean_absolute_error"] == pytest.approx(error, rel=1e-4)


def test_attribution_by_itself_costs_no_sweep(tiny: Tiny) -> None:
    model = tiny("gpt2")
    result, both = (
        hs.patch(model, CONTRAST, method=method) for method in ("attribution", "both")
    )
    assert set(result.data.data_vars) == {"attribution"}
    assert "cost" not in result.facts
    np.testing.assert_array_equal(result.data["attribution"], both.data["attribution"])
    assert all(weight.grad is None for weight in model.module.parameters())


TRIPLES = ((23, 45, 60), (24, 46, 61), (25, 47, 62), (26, 48, 63))


def several(*groups: object) -> list[hs.Contrast]:
    triples = zip(TRIPLES, groups, strict=True)
    return [
        hs.Contrast([7, 99, a, 64], [7, 99, b, 64], answer, other=70, group=group)  # type: ignore[arg-type]
        for (a, b, answer), group in triples
    ]


def test_how_many_pairs_and_groups_there_are_is_told(tiny: Tiny) -> None:
    model = tiny("llama")
    result = hs.patch(model, several("a", "b", "a", "c"))
    assert "4 pairs of prompts in 3 groups" in result.summary()
    together = hs.patch(model, several(0, 0, 0, 0))
    assert "effect_error" not in together.data and together.facts["groups"] == 1
    note = "All pairs of prompts belong together, so there is no standard error."
    assert note in together.facts["notes"]


def test_texts_of_two_lengths_are_aligned(tiny: Tiny) -> None:
    longer = replace(CONTRAST, corrupt=[7, 99, 45, 46, 64, 31, 50])
    result = hs.patch(tiny("llama"), longer)
    positions, others = (
        result.data[name].values.tolist() for name in ("position", "other_position")
    )
    assert (positions, others) == ([0, 1, -1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6])
    effect = result.data["effect"].values
    assert (np.isnan(effect) == (np.arange(7) == 2)).all()
    assert any("different lengths" in note for note in result.facts["notes"])
    np.testing.assert_allclose(effect[-1], [0, 0, np.nan, 0, 0, 0, 1], atol=1e-4)
    grid = views_of(result)[0]
    assert isinstance(grid, Grid) and None in grid.tokens and "Hatched" in grid.note
    # The longest run that both have is two tokens, one place apart.
    equal = replace(CONTRAST, clean=[5, 6, 7, 7], corrupt=[5, 7, 7, 7])
    data = hs.patch(tiny("llama"), equal).data
    assert data["position"].values.tolist() == [0, 1, 2, 3]
    assert data["other_position"].values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("corrupt", [[*CLEAN[:2], *CLEAN[3:]], CLEAN[:-1]])
@pytest.mark.parametrize("window", [1, 2])
def test_a_token_that_one_text_has_is_no_token_that_differs(
    tiny: Tiny, corrupt: list[int], window: int
) -> None:
    result = hs.patch(tiny("llama"), replace(CONTRAST, corrupt=corrupt), window=window)
    assert result.facts["differing_token"] is None
    answer = result.facts["answer_token"]
    assert (answer is not None) == (corrupt[-1] == CLEAN[-1])
    assert answer is None or np.isfinite(answer["largest"])


def test_the_notes_of_all_pairs_are_told(tiny: Tiny) -> None:
    contrasts = [
        hs.Contrast("the mat", "the hat", *answers)
        for answers in ((30, 31), ("a", "t"))
    ]
    notes = hs.patch(tiny("llama"), contrasts, method="attribution").facts["notes"]
    notes = [note for note in notes if "leading space" in note]
    assert ["'a' has no leading space" in note for note in notes] == [True, False]
    assert ["'t' has no leading space" in note for note in notes] == [False, True]


def test_answers_that_differ_in_a_space_are_told_apart(tiny: Tiny) -> None:
    contrast = hs.Contrast("the mat", "the hat", "a", " a")
    told = hs.patch(tiny("llama"), contrast, method="attribution").summary()
    assert "the logit of “a” is" in told
    assert "that of “ a”" in told
    told = hs.contributions(tiny("llama"), "the mat", "a", other=" a").summary()
    assert "the logit of “a” over “ a”" in told


def test_where_no_site_is_read_nothing_carries_an_answer(tiny: Tiny) -> None:
    contrast = replace(CONTRAST, targets=[5, 9, 11])
    result = hs.patch(tiny("bart"), contrast, sites="encoder.layer.*")
    assert result.facts["answer_token"] is None
    assert result.facts["differing_token"]["largest"] > 0


def test_a_model_that_fills_masks_is_read_at_the_mask() -> None:
    tokenizer = tiny_tokenizer(cls=True)
    tokenizer.mask_token = "<unk>"
    model = hs.load((tiny_model("bert"), tokenizer))
    masked = hs.Contrast([4, 20, 3, 30, 5], [4, 21, 3, 30, 5], "a", "b")
    result = hs.patch(model, masked)
    assert result.facts["answer_token"]["token"] == model.text_encoder.string(3)
    np.testing.assert_allclose(result.data["effect"].values[-1, 2], 1, atol=1e-4)
    with pytest.raises(TextError, match="Put one <unk>"):
        hs.patch(model, hs.Contrast([4, 20, 30, 5], [4, 21, 30, 5], "a", "b"))


def test_what_was_not_saved_is_told(tiny: Tiny) -> None:
    result = hs.patch(tiny("llama"), CONTRAST)
    assert result.facts["notes"] == []
    cost = result.facts["cost"]
    assert cost["cells"] == 1 + 3 * 4
    assert cost["tokens"] < 30 * 6
    (note,) = hs.patch(tiny("mamba"), CONTRAST).facts["notes"]
    assert "eys and values were computed anew" in note
    note = hs.patch(tiny("t5"), replace(CONTRAST, targets=[5, 9])).facts["notes"][0]
    assert "very block was run" in note


CATS = {"clean": "the mat and a", "corrupt": "the hat and a"}
FIELDS = {field.name for field in fields(hs.Contrast)}
# What is said, and the changed fields of the contrast or options of `patch`.
REFUSED: dict[str, dict[str, Any]] = {
    "5 tokens: ' ' 'P'": {**CATS, "answer": " Paris", "other": " a"},
    "'nd': it merges with the text before it": {**CATS, "answer": "nd", "other": " a"},
    "both answers are 60": {"other": 60},
    "both prompts are the same": {"corrupt": CLEAN},
    "one prompt is a string and the other token ids": {"corrupt": "the hat"},
    "clean must be one prompt: got list": {"clean": [CLEAN]},
    "has one token": {"clean": [7]},
    "are 0 to 127": {"answer": 10**6},
    "answer must be one token: got float": {"answer": 1.5},
    "at must be a position of 6 tokens: got 6": {"at": 6},
    "at must be a position: got 'end'": {"at": "end"},
    "group must name what belongs together": {"group": [1]},
    "the clean prompt has 6 tokens": {"window": [6]},
    "No token at position -7": {"window": [-7]},
    "got True among the positions": {"window": [True]},
    "the corrupt prompt has no token there": {"corrupt": CLEAN[1:], "window": [0]},
}
SHORTER = replace(CONTRAST, clean=CLEAN[1:], corrupt=CORRUPT[1:])
EARLY, LATE = (
    replace(CONTRAST, corrupt=[*CLEAN[:place], 45, *CLEAN[place:]]) for place in (1, 3)
)
OTHER_FORMS: dict[str, Any] = {
    "contrast 0 has 6 columns of tokens, contrast 1 has 5": [CONTRAST, SHORTER],
    "contrast 0 is read at position 5": [CONTRAST, replace(CONTRAST, at=3)],
    "contrast 1 has its gaps at other tokens than contrast 0": [EARLY, LATE],
    "hs.Contrast(clean, corrupt, answer, other)": ("the mat", "the hat"),
    "contrasts must be a Contrast or a list of them": [],
    "1 of 2 contrasts have targets": [replace(CONTRAST, targets=[5]), CONTRAST],
}


def patched(model: hs.Model, **given: Any) -> hs.Result:
    """Patch the contrast, with some of its fields changed and some options given."""
    changes = {name: value for name, value in given.items() if name in FIELDS}
    options = {name: value for name, value in given.items() if name not in FIELDS}
    return hs.patch(model, replace(CONTRAST, **changes), **options)


def test_what_cannot_be_patched_is_refused(tiny: Tiny) -> None:
    llama = tiny("llama")
    for words, given in REFUSED.items():
        check_refused(TextError, words, patched, llama, **given)
    for words, contrasts in OTHER_FORMS.items():
        check_refused(TextError, words, hs.patch, llama, contrasts)
    (token,) = llama.tokenizer(" a", add_special_tokens=False).input_ids
    with pytest.raises(TextError, match="both answers are the token ' a'"):
        patched(llama, answer=" a", other=token)
    with pytest.raises(TextError, match="Give at="):
        hs.patch(tiny("bert"), CONTRAST)
    with pytest.raises(PassError, match="one stack"):
        hs.patch(llama, replace(CONTRAST, targets=[5]))
    with pytest.raises(SiteError, match="attn"):
        hs.patch(tiny("mamba"), CONTRAST, sites="*.attn")


def test_a_difference_within_rounding_is_no_difference() -> None:
    module: Any = tiny_model("llama").bfloat16()
    model = hs.load((module, None))
    clean, corrupt = (
        hs.record(model, [ids], (), logits=True).logits[-1].double()  # type: ignore[index]
        for ids in (CLEAN, CORRUPT)
    )
    apart = clean - corrupt
    spans = (apart[60] - apart).abs()
    most = replace(CONTRAST, other=int(spans.argmax()))
    assert np.isfinite(hs.patch(model, most, layers=0).data["effect"]).all()
    least = int(torch.where(spans > 1e-3, spans, torch.inf).argmin())
    with pytest.raises(TextError, match=r"rounding alone may make .* or use float32"):
        hs.patch(model, replace(CONTRAST, other=least))
    module.lm_head.weight.data[70] = module.lm_head.weight.data[60]
    with pytest.raises(TextError, match="both runs prefer"):
        hs.patch(model, CONTRAST)


def test_all_prompts_are_encoded_in_one_call(counting: Any) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    prompts = ["the mat is", "the hat is", "the mat it", "the hat it"]
    contrasts = [
        hs.Contrast(*prompts[:2], " a", " c"),
        hs.Contrast(*prompts[2:], " a", " c"),
    ]
    hs.patch(model, contrasts)  # whatever is tried on the model has been tried
    counted = counting(model)
    hs.patch(model, contrasts, method="both")
    assert counted.calls == [prompts]


def test_its_pictures_and_its_story(tiny: Tiny) -> None:
    model = tiny("llama")
    result = hs.patch(model, CONTRAST, method="both")
    grid, lines = views_of(result)
    assert isinstance(grid, Grid) and isinstance(lines, Lines)
    names = [measure.name for measure in grid.measures]
    assert names[:2] == ["effect", "effect estimated by attribution"]
    assert grid.measures[0].meaning == "diverging"
    string = model.text_encoder.string
    assert (grid.tokens[2], grid.second[2]) == (string(CLEAN[2]), string(CORRUPT[2]))
    assert [series.style for series in lines.series] == ["line", "dash"]
    first, layers = story_of(result)
    finding = "restores at least half of the logit difference at layer.0"
    assert finding in first.prose
    assert "The hidden state of the clean run" in first.reading
    summary = result.summary().splitlines()
    assert finding in summary[1], "the finding comes first"
    assert any("an effect of exactly 0" in line for line in summary)
    assert set(result.facts["layer_windows"]) == {"layers", "largest"}
    # What a branch adds is exchanged at all tokens.
    parts = hs.patch(model, CONTRAST, sites="*.mlp")
    spared = "except the token at which the answer is read"
    assert spared in result.summary() and spared not in parts.summary()
    assert "keeps its own state" in layers.reading
    assert "keeps its own state" not in story_of(parts)[1].reading
    assert "whether it holds for others was not tested" in result.summary()
    other = replace(CONTRAST, corrupt=[7, 99, 46, 64, 31, 50])
    averages = "2 pairs of prompts; differences between sites were not tested"
    assert averages in hs.patch(model, [CONTRAST, other]).summary()


def test_where_a_token_carries_the_answer_is_told_as_ranges_and_nothing_else(
    tiny: Tiny,
) -> None:
    result = hs.patch(tiny("llama"), CONTRAST)
    sites = result.data["site"].values
    for name, column in (("differing_token", 2), ("answer_token", 5)):
        effect = result.data["effect"].values[:, column]
        half = sites[effect >= 0.5].tolist()
        carrier = result.facts[name]
        assert carrier["half_at"] == half
        assert (carrier["from"], carrier["to"]) == (half[0], half[-1])
        assert carrier["largest"] == pytest.approx(effect.max())
    for rows, words in (
        ([0, 1, 2, 3], "at layer.0 to layer.3 ("),
        ([0, 1, 3], "at layer.0 to layer.1 and layer.3 ("),
        ([], "No single state restores half of the logit difference"),
    ):
        carrier = {
            **result.facts["differing_token"],
            "half_at": sites[rows].tolist(),
        }
        facts = {**result.facts, "answer_token": None, "differing_token": carrier}
        told = hs.Result("patch", result.data, facts, result.source).summary()
        assert words in told.splitlines()[1]


def test_the_command_with_every_option(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr("hiddenscope.load", lambda *given, **options: model)
    given = ["patch", "The cat is", "The hat is", "--answer", " a", "--other", " c"]
    options: dict[str, Any] = {"sites": "*.mlp", "into": "clean", "method": "both"}
    options |= {"window": 2, "layers": 0}
    out = tmp_path / "patch.json"
    words = ["--at", "-2", "--out", str(out), "--quiet"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    done = CliRunner().invoke(app, [*given, *words])
    assert done.exit_code == 0, done.output
    contrast = hs.Contrast("The cat is", "The hat is", " a", " c", at=-2)
    assert hs.Result.load(out).equals(hs.patch(model, contrast, **options))
    done = CliRunner().invoke(app, [*given, "--window", "0"])
    assert done.exit_code == 2
    assert "--window must be an integer >= 1: got 0" in done.stderr
    one_prompt = [*given[:2], *given[3:]]
    assert CliRunner().invoke(app, one_prompt).exit_code == 2


# Heads, neurons and ablation.


def test_intervals_hold_skewed_effects_of_all_heads_and_show_what_is_planted() -> None:
    generator = np.random.default_rng(0)
    sites = tuple(hs.Site(1, f"attn.head.{head}") for head in range(40))
    plan = Plan(sites, 1, 0, "corrupt", exact=True, attribution=False, together=True)
    patched = np.ones(40, dtype=bool)

    def clear(values: np.ndarray) -> list[str]:
        effects = [Effects({"effect": row}, {}, patched) for row in values]
        intervals = joint_intervals(effects, plan, np.arange(len(values)))
        data = to_dataset(
            {"effect": ("site", values.mean(0), {}), **intervals},
            {"site": [*map(str, sites)]},
        )
        return [effect.site for effect in clear_sites(data) or ()]

    noise = np.exp(generator.normal(size=(15, 8, 40)) / 2) - np.exp(1 / 8)
    # Student's intervals with Bonferroni's correction miss it in 5 of these 15.
    assert sum(bool(clear(values)) for values in noise) <= 1
    noise[0, :, [7, 9]] += [[20], [-30]]
    # An effect in a few contrasts alone has no interval, and takes none from others.
    noise[0, :, 3] = [1, 0, 0, 2, 0, 0, 3, 0]
    assert clear(noise[0]) == ["layer.1.attn.head.9", "layer.1.attn.head.7"]
    assert clear(noise[0, :4]) == []
