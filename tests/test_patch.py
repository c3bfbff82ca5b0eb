"""Patch: exact zeros where nothing differs, all of the answer where everything does, and loops of one's own."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.patch.pairs import single
from hiddenscope.cli import app
from hiddenscope.errors import Error, ModuleError, PassError, SiteError, TextError
from hiddenscope.linear.intervals import wilson
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Grid, Lines

Tiny = Callable[..., hs.Model]
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # on a CPU without bfloat16

CLEAN, CORRUPT = [7, 99, 23, 64, 31, 50], [7, 99, 45, 64, 31, 50]
GIVEN: dict[str, Any] = {"clean": [CLEAN], "corrupt": [CORRUPT], "answer": 60, "other": 70}


def loop(module: Any, base: list[int], source: list[int], layer: int, token: int) -> Tensor:
    """One cell by hand: the last token's logits with one state from the other text, by a hook of our own."""
    blocks, kept = module.model.layers, {}

    def keep(part: nn.Module, args: Any, output: Any) -> None:
        kept["state"] = output[0] if isinstance(output, tuple) else output

    def put(part: nn.Module, args: Any, output: Any) -> Any:
        state = (output[0] if isinstance(output, tuple) else output).clone()
        state[0, token] = kept["state"][0, token]
        return (state, *output[1:]) if isinstance(output, tuple) else state

    with torch.no_grad():
        for hook, ids in ((keep, source), (put, base)):
            handle = blocks[layer - 1].register_forward_hook(hook)
            logits: Tensor = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            handle.remove()
    return logits


def measures(logits: Tensor, clean: Tensor, corrupt: Tensor) -> tuple[float, float, float]:
    """Effect, probability and KL from their definitions."""
    d = [float(x[60] - x[70]) for x in (logits, clean, corrupt)]
    p, q = clean.double().softmax(-1), logits.double().softmax(-1)
    return (d[0] - d[2]) / (d[1] - d[2]), float(q[60]), float((p * (p / q).log()).sum())


def test_every_cell_is_that_of_a_loop_of_ones_own(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, **GIVEN).data
    with torch.no_grad():
        clean, corrupt = (model.module(torch.tensor([ids])).logits[0, -1] for ids in (CLEAN, CORRUPT))
    for layer in (1, 2, 3):
        for token in range(6):
            expected = measures(loop(model.module, CORRUPT, CLEAN, layer, token), clean, corrupt)
            here = data.sel(site=f"layer.{layer}").isel(token=token)
            found = [float(here[name]) for name in ("effect", "probability", "kl")]
            np.testing.assert_allclose(found, expected, atol=1e-4)
    assert data["effect"].dims == ("site", "token")
    assert data["effect"].attrs["meaning"] == "diverging"


@pytest.mark.parametrize("what", ["layer", "attn", "mlp"])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_every_cell_is_an_edit(tiny: Tiny, what: Any, direction: Any) -> None:
    model = tiny("gpt2")
    data = hs.patch(model, **GIVEN, what=what, direction=direction).data
    base, source = (CORRUPT, CLEAN) if direction == "denoise" else (CLEAN, CORRUPT)
    full = {name: hs.record(model, [ids], [*map(str, data["site"].values)], logits=True)
            for name, ids in (("base", base), ("source", source))}  # fmt: skip

    def share(logits: Any) -> float:
        d = [float(x[-1, 60] - x[-1, 70]) for x in (logits, full["base"].logits, full["source"].logits)]  # type: ignore[index]
        return (d[0] - d[1]) / (d[2] - d[1])

    for site in map(str, data["site"].values):
        for token in range(6):
            row = full["source"].states[site][token]
            edited = hs.edit(model, [base], {site: hs.Replace(row, tokens=token)}, "layer.0", logits=True)
            assert float(data["effect"].sel(site=site)[token]) == pytest.approx(share(edited.logits), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "bert", "t5"])
def test_states_that_are_the_same_have_no_effect_at_all(tiny: Tiny, family: str) -> None:
    model, extra = tiny(family), {}
    if family == "bert":
        extra = {"position": -1}
    if family == "t5":
        extra = {"targets": [[5, 9]]}
    result = hs.patch(model, **GIVEN, **extra)
    effect = result.data["effect"]
    causal = family != "bert"
    zero = effect.isel(token=slice(0, 2)) if causal and family != "t5" else effect.sel(site=effect["site"][0])
    if causal and family != "t5":
        assert (zero.values == 0).all(), "tokens before the first that differs"
        assert (effect[0].values[3:] == 0).all(), "the embeddings of the others"
    else:
        assert (zero.values[[0, 1, 3, 4, 5]] == 0).all()
    assert "cells: both runs have one state there" in result.facts["exactly zero"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "bert"])
