"""Patch: exact zeros where nothing differs, all of the answer where everything does,
and passes of one's own for what lies between.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.patch.cells import Effects, Plan
from hiddenscope.analyses.patch.compute import clear_sites, joint_intervals
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    ArgumentError,
    PassError,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.passes.text_encoder import token_after
from hiddenscope.results import story_of, views_of
from hiddenscope.results.dataset import to_dataset
from hiddenscope.results.pictures import Grid, Lines
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.unit.analyses.refused import check_refused

Tiny = Callable[..., hs.Model]
Measure = Callable[[dict[Any, Any]], tuple[float, float, float]]

CLEAN, CORRUPT = [7, 99, 23, 64, 31, 50], [7, 99, 45, 64, 31, 50]
CONTRAST = hs.Contrast(CLEAN, CORRUPT, answer=60, other=70)
HEADS = hs.Contrast([5, 6, 7, 8], [9, 10, 7, 11], answer=11, other=12)


def measure_of(
    model: hs.Model,
    contrast: hs.Contrast = CONTRAST,
    into: str = "corrupt",
    targets: list[list[int]] | None = None,
) -> Measure:
    """Return the effect, probability and KL of changes by whole passes, from their
    definitions.
    """
    given: dict[str, Any] = {"targets": targets, "logits": True}
    ids = {"clean": list(contrast.clean), "corrupt": list(contrast.corrupt)}
    logits: dict[str, Any] = {
        run: hs.record(model, [ids[run]], (), **given).logits[-1].double()
        for run in ids
    }

    def difference(logits: Tensor) -> float:
        return float(logits[contrast.answer] - logits[contrast.other])

    start = difference(logits[into])
    end = difference(logits["clean" if into == "corrupt" else "corrupt"])
    clean = logits["clean"].log_softmax(-1)

    def measure(changes: dict[Any, Any]) -> tuple[float, float, float]:
        made: Any = hs.edit(model, [ids[into]], changes, (), **given)
        changed = made.logits[-1].double()
        said = changed.log_softmax(-1)
        effect = (difference(changed) - start) / (end - start)
        kl = float((clean.exp() * (clean - said)).sum())
        return effect, float(said[contrast.answer].exp()), kl

    return measure


@pytest.mark.parametrize("into", ["corrupt", "clean"])
@pytest.mark.parametrize(
    ("family", "sites"), [("llama", "layer.*,*.mid"), ("gpt2", "*.attn,*.mlp,final")]
)
def test_every_cell_is_an_edit(tiny: Tiny, family: str, sites: str, into: Any) -> None:
    model = tiny(family)
    measure = measure_of(model, into=into)
    source = CLEAN if into == "corrupt" else CORRUPT
    data = hs.patch(model, CONTRAST, sites=sites, into=into).data
    states: Any = hs.record(model, [source], sites).states
    for site in map(str, data["site"].values):
        for token in range(6):
            change = {site: hs.Replace(states[site][token], tokens=token)}
            here = data.sel(site=site).isel(token=token)
            found = [float(here[name]) for name in ("effect", "probability", "kl")]
            np.testing.assert_allclose(found, measure(change), atol=1e-4)
    assert (data["effect"][:, :2] == 0).all(), "before the first token that differs"
    assert data["effect"].dims == ("site", "token")
    assert data["effect"].attrs["meaning"] == "diverging"


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


def test_the_answer_may_be_read_before_the_end(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, replace(CONTRAST, at=3)).data
    shorter = replace(CONTRAST, clean=CLEAN[:4], corrupt=CORRUPT[:4])
    expected = hs.patch(model, shorter).data
    for name in ("effect", "probability", "kl"):
        np.testing.assert_allclose(data[name][:, :4], expected[name], atol=1e-4)
    np.testing.assert_allclose(data["effect"].values[:, 4:], 0, atol=1e-4)


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


def test_windows_of_tokens(tiny: Tiny) -> None:
    model = tiny("llama")
    effect = hs.patch(model, CONTRAST, window=2).data["effect"]
    rows: Any = hs.record(model, [CLEAN], "layer.2").states
    change = {"layer.2": hs.Replace(rows["layer.2"][2:4], tokens=[2, 3])}
    expected = pytest.approx(measure_of(model)(change)[0], abs=1e-4)
    assert float(effect.sel(site="layer.2")[2]) == expected
    one = hs.patch(model, CONTRAST).data["effect"]
    np.testing.assert_allclose(effect.values[:, 5], one.values[:, 5], atol=1e-5)


def test_whole_layers_swapped(tiny: Tiny) -> None:
    model = tiny("llama")
    measure = measure_of(model)
    clean, corrupt = (
        hs.record(model, [ids], "layer.*,*.attn").states for ids in (CLEAN, CORRUPT)
    )
    data = hs.patch(model, CONTRAST, layers=1).data
    # The token at which the answer is read keeps its own state.
    others = list(range(5))
    for k in range(4):
        taken = {f"layer.{k}": hs.Replace(clean[f"layer.{k}"][:5], tokens=others)}
        held = {
            f"layer.{j}": hs.Replace(corrupt[f"layer.{j}"][:5], tokens=others)
            for j in range(k + 1, 4)
        }
        assert float(data["swap"][k]) == pytest.approx(measure(taken)[0], abs=1e-4)
        window = pytest.approx(measure(taken | held)[0], abs=1e-4)
        assert float(data["swap_window"][k]) == window
    assert float(data["swap"][3]) == pytest.approx(0, abs=1e-5)
    parts = hs.patch(model, CONTRAST, sites="*.attn", layers=2).data["swap_window"]
    sites = ("layer.2.attn", "layer.3.attn")
    expected = measure({site: hs.Replace(clean[site]) for site in sites})[0]
    assert float(parts.sel(site="layer.2.attn")) == pytest.approx(expected, abs=1e-4)
    assert np.isnan(parts.sel(site="layer.3.attn"))


@pytest.mark.parametrize("patterns", ["layer.*", "*.mlp"])
def test_attribution_is_the_derivative_in_the_direction_of_the_other_state(
    patterns: str,
) -> None:
    # Llama's norm computes in float32, whatever it is given.
    model = hs.load((tiny_model("gpt2").double(), None))
    result = hs.patch(model, CONTRAST, sites=patterns, method="both")
    sites = [str(site) for site in result.data["site"].values]
    measure = measure_of(model)
    clean, corrupt = (hs.record(model, [ids], sites).states for ids in (CLEAN, CORRUPT))
    for site in sites:
        for token in range(2, 6):
            own, other = corrupt[site][token], clean[site][token]
            above, below = (
                measure({site: hs.Replace(own + step * (other - own), tokens=token)})[0]
                for step in (1e-4, -1e-4)
            )
            slope = pytest.approx((above - below) / 2e-4, rel=1e-4, abs=1e-6)
            assert float(result.data["attribution"].sel(site=site)[token]) == slope
    x, y = (result.data[name].values for name in ("effect", "attribution"))
    changed = np.zeros((len(sites), 6), dtype=bool)
    for row, site in enumerate(sites):
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


def test_a_contrast_given_again_is_no_further_evidence(tiny: Tiny) -> None:
    model, contrasts = tiny("llama"), several(*[None] * 4)
    once = hs.patch(model, contrasts)
    often = hs.patch(model, [*contrasts, contrasts[1], *contrasts])
    assert often.data.equals(once.data)
    counts = [often.facts[name] for name in ("contrasts", "copies", "groups")]
    assert counts == [4, 5, 4]
    note = "5 pairs of prompts are copies of another and counted once."
    assert often.facts["notes"][0] == note
    alone = hs.patch(model, contrasts[:1] * 3)
    assert "effect_error" not in alone.data


def test_pairs_are_averaged_with_the_error_of_leaving_out_groups(tiny: Tiny) -> None:
    model, groups = tiny("llama"), ("a", "b", "a", "c")
    contrasts = several(*groups)
    result = hs.patch(model, contrasts, method="both")
    single = [hs.patch(model, contrast, method="both").data for contrast in contrasts]
    for name in ("effect", "probability", "kl", "attribution", "swap"):
        every = np.stack([one[name].values for one in single])
        left = np.stack(
            [every[[own != group for own in groups]].mean(0) for group in "abc"]
        )
        error = (2 / 3 * ((left - left.mean(0)) ** 2).sum(0)) ** 0.5
        found = result.data[name], result.data[f"{name}_error"]
        np.testing.assert_allclose(found[0], every.mean(0), atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(found[1], error, atol=1e-5, rtol=1e-3)
    assert "effect_error" not in single[0]
    assert result.facts["contrasts"] == 4
    assert result.facts["groups"] == 3
    assert "4 pairs of prompts in 3 groups" in result.summary()
    together = hs.patch(model, several(0, 0, 0, 0))
    assert "effect_error" not in together.data and together.facts["groups"] == 1
    note = "All pairs of prompts belong together, so there is no standard error."
    assert note in together.facts["notes"]
    # The same prompts the other way round.
    swapped = replace(contrasts[1], clean=[7, 99, 46, 64], corrupt=[7, 99, 24, 64])
    swapped = replace(swapped, group=None)
    assert hs.patch(model, [contrasts[1], swapped]).facts["groups"] == 1


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


@pytest.fixture
def bart(tiny: Tiny) -> hs.Model:
    return tiny("bart")


def test_an_encoder_decoder_in_both_stacks(bart: hs.Model) -> None:
    model, targets = bart, [[5, 9, 11]]
    contrast = replace(CONTRAST, targets=targets[0])
    result = hs.patch(model, contrast, method="both", layers=0)
    effect, stack = result.data["effect"], result.data["stack"].values
    inside = [[site.startswith(one) for one in stack] for site in effect["site"].values]
    assert (np.isfinite(effect.values) == inside).all()
    decoder, encoder = effect.sel(site="decoder.layer.3"), effect[0]
    np.testing.assert_allclose(decoder.values[-1], 1, atol=1e-4)
    np.testing.assert_allclose(encoder.values[2], 1, atol=1e-4)
    same = effect.sel(site="decoder.layer.0").values[-3:]
    assert (same == 0).all(), "the decoder's text is the same"
    rows: Any = hs.record(model, [CLEAN], "encoder.layer.2", targets=targets).states
    change = {"encoder.layer.2": hs.Replace(rows["encoder.layer.2"][2], tokens=2)}
    expected = measure_of(model, targets=targets)(change)[0]
    found = float(effect.sel(site="encoder.layer.2")[2])
    assert found == pytest.approx(expected, abs=1e-4)


def test_where_no_site_is_read_nothing_carries_an_answer(bart: hs.Model) -> None:
    contrast = replace(CONTRAST, targets=[5, 9, 11])
    result = hs.patch(bart, contrast, sites="encoder.layer.*")
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
    for given in ({"into": "up"}, {"method": "fast"}):
        check_refused(ArgumentError, "must be '", patched, llama, **given)
    for given in ({"window": 0}, {"layers": -1}):
        check_refused(StatesError, "must be an integer >= ", patched, llama, **given)
    (token,) = llama.tokenizer(" a", add_special_tokens=False).input_ids
    with pytest.raises(TextError, match="both answers are the token ' a'"):
        patched(llama, answer=" a", other=token)
    with pytest.raises(TextError, match="Give at="):
        hs.patch(tiny("bert"), CONTRAST)
    with pytest.raises(PassError, match="one stack"):
        hs.patch(llama, replace(CONTRAST, targets=[5]))
    with pytest.raises(SiteError, match="the list is empty"):
        hs.patch(llama, CONTRAST, sites=[])
    with pytest.raises(SiteError, match="attn"):
        hs.patch(tiny("mamba"), CONTRAST, sites="*.attn")
    with pytest.raises(PassError, match="no head"):
        hs.patch(tiny("gpt2", "base"), CONTRAST)


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


def in_columns(
    model: hs.Model, contrast: hs.Contrast, site: str, values: Tensor, into: str
) -> float:
    """Return the effect of values in the columns of a head or neuron, by whole passes."""
    columns = model.anatomy.columns(hs.Site.parse(site))
    layer = site[: len("layer.0")]
    whole = f"{layer}.attn.z" if "head" in site else f"{layer}.mlp.neurons"

    def put(states: Tensor) -> Tensor:
        states[..., columns] = values[..., columns]
        return states

    return measure_of(model, contrast, into)({whole: put})[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_effect_of_a_head_is_that_of_its_columns_in_a_pass_of_its_own(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    result = hs.patch(model, HEADS, sites="*.attn.head.*")
    assert result.data["effect"].dims == ("site",)
    for layer, head in ((1, 0), (2, 3)):
        whole = f"layer.{layer}.attn.z"
        z: Any = hs.record(model, [list(HEADS.clean)], whole).states
        site = f"layer.{layer}.attn.head.{head}"
        expected = in_columns(model, HEADS, site, z[whole], "corrupt")
        effect = float(result.data["effect"].sel(site=site))
        assert effect == pytest.approx(expected, abs=2e-5)


def test_ablation_puts_other_values_into_the_clean_run(tiny: Tiny) -> None:
    model, site = tiny("llama"), "layer.2.attn.head.1"
    z = model.capture([list(HEADS.clean), list(HEADS.corrupt)], "layer.2.attn.z")
    # Zeros also replace tokens that only the clean prompt has.
    uneven = hs.Contrast([5, 6, 7, 8], [5, 9], answer=11, other=12)
    for method, contrast, values in (
        ("zero", HEADS, torch.zeros(4, 64)),
        ("zero", uneven, torch.zeros(4, 64)),
        ("mean", HEADS, z.values[0].mean(0).expand(4, -1)),
        ("resample", HEADS, z.of(1).values[0]),
    ):
        result = hs.patch(model, contrast, sites="*.attn.head.*", method=method)
        assert result.facts["into"] == "clean"
        expected = in_columns(model, contrast, site, values, "clean")
        effect = float(result.data["effect"].sel(site=site))
        assert effect == pytest.approx(expected, abs=2e-5)
    other = hs.patch(model, HEADS, sites="*.attn.head.*", into="clean")
    assert result.data["effect"].equals(other.data["effect"])


def test_all_heads_patched_at_one_token_are_a_column_of_each_token(tiny: Tiny) -> None:
    model = tiny("llama")
    each = hs.patch(model, HEADS, sites="layer.2.attn.head.*", window=1).data
    assert each["effect"].dims == ("site", "token")
    # Tokens that only one prompt has are gaps; 7 is in both.
    token = int(np.flatnonzero(each["id"].values == 7)[0])
    for place in (2, -2):
        chosen = hs.patch(model, HEADS, sites="layer.2.attn.head.*", window=[place])
        found = chosen.data["effect"]
        np.testing.assert_allclose(found, each["effect"][:, token], atol=1e-6)


def test_neurons_of_a_layer_patched_one_by_one(tiny: Tiny) -> None:
    model, whole = tiny("llama"), "layer.2.mlp.neurons"
    data = hs.patch(model, HEADS, sites="layer.2.mlp.neuron.0-2").data
    assert data["number"].values.tolist() == [0, 1, 2]
    clean: Any = hs.record(model, [list(HEADS.clean)], whole).states
    site = "layer.2.mlp.neuron.1"
    expected = in_columns(model, HEADS, site, clean[whole], "corrupt")
    assert float(data["effect"].sel(site=site)) == pytest.approx(expected, abs=2e-5)


def test_contrasts_of_different_lengths_are_averaged_head_by_head(tiny: Tiny) -> None:
    model = tiny("llama")
    longer = hs.Contrast([5, 6, 7, 8, 20], [9, 10, 7, 11, 20], answer=11, other=12)
    data = hs.patch(model, [HEADS, longer], sites="*.attn.head.*").data
    one, two = (
        hs.patch(model, contrast, sites="*.attn.head.*").data["effect"].to_numpy()
        for contrast in (HEADS, longer)
    )
    np.testing.assert_allclose(data["effect"], (one + two) / 2, atol=1e-6)
    assert "low" not in data, "two are too few for an interval of all heads"


def test_attribution_of_heads_agrees_with_small_exact_effects(tiny: Tiny) -> None:
    result = hs.patch(tiny("llama"), HEADS, sites="*.attn.head.*", method="both")
    assert result.facts["agreement"]["correlation"] > 0.8


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