def test_every_token_at_once_gives_the_other_run(tiny: Tiny, family: str) -> None:
    extra = {"position": -1} if family == "bert" else {}
    data = hs.patch(tiny(family), **GIVEN, window=6, **extra).data
    np.testing.assert_allclose(data["effect"].values[:, 0], 1, atol=1e-4)
    np.testing.assert_allclose(data["kl"].values[:, 0], 0, atol=1e-5)


def test_at_the_ends_noise_and_denoise_agree(tiny: Tiny) -> None:
    model = tiny("llama")
    there, back = (hs.patch(model, **GIVEN, direction=way).data["effect"].values for way in ("denoise", "noise"))  # type: ignore[arg-type]
    for effect in (there, back):
        np.testing.assert_allclose(effect[0], [0, 0, 1, 0, 0, 0], atol=1e-4)  # the one embedding that differs
        np.testing.assert_allclose(effect[-1], [0, 0, 0, 0, 0, 1], atol=1e-4)  # the token that is read
    assert not np.allclose(there, back, atol=1e-2), "in between they are two questions"


def test_the_answer_may_be_read_before_the_end(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, **GIVEN, position=3).data
    cut = {**GIVEN, "clean": [CLEAN[:4]], "corrupt": [CORRUPT[:4]]}
    expected = hs.patch(model, **cut).data
    for name in ("effect", "probability", "kl"):
        np.testing.assert_allclose(data[name].values[:, :4], expected[name].values, atol=1e-4)
    np.testing.assert_allclose(data["effect"].values[:, 4:], 0, atol=1e-4)


@pytest.mark.parametrize("texts", [("the mat h", "the cat h"), ("the mat of h", "the mat on h")])
def test_an_answer_is_one_token_after_the_text_up_to_where_it_is_read(tiny: Tiny, texts: tuple[str, str]) -> None:
    model = tiny("llama")
    given: dict[str, Any] = {"clean": texts[0], "corrupt": texts[1], "other": " a", "layers": 0}
    e = model.tokenizer("e", add_special_tokens=False).input_ids
    place = len(model.encoder.encode(texts[0]).ids[0]) - 3  # before the space and the h, with which it would be "he"
    early = hs.patch(model, **given, answer="e", position=place).data
    np.testing.assert_array_equal(early["effect"], hs.patch(model, **given, answer=e[0], position=place).data["effect"])
    with pytest.raises(TextError, match="grows together with the text before it"):
        hs.patch(model, **given, answer="e")


@pytest.mark.parametrize("sides", [("the mat s", "the mat h"), ("the mat h", "the mat s")])
def test_an_answer_is_the_same_token_after_both_texts(tiny: Tiny, sides: tuple[str, str]) -> None:
    for answers in ({"answer": "e", "other": " a"}, {"answer": " a", "other": "e"}):
        with pytest.raises(TextError, match="grows together"):
            hs.patch(tiny("llama"), clean=sides[0], corrupt=sides[1], **answers)
    encoder = SimpleNamespace(one=lambda answer, what, before: len(before))
    model: Any = SimpleNamespace(encoder=encoder)
    assert single(model, "x", ["ab", None, "cd"]) == 2
    assert single(model, "x", [None]) == 0
    with pytest.raises(TextError, match="token 2 after 'ab' and 3 after 'abc'"):
        single(model, "x", ["ab", "abc"])


def test_windows_of_tokens(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, **GIVEN, window=2).data
    rows = hs.record(model, [CLEAN], "layer.2", logits=True)
    base = hs.record(model, [CORRUPT], "layer.2", logits=True)
    edited = hs.edit(
        model, [CORRUPT], {"layer.2": hs.Replace(rows.states["layer.2"][2:4], tokens=[2, 3])}, "layer.0", logits=True
    )
    d = [float(x[-1, 60] - x[-1, 70]) for x in (edited.logits, base.logits, rows.logits)]  # type: ignore[index]
    assert float(data["effect"].sel(site="layer.2")[2]) == pytest.approx((d[0] - d[1]) / (d[2] - d[1]), abs=1e-4)
    one = hs.patch(model, **GIVEN).data["effect"]
    np.testing.assert_allclose(data["effect"].values[:, 5], one.values[:, 5], atol=1e-5)


def test_whole_layers_swapped(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, **GIVEN, layers=1).data
    states = {name: hs.record(model, [ids], logits=True) for name, ids in (("clean", CLEAN), ("corrupt", CORRUPT))}
    d = {name: float(made.logits[-1, 60] - made.logits[-1, 70]) for name, made in states.items()}  # type: ignore[index]

    def share(changes: dict[Any, Any]) -> float:
        logits = hs.edit(model, [CORRUPT], changes, "layer.0", logits=True).logits
        return (float(logits[-1, 60] - logits[-1, 70]) - d["corrupt"]) / (d["clean"] - d["corrupt"])  # type: ignore[index]

    others = list(range(5))
    for k in range(4):
        taken = {f"layer.{k}": hs.Replace(states["clean"].states[f"layer.{k}"][:5], tokens=others)}
        held = {f"layer.{j}": hs.Replace(states["corrupt"].states[f"layer.{j}"][:5], tokens=others)
                for j in range(k + 1, 4)}  # fmt: skip
        assert float(data["swap"][k]) == pytest.approx(share(taken), abs=1e-4)
        assert float(data["swap_window"][k]) == pytest.approx(share(taken | held), abs=1e-4)
    assert float(data["swap"][3]) == pytest.approx(0, abs=1e-5)
    parts = hs.patch(model, **GIVEN, what="attn", layers=2).data
    taken = {
        site: hs.Replace(hs.record(model, [CLEAN], site).states[site]) for site in ("layer.2.attn", "layer.3.attn")
    }
    assert float(parts["swap_window"].sel(site="layer.2.attn")) == pytest.approx(share(taken), abs=1e-4)
    assert np.isnan(parts["swap_window"].sel(site="layer.3.attn"))


@pytest.mark.parametrize("what", ["layer", "mlp"])
def test_attribution_is_the_derivative_in_the_direction_of_the_other_state(what: Any) -> None:
    model = hs.load((tiny_model("gpt2").double(), None))  # llama's norm computes in float32, whatever it is given
    result = hs.patch(model, **GIVEN, what=what, method="both")
    sites = [str(site) for site in result.data["site"].values]
    clean, corrupt = (hs.record(model, [ids], sites, logits=True) for ids in (CLEAN, CORRUPT))
    d = [float(made.logits[-1, 60] - made.logits[-1, 70]) for made in (clean, corrupt)]  # type: ignore[index]
    for site in sites:
        for token in range(2, 6):
            own, other = (made.states[site][token] for made in (corrupt, clean))
            sides = []
            for step in (1e-4, -1e-4):
                change = {site: hs.Replace(own + step * (other - own), tokens=token)}
                logits = hs.edit(model, [CORRUPT], change, "layer.0", logits=True).logits  # type: ignore[arg-type]
                sides.append(float(logits[-1, 60] - logits[-1, 70]))  # type: ignore[index]
            slope = (sides[0] - sides[1]) / 2e-4 / (d[0] - d[1])
            assert float(result.data["attribution"].sel(site=site)[token]) == pytest.approx(slope, rel=1e-4, abs=1e-6)
    x, y = (result.data[name].values for name in ("effect", "attribution"))
    changed = np.array([[(token > 2 and site != "layer.0") or token == 2 for token in range(6)] for site in sites])
    assert result.facts["exact against estimate"]["cells"] == changed.sum()
    expected = np.corrcoef(x[changed], y[changed])[0, 1]
    assert result.facts["exact against estimate"]["correlation"] == pytest.approx(expected, abs=1e-3)


def test_attribution_by_itself_costs_no_sweep(tiny: Tiny) -> None:
    model = tiny("gpt2")
    result, both = (hs.patch(model, **GIVEN, method=method) for method in ("attribution", "both"))  # type: ignore[arg-type]
    assert set(result.data.data_vars) == {"attribution"}
    assert "cost" not in result.facts
    np.testing.assert_array_equal(result.data["attribution"], both.data["attribution"])
    assert all(weight.grad is None for weight in model.module.parameters())


def test_pairs_are_averaged_with_standard_errors(tiny: Tiny) -> None:
    model = tiny("llama")
    others = [[[7, 99, one, 64, 31, 50] for one in side] for side in ((23, 24, 25), (45, 46, 47))]
    result = hs.patch(model, clean=others[0], corrupt=others[1], answer=[60, 61, 62], other=70, method="both")
    single = [hs.patch(model, clean=[a], corrupt=[b], answer=answer, other=70, method="both").data
              for a, b, answer in zip(*others, (60, 61, 62), strict=True)]  # fmt: skip
    for name in ("effect", "probability", "kl", "attribution", "swap"):
        every = np.stack([one[name].values for one in single])
        np.testing.assert_allclose(result.data[name], every.mean(0), atol=1e-5, rtol=1e-4)
        expected = every.std(0, ddof=1) / 3**0.5
        np.testing.assert_allclose(result.data[f"{name}_error"], expected, atol=1e-5, rtol=1e-3)
    assert result.facts["pairs"] == 3
    assert "effect_error" not in single[0]


def test_texts_of_two_lengths_are_aligned(tiny: Tiny) -> None:
    model = tiny("llama")
    longer = [7, 99, 45, 46, 64, 31, 50]
    result = hs.patch(model, clean=[CLEAN], corrupt=[longer], answer=60, other=70)
    columns = [
        *zip(result.data["position"].values.tolist(), result.data["other_position"].values.tolist(), strict=True)
    ]
    assert columns == [(0, 0), (1, 1), (-1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    effect = result.data["effect"].values
    assert (np.isnan(effect) == [[False, False, True, False, False, False, False]]).all()
    assert any("different lengths" in note for note in result.facts["notes"])
    np.testing.assert_allclose(effect[-1], [0, 0, np.nan, 0, 0, 0, 1], atol=1e-4)


@pytest.mark.parametrize("corrupt", [[*CLEAN[:2], *CLEAN[3:]], CLEAN[:-1]])
@pytest.mark.parametrize("window", [1, 2])
def test_a_token_that_one_text_has_is_no_token_that_differs(tiny: Tiny, corrupt: list[int], window: int) -> None:
    result = hs.patch(tiny("llama"), clean=[CLEAN], corrupt=[corrupt], answer=60, other=70, window=window)
    assert "tokens that differ" not in result.facts
    assert ("token of the answer" in result.facts) == (corrupt[-1] == CLEAN[-1])
    told = [fact["largest"] for name, fact in result.facts.items() if name == "token of the answer"]
    assert np.isfinite(told).all()


def test_the_notes_of_all_pairs_are_told(tiny: Tiny) -> None:
    given: dict[str, Any] = {"clean": ["the mat", "the mat"], "corrupt": ["the hat", "the hat"]}
    notes = hs.patch(tiny("llama"), **given, answer=[30, "a"], other=[31, "t"], method="attribution").facts["notes"]
    assert ["'a' was asked for" in note for note in notes] == [True, False]
    assert ["'t' was asked for" in note for note in notes] == [False, True]


def test_an_encoder_decoder_in_both_stacks(tiny: Tiny) -> None:
    model = tiny("bart")
    result = hs.patch(model, **GIVEN, targets=[[5, 9, 11]], method="both")
    effect, stack = result.data["effect"], result.data["stack"].values
    inside = np.array([[site.startswith(one) for one in stack] for site in effect["site"].values])
    assert (np.isfinite(effect.values) == inside).all()
    np.testing.assert_allclose(effect.sel(site="decoder.layer.3").values[-1], 1, atol=1e-4)
    np.testing.assert_allclose(effect.sel(site="encoder.layer.0").values[2], 1, atol=1e-4)
    assert (effect.sel(site="decoder.layer.0").values[-3:] == 0).all(), "the decoder's text is the same"
    rows = hs.record(model, [CLEAN], targets=[[5, 9, 11]]).states["encoder.layer.2"]
    change = {"encoder.layer.2": hs.Replace(rows[2], tokens=2)}
    runs = [hs.record(model, [ids], targets=[[5, 9, 11]], logits=True).logits for ids in (CORRUPT, CLEAN)]
    edited = hs.edit(model, [CORRUPT], change, targets=[[5, 9, 11]], logits=True).logits  # type: ignore[arg-type]
    d = [float(x[-1, 60] - x[-1, 70]) for x in (edited, *runs)]  # type: ignore[index]
    found = float(effect.sel(site="encoder.layer.2")[2])
    assert found == pytest.approx((d[0] - d[1]) / (d[2] - d[1]), abs=1e-4)


def test_a_model_that_fills_masks_is_read_at_the_mask() -> None:
    tokenizer = tiny_tokenizer(cls=True)
    tokenizer.mask_token = "<unk>"
    model = hs.load((tiny_model("bert"), tokenizer))
    result = hs.patch(model, clean=[[4, 20, 3, 30, 5]], corrupt=[[4, 21, 3, 30, 5]], answer="a", other="b")
    assert result.facts["token of the answer"]["token"] == model.encoder.string(3)
    np.testing.assert_allclose(result.data["effect"].values[-1, 2], 1, atol=1e-4)
    with pytest.raises(TextError, match="Put one <unk>"):
        hs.patch(model, clean=[[4, 20, 30, 5]], corrupt=[[4, 21, 30, 5]], answer="a", other="b")


def test_what_was_not_saved_is_told(tiny: Tiny) -> None:
    assert "notes" not in hs.patch(hs.load((tiny_model("llama"), None)), **GIVEN).facts
    assert "keys and values were computed anew" in hs.patch(tiny("mamba"), **GIVEN).facts["notes"][0]
    assert "every block was run" in hs.patch(tiny("t5"), **GIVEN, targets=[[5, 9]]).facts["notes"][0]
    cost = hs.patch(tiny("llama"), **GIVEN).facts["cost"]
    assert cost["cells computed"] == 1 + 3 * 4
    assert cost["tokens through the model"] < 30 * 6


CATS = {"clean": "the mat and a", "corrupt": "the hat and a"}
FORMS: dict[str, Any] = {"clean": [CLEAN, CLEAN[1:]], "corrupt": [CORRUPT, CORRUPT[1:]]}
BAD: dict[str, tuple[str, dict[str, Any], type[Error], str]] = {
    "pieces": ("llama", {**CATS, "answer": " Paris", "other": " a"}, TextError, "5 tokens: ' ' 'P'"),
    "space": ("llama", {**CATS, "answer": "nd", "other": " a"}, TextError, "Did you mean ' nd'?"),
    "equal": ("llama", {**GIVEN, "other": 60}, TextError, "both are"),
    "same texts": ("llama", {**GIVEN, "corrupt": [CLEAN]}, TextError, "they are the same"),
    "one token": ("llama", {**GIVEN, "clean": [[7]]}, TextError, "it has one token"),
    "counts": ("llama", {**GIVEN, "clean": [CLEAN, CLEAN]}, TextError, "2 clean and 1 corrupt"),
    "answers": ("llama", {**GIVEN, "answer": [60, 61]}, TextError, "2 for 1 pairs"),
    "id": ("llama", {**GIVEN, "answer": 10**6}, TextError, "are 0 to 127"),
    "kind": ("llama", {**GIVEN, "answer": 1.5}, TextError, "it is float"),
    "missing": ("llama", {"clean": [CLEAN]}, TextError, "no corrupt and no answer"),
    "what": ("llama", {**GIVEN, "what": "cross"}, TextError, "'attn'"),
    "direction": ("llama", {**GIVEN, "direction": "up"}, TextError, "'noise'"),
    "method": ("llama", {**GIVEN, "method": "fast"}, TextError, "'both'"),
    "window": ("llama", {**GIVEN, "window": 0}, TextError, "window=0"),
    "layers": ("llama", {**GIVEN, "layers": -1}, TextError, "layers=-1"),
    "position": ("llama", {**GIVEN, "position": 6}, TextError, "6 tokens"),
    "form": ("llama", {**GIVEN, **FORMS}, TextError, "6 columns"),
    "targets": ("llama", {**GIVEN, "targets": [[5]]}, TextError, "one stack"),
    "no part": ("mamba", {**GIVEN, "what": "attn"}, SiteError, "attn"),
    "no mask": ("bert", GIVEN, TextError, "Give position="),
    "no donor": ("llama", {"data": [("a", "b")]}, TextError, "there is no donor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_patched_is_said(tiny: Tiny, case: str) -> None:
    family, given, kind, words = BAD[case]
    with pytest.raises(kind) as caught:
        hs.patch(tiny(family), **given)
    assert words in str(caught.value)


def test_a_model_without_a_head(tiny: Tiny) -> None:
    with pytest.raises(PassError, match="no head"):
        hs.patch(tiny("gpt2", "base"), **GIVEN)


def test_runs_that_answer_alike() -> None:
    model = hs.load((tiny_model("llama"), None))
    with torch.no_grad():
        weight = model.module.lm_head.weight  # type: ignore[union-attr]
        weight[70] = weight[60]  # type: ignore[index, operator]
    with pytest.raises(TextError, match="both runs prefer"):
        hs.patch(model, **GIVEN)


def test_a_difference_within_rounding_is_no_difference() -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        states = [module.model(torch.tensor([ids])).last_hidden_state[0, -1].double() for ids in (CLEAN, CORRUPT)]
        logits = [module(torch.tensor([ids])).logits[0, -1].double() for ids in (CLEAN, CORRUPT)]
        apart = states[0] - states[1]
        for ulps, refused in ((64, True), (1024, False)):  # one unit in the last place of logits as large as these are
            wanted = ulps * 2**-23 * float(torch.stack(logits).std())
            module.lm_head.weight[70] = module.lm_head.weight[60] - (wanted * apart / (apart @ apart)).float()
            model = hs.load((module, None))
            logs = [module(torch.tensor([ids])).logits[0, -1].double() for ids in (CLEAN, CORRUPT)]
            span = float((logs[0][60] - logs[0][70]) - (logs[1][60] - logs[1][70]))
            assert abs(span) > 1e-6, "or nothing is shown"
            if refused:
                with pytest.raises(TextError, match="rounding may make"):
                    hs.patch(model, **GIVEN)
            else:
                hs.patch(model, **GIVEN, layers=0)


def test_a_difference_within_rounding_of_bfloat16() -> None:
    model = hs.load((tiny_model("llama").bfloat16(), None))
    runs = [hs.record(model, [ids], "layer.0", logits=True).logits[-1].double() for ids in (CLEAN, CORRUPT)]  # type: ignore[index]
    apart = runs[0] - runs[1]
    spans = (apart[60] - apart).abs()
    least = int(torch.where(spans > 1e-3, spans, torch.inf).argmin())
    with pytest.raises(TextError, match=r"rounding may make .* or use float32"):
        hs.patch(model, **{**GIVEN, "other": least})
    assert np.isfinite(hs.patch(model, **{**GIVEN, "other": int(spans.argmax())}).data["effect"]).all()


def perturbed(block: int, seed: int = 3, dtype: torch.dtype = torch.float32, tokenizer: Any = None) -> hs.Model:
    """The tiny llama with one block drawn anew."""
    module: Any = tiny_model("llama")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.model.layers[block].parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.5)
    return hs.load((module.to(dtype), tokenizer or tiny_tokenizer()))


def answered(model: hs.Model, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    return [(ids, int(hs.record(model, [ids], "layer.0", logits=True).logits[-1].argmax())) for ids in prompts]  # type: ignore[index]


PROMPTS = [[7, 99, 23], [8, 45, 77, 60], [50, 51], [61, 62, 63, 64, 65], [30, 31, 32], [40, 90, 91]]


def test_a_donors_blocks_make_the_donors_mistakes_where_they_are(tiny: Tiny) -> None:
    model, donor = tiny("llama"), perturbed(1)
    result = hs.patch(model, donor=donor, data=answered(model, PROMPTS), window=1)
    accuracy = result.data["accuracy"].values
    assert result.facts["model alone"]["right"] == 1
    assert accuracy[0] == accuracy[2] == 1, "these blocks are the same in both"
    assert accuracy[1] == pytest.approx(result.facts["donor alone"]["right"])
    assert accuracy[1] < 1
    whole = hs.patch(model, donor=donor, data=answered(donor, PROMPTS), window=3)
    assert whole.data["accuracy"].values.tolist() == [1.0], "all of the blocks are the donor"
    low, high = (float(result.data[f"accuracy_{end}"][1]) for end in ("low", "high"))
    assert low < accuracy[1] < high


@pytest.mark.parametrize("what", ["layer", "attn", "mlp"])
def test_a_donors_states(tiny: Tiny, what: Any) -> None:
    model, donor = tiny("llama"), perturbed(1)
    data = answered(model, PROMPTS)
    result = hs.patch(model, donor=donor, data=data, what=what, window=1)
    for row, k in enumerate((1, 2, 3)):
        site = f"layer.{k}" if what == "layer" else f"layer.{k}.{what}"
        right = []
        for ids, answer in data:
            change: dict[Any, Any] = {site: hs.Replace(hs.record(donor, [ids], site).states[site])}
            right.append(int(hs.edit(model, [ids], change, "layer.0", logits=True).logits[-1].argmax()) == answer)  # type: ignore[index]
        assert float(result.data["accuracy"][row]) == pytest.approx(np.mean(right))


def test_what_a_donor_cannot_give(tiny: Tiny) -> None:
    model, data, larger = tiny("llama"), answered(tiny("llama"), PROMPTS[:2]), tiny_tokenizer()
    larger.add_tokens(["zebra"])
    for donor, given, kind, words in [
        (tiny("gpt2"), {}, ModuleError, "differ in shape"),
        (model, {}, ModuleError, "one and the same"),
        (perturbed(0), {"window": 4}, TextError, "3 blocks"),
        (perturbed(0), {"what": "cross"}, TextError, "'block'"),
        (perturbed(0), {"data": ["a"]}, TextError, "no list of pairs"),
        (perturbed(0), {"clean": [CLEAN]}, TextError, "given too"),
        (perturbed(0), {"position": 1}, TextError, "given too"),
        (perturbed(0), {"what": "layer", "window": 2}, TextError, "the last alone would count"),
        (perturbed(0, dtype=torch.bfloat16), {}, ModuleError, "in torch.float32 and torch.bfloat16"),
        (perturbed(0, tokenizer=larger), {}, ModuleError, "different vocabularies"),
        (perturbed(0, tokenizer=tiny_tokenizer(bos=False)), {"data": [("The", " a")]}, TextError, "other tokens of it"),
    ]:
        with pytest.raises(kind) as caught:
            hs.patch(model, donor=donor, **{"data": data, **given})
        assert words in str(caught.value)


def test_a_block_called_again_and_again_gives_its_states() -> None:
    def looped(seed: int) -> hs.Model:
        module: Any = tiny_model("gpt2", seed=seed)
        module.transformer.h = nn.ModuleList([module.transformer.h[0]] * 3)
        module.config.use_cache = False
        return hs.load((module.eval(), None))

    model, donor = looped(0), looped(1)
    data = answered(model, PROMPTS[:3])
    with pytest.raises(ModuleError, match="Use what='layer'"):
        hs.patch(model, donor=donor, data=data)
    result = hs.patch(model, donor=donor, data=data, what="layer")
    right = []
    for ids, answer in data:
        change: dict[Any, Any] = {"layer.2": hs.Replace(hs.record(donor, [ids], "layer.2").states["layer.2"])}
        right.append(int(hs.edit(model, [ids], change, "layer.0", logits=True).logits[-1].argmax()) == answer)  # type: ignore[index]
    assert float(result.data["accuracy"].sel(site="layer.2")) == pytest.approx(np.mean(right))


def test_wilson_covers_what_it_promises() -> None:
    generator = np.random.default_rng(0)
    for share in (0.1, 0.5, 0.9):
        counts = generator.binomial(40, share, 2000)
        inside = [low <= share <= high for low, high in (wilson(int(count) / 40, 40) for count in counts)]
        assert 0.92 < np.mean(inside) < 0.98


@pytest.mark.real
def test_the_capital_moves_from_the_country_to_the_last_token(smollm2: hs.Model) -> None:
    given: dict[str, Any] = {"answer": " Paris", "other": " Berlin"}
    given |= {"clean": "The capital of France is", "corrupt": "The capital of Germany is"}
    result = hs.patch(smollm2, **given, method="both")
    effect = result.data["effect"].values
    assert (effect[:, :3] == 0).all()
    assert (effect[:20, 3] > 0.9).all() and (np.abs(effect[:20, 4]) < 0.1).all()
    assert (effect[25:, 4] > 0.9).all() and (np.abs(effect[25:, 3]) < 0.1).all()
    assert result.facts["logit difference"]["clean"] > 5 > -3 > result.facts["logit difference"]["corrupt"]
    assert result.facts["exact against estimate"]["correlation"] > 0.9
    assert "notes" not in result.facts
    check = result.facts["largest effect computed again alone"]
    assert check["in the sweep"] == pytest.approx(check["alone"], abs=1e-4)
    with pytest.raises(TextError, match="tokens: ' K"):
        hs.patch(smollm2, **{**given, "answer": " Königsberg"})
    spaceless = hs.patch(smollm2, **{**given, "answer": "Paris"}, method="attribution")
    assert "' Paris' is another token" in spaceless.facts["notes"][0]


def test_its_pictures_and_its_story(tiny: Tiny, tmp_path: Path) -> None:
    result = hs.patch(tiny("llama"), **GIVEN, method="both")
    grid, lines = views_of(result)
    assert isinstance(grid, Grid) and isinstance(lines, Lines)
    assert [measure.name for measure in grid.measures][:2] == ["effect", "effect as the gradient estimates it"]
    assert grid.measures[0].meaning == "diverging"
    assert (grid.second[2], grid.tokens[2]) == tuple(tiny("llama").encoder.string(ids[2]) for ids in (CLEAN, CORRUPT))
    assert [series.style for series in lines.series] == ["line", "dash"]
    told = sections_of(result)
    assert "carries half or more of it from `layer.0`" in told[0].prose
    assert len(told) == 2
    gaps, *_ = views_of(hs.patch(tiny("llama"), **{**GIVEN, "corrupt": [[*CORRUPT[:2], *CORRUPT[1:]]]}))
    assert isinstance(gaps, Grid) and None in gaps.second and "Hatched" in gaps.note
    result.save(tmp_path / "patch.json")
    assert hs.Result.load(tmp_path / "patch.json").equals(result)
    donor = hs.patch(tiny("llama"), donor=perturbed(1), data=answered(tiny("llama"), PROMPTS), window=1)
    (windows,) = views_of(donor)
    assert isinstance(windows, Lines) and windows.series[0].band == "95% interval"
    assert "Alone the model answers 100% of 6 prompts rightly" in sections_of(donor)[0].prose


def test_the_command(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    given = ["patch", "The cat", "The hat", "--answer", " a", "--other", " c", "--model", str(tmp_path / "tiny")]
    done = CliRunner().invoke(app, [*given, "--method", "both", "--out", str(tmp_path / "patch.json"), "--quiet"])
    assert done.exit_code == 0, done.output
    result = hs.Result.load(tmp_path / "patch.json")
    assert {"effect", "attribution"} <= set(result.data.data_vars)
    done = CliRunner().invoke(app, [*given, "--window", "0"])
    assert done.exit_code == 2
    assert "window=0" in done.stderr


def test_the_command_with_a_donor(tiny: Tiny, tmp_path: Path) -> None:
    models = {"own": tiny("llama"), "donor": perturbed(1)}
    for name, model in models.items():
        model.module.save_pretrained(tmp_path / name)  # type: ignore[operator]
        model.tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "prompts.csv").write_text('text,label\nThe cat," a"\nThe hat," c"\n')
    (tmp_path / "bare.txt").write_text("The cat\n")
    given = ["patch", "--model", str(tmp_path / "own"), "--donor", str(tmp_path / "donor"), "--data"]
    out = tmp_path / "patch.json"
    done = CliRunner().invoke(app, [*given, str(tmp_path / "prompts.csv"), "--window", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    data = [("The cat", " a"), ("The hat", " c")]
    expected = hs.patch(models["own"], donor=models["donor"], data=data, window=2)
    np.testing.assert_allclose(hs.Result.load(out).data["probability"], expected.data["probability"], rtol=1e-5)
    for wrong, words in ((str(tmp_path / "bare.txt"), "they have no labels"), (str(out), "patch.json")):
        done = CliRunner().invoke(app, [*given, wrong])
        assert done.exit_code == 2 and words in done.stderr
    done = CliRunner().invoke(app, ["patch", "The cat", "--model", str(tmp_path / "own")])
    assert done.exit_code == 2 and "no corrupt and no answer" in done.stderr


@pytest.mark.real
def test_a_donor_that_cannot_read_the_country(smollm2: hs.Model) -> None:
    donor = hs.load("smollm2")
    with torch.no_grad():
        for block in donor.module.model.layers[22:25]:  # type: ignore[union-attr, index]
            block.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
    data = [("The capital of France is", " Paris"), ("The capital of Italy is", " Rome")]
    result = hs.patch(smollm2, donor=donor, data=data, window=15)
    assert result.facts["model alone"]["right"] == 1
    assert result.facts["donor alone"]["right"] == 0
    accuracy = result.data["accuracy"].values
    assert (accuracy[:8] == 1).all(), "windows below block 23"
    assert (accuracy[10:] == 0).all(), "windows that hold blocks 23 to 25 are the donor"
