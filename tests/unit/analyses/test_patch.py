"""Patch: exact zeros where nothing differs, all of the answer where everything does,
and loops of one's own.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli.main import app
from hiddenscope.errors import Error, PassError, SiteError, TextError
from hiddenscope.passes.answers import token_after
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Grid, Lines

Tiny = Callable[..., hs.Model]
# On a CPU without bfloat16.

CLEAN, CORRUPT = [7, 99, 23, 64, 31, 50], [7, 99, 45, 64, 31, 50]
CONTRAST = hs.Contrast(CLEAN, CORRUPT, answer=60, other=70)


def loop(
    module: Any, base: list[int], source: list[int], layer: int, token: int
) -> Tensor:
    """One cell by hand: the last token's logits with one state from the other text, by
    a hook of our own.
    """
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
            logits: Tensor = module(
                input_ids=torch.tensor([ids]), use_cache=False
            ).logits[0, -1]
            handle.remove()
    return logits


def measures(
    logits: Tensor, clean: Tensor, corrupt: Tensor
) -> tuple[float, float, float]:
    """Effect, probability and KL from their definitions."""
    d = [float(x[60] - x[70]) for x in (logits, clean, corrupt)]
    p, q = clean.double().softmax(-1), logits.double().softmax(-1)
    return (d[0] - d[2]) / (d[1] - d[2]), float(q[60]), float((p * (p / q).log()).sum())


def test_every_cell_is_that_of_a_loop_of_ones_own(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, CONTRAST).data
    with torch.no_grad():
        clean, corrupt = (
            model.module(torch.tensor([ids])).logits[0, -1] for ids in (CLEAN, CORRUPT)
        )
    for layer in (1, 2, 3):
        for token in range(6):
            expected = measures(
                loop(model.module, CORRUPT, CLEAN, layer, token), clean, corrupt
            )
            here = data.sel(site=f"layer.{layer}").isel(token=token)
            found = [float(here[name]) for name in ("effect", "probability", "kl")]
            np.testing.assert_allclose(found, expected, atol=1e-4)
    assert data["effect"].dims == ("site", "token")
    assert data["effect"].attrs["meaning"] == "diverging"


@pytest.mark.parametrize(
    "sites", ["layer.*", "*.attn", "*.mlp", "*.mid", "final", "layer.2,*.mlp,final"]
)
@pytest.mark.parametrize("into", ["corrupt", "clean"])
def test_every_cell_is_an_edit(tiny: Tiny, sites: str, into: Any) -> None:
    model = tiny("gpt2")
    data = hs.patch(model, CONTRAST, sites=sites, into=into).data
    base, source = (CORRUPT, CLEAN) if into == "corrupt" else (CLEAN, CORRUPT)
    full = {name: hs.record(model, [ids], [*map(str, data["site"].values)], logits=True)
            for name, ids in (("base", base), ("source", source))}  # fmt: skip

    def share(logits: Any) -> float:
        d = [
            float(x[-1, 60] - x[-1, 70])
            for x in (logits, full["base"].logits, full["source"].logits)
        ]  # type: ignore[index]
        return (d[0] - d[1]) / (d[2] - d[1])

    for site in map(str, data["site"].values):
        for token in range(6):
            row = full["source"].states[site][token]
            edited = hs.edit(
                model,
                [base],
                {site: hs.Replace(row, tokens=token)},
                "layer.0",
                logits=True,
            )
            assert float(data["effect"].sel(site=site)[token]) == pytest.approx(
                share(edited.logits), abs=1e-4
            )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "bert", "t5"])
def test_states_that_are_the_same_have_no_effect_at_all(
    tiny: Tiny, family: str
) -> None:
    contrast = replace(
        CONTRAST,
        at=-1 if family == "bert" else None,
        targets=[5, 9] if family == "t5" else None,
    )
    result = hs.patch(tiny(family), contrast)
    effect = result.data["effect"]
    causal = family != "bert"
    zero = (
        effect.isel(token=slice(0, 2))
        if causal and family != "t5"
        else effect.sel(site=effect["site"][0])
    )
    if causal and family != "t5":
        assert (zero.values == 0).all(), "tokens before the first that differs"
        assert (effect[0].values[3:] == 0).all(), "the embeddings of the others"
    else:
        assert (zero.values[[0, 1, 3, 4, 5]] == 0).all()
    cells = result.facts["cells"]
    assert cells["total"] == int(np.isfinite(effect).sum())
    assert 0 < cells["equal"] <= int((effect == 0).sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "bert"])
def test_every_token_at_once_gives_the_other_run(tiny: Tiny, family: str) -> None:
    contrast = replace(CONTRAST, at=-1) if family == "bert" else CONTRAST
    data = hs.patch(tiny(family), contrast, window=6).data
    np.testing.assert_allclose(data["effect"].values[:, 0], 1, atol=1e-4)
    np.testing.assert_allclose(data["kl"].values[:, 0], 0, atol=1e-5)


def test_at_the_ends_both_ways_agree(tiny: Tiny) -> None:
    model = tiny("llama")
    there, back = (
        hs.patch(model, CONTRAST, into=run).data["effect"].values
        for run in ("corrupt", "clean")
    )  # type: ignore[arg-type]
    for effect in (there, back):
        # The one embedding that differs.
        np.testing.assert_allclose(effect[0], [0, 0, 1, 0, 0, 0], atol=1e-4)
        # The token that is read.
        np.testing.assert_allclose(effect[-1], [0, 0, 0, 0, 0, 1], atol=1e-4)
    assert not np.allclose(there, back, atol=1e-2), "in between they are two questions"


def test_the_answer_may_be_read_before_the_end(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, replace(CONTRAST, at=3)).data
    expected = hs.patch(
        model, replace(CONTRAST, clean=CLEAN[:4], corrupt=CORRUPT[:4])
    ).data
    for name in ("effect", "probability", "kl"):
        np.testing.assert_allclose(
            data[name].values[:, :4], expected[name].values, atol=1e-4
        )
    np.testing.assert_allclose(data["effect"].values[:, 4:], 0, atol=1e-4)


@pytest.mark.parametrize(
    "texts", [("the mat h", "the cat h"), ("the mat of h", "the mat on h")]
)
def test_an_answer_is_one_token_after_the_text_up_to_where_it_is_read(
    tiny: Tiny, texts: tuple[str, str]
) -> None:
    model = tiny("llama")
    contrast = hs.Contrast(*texts, answer="e", other=" a")
    e = model.tokenizer("e", add_special_tokens=False).input_ids
    # Before the space and the h, with which it would be "he".
    place = len(model.encode(texts[0]).ids[0]) - 3
    early, by_id = (
        hs.patch(model, replace(contrast, answer=one, at=place), layers=0).data
        for one in ("e", e[0])
    )
    np.testing.assert_array_equal(early["effect"], by_id["effect"])
    with pytest.raises(TextError, match="merges with the text before it"):
        hs.patch(model, contrast)


@pytest.mark.parametrize(
    "sides", [("the mat s", "the mat h"), ("the mat h", "the mat s")]
)
def test_an_answer_is_the_same_token_after_both_texts(
    tiny: Tiny, sides: tuple[str, str]
) -> None:
    for answers in (("e", " a"), (" a", "e")):
        with pytest.raises(TextError, match="merges with the text"):
            hs.patch(tiny("llama"), hs.Contrast(*sides, *answers))
    encoder: Any = SimpleNamespace(single=lambda answer, name, before: len(before))
    assert token_after(encoder, "x", ["ab", None, "cd"]) == 2
    assert token_after(encoder, "x", [None]) == 0
    with pytest.raises(
        TextError, match="token 2 after 'ab' and it is token 3 after 'abc'"
    ):
        token_after(encoder, "x", ["ab", "abc"])


def test_windows_of_tokens(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, CONTRAST, window=2).data
    rows = hs.record(model, [CLEAN], "layer.2", logits=True)
    base = hs.record(model, [CORRUPT], "layer.2", logits=True)
    edited = hs.edit(
        model,
        [CORRUPT],
        {"layer.2": hs.Replace(rows.states["layer.2"][2:4], tokens=[2, 3])},
        "layer.0",
        logits=True,
    )
    d = [
        float(x[-1, 60] - x[-1, 70]) for x in (edited.logits, base.logits, rows.logits)
    ]  # type: ignore[index]
    assert float(data["effect"].sel(site="layer.2")[2]) == pytest.approx(
        (d[0] - d[1]) / (d[2] - d[1]), abs=1e-4
    )
    one = hs.patch(model, CONTRAST).data["effect"]
    np.testing.assert_allclose(data["effect"].values[:, 5], one.values[:, 5], atol=1e-5)


def test_whole_layers_swapped(tiny: Tiny) -> None:
    model = tiny("llama")
    data = hs.patch(model, CONTRAST, layers=1).data
    states = {
        name: hs.record(model, [ids], logits=True)
        for name, ids in (("clean", CLEAN), ("corrupt", CORRUPT))
    }
    d = {
        name: float(made.logits[-1, 60] - made.logits[-1, 70])
        for name, made in states.items()
    }  # type: ignore[index]

    def share(changes: dict[Any, Any]) -> float:
        logits = hs.edit(model, [CORRUPT], changes, "layer.0", logits=True).logits
        return (float(logits[-1, 60] - logits[-1, 70]) - d["corrupt"]) / (
            d["clean"] - d["corrupt"]
        )  # type: ignore[index]

    others = list(range(5))
    for k in range(4):
        taken = {
            f"layer.{k}": hs.Replace(
                states["clean"].states[f"layer.{k}"][:5], tokens=others
            )
        }
        held = {f"layer.{j}": hs.Replace(states["corrupt"].states[f"layer.{j}"][:5], tokens=others)
                for j in range(k + 1, 4)}  # fmt: skip
        assert float(data["swap"][k]) == pytest.approx(share(taken), abs=1e-4)
        assert float(data["swap_window"][k]) == pytest.approx(
            share(taken | held), abs=1e-4
        )
    assert float(data["swap"][3]) == pytest.approx(0, abs=1e-5)
    parts = hs.patch(model, CONTRAST, sites="*.attn", layers=2).data
    taken = {
        site: hs.Replace(hs.record(model, [CLEAN], site).states[site])
        for site in ("layer.2.attn", "layer.3.attn")
    }
    assert float(parts["swap_window"].sel(site="layer.2.attn")) == pytest.approx(
        share(taken), abs=1e-4
    )
    assert np.isnan(parts["swap_window"].sel(site="layer.3.attn"))


@pytest.mark.parametrize("patterns", ["layer.*", "*.mlp"])
def test_attribution_is_the_derivative_in_the_direction_of_the_other_state(
    patterns: str,
) -> None:
    # Llama's norm computes in float32, whatever it is given.
    model = hs.load((tiny_model("gpt2").double(), None))
    result = hs.patch(model, CONTRAST, sites=patterns, method="both")
    sites = [str(site) for site in result.data["site"].values]
    clean, corrupt = (
        hs.record(model, [ids], sites, logits=True) for ids in (CLEAN, CORRUPT)
    )
    d = [float(made.logits[-1, 60] - made.logits[-1, 70]) for made in (clean, corrupt)]  # type: ignore[index]
    for site in sites:
        for token in range(2, 6):
            own, other = (made.states[site][token] for made in (corrupt, clean))
            sides = []
            for step in (1e-4, -1e-4):
                change = {site: hs.Replace(own + step * (other - own), tokens=token)}
                logits = hs.edit(
                    model, [CORRUPT], change, "layer.0", logits=True
                ).logits  # type: ignore[arg-type]
                sides.append(float(logits[-1, 60] - logits[-1, 70]))  # type: ignore[index]
            slope = (sides[0] - sides[1]) / 2e-4 / (d[0] - d[1])
            assert float(
                result.data["attribution"].sel(site=site)[token]
            ) == pytest.approx(slope, rel=1e-4, abs=1e-6)
    x, y = (result.data[name].values for name in ("effect", "attribution"))
    changed = np.array(
        [
            [(token > 2 and site != "layer.0") or token == 2 for token in range(6)]
            for site in sites
        ]
    )
    assert result.facts["agreement"]["cells"] == changed.sum()
    expected = np.corrcoef(x[changed], y[changed])[0, 1]
    assert result.facts["agreement"]["correlation"] == pytest.approx(expected, abs=1e-3)


def test_attribution_by_itself_costs_no_sweep(tiny: Tiny) -> None:
    model = tiny("gpt2")
    result, both = (
        hs.patch(model, CONTRAST, method=method) for method in ("attribution", "both")
    )  # type: ignore[arg-type]
    assert set(result.data.data_vars) == {"attribution"}
    assert "cost" not in result.facts
    np.testing.assert_array_equal(result.data["attribution"], both.data["attribution"])
    assert all(weight.grad is None for weight in model.module.parameters())


def test_pairs_are_averaged_with_standard_errors(tiny: Tiny) -> None:
    model = tiny("llama")
    contrasts = [
        hs.Contrast([7, 99, a, 64, 31, 50], [7, 99, b, 64, 31, 50], answer, other=70)
        for a, b, answer in ((23, 45, 60), (24, 46, 61), (25, 47, 62))
    ]
    result = hs.patch(model, contrasts, method="both")
    single = [hs.patch(model, contrast, method="both").data for contrast in contrasts]
    for name in ("effect", "probability", "kl", "attribution", "swap"):
        every = np.stack([one[name].values for one in single])
        np.testing.assert_allclose(
            result.data[name], every.mean(0), atol=1e-5, rtol=1e-4
        )
        expected = every.std(0, ddof=1) / 3**0.5
        np.testing.assert_allclose(
            result.data[f"{name}_error"], expected, atol=1e-5, rtol=1e-3
        )
    assert result.facts["contrasts"] == 3
    assert "effect_error" not in single[0]


TRIPLES = ((23, 45, 60), (24, 46, 61), (25, 47, 62), (26, 48, 63))


def several(*groups: object) -> list[hs.Contrast]:
    triples = zip(TRIPLES, groups, strict=True)
    return [
        hs.Contrast([7, 99, a, 64], [7, 99, b, 64], answer, other=70, group=group)  # type: ignore[arg-type]
        for (a, b, answer), group in triples
    ]


def test_a_contrast_given_again_is_no_further_evidence(tiny: Tiny) -> None:
    model, contrasts = tiny("llama"), several(None, None, None, None)
    once, often = (
        hs.patch(model, contrasts),
        hs.patch(model, [*contrasts, contrasts[1], *contrasts]),
    )
    assert often.data.equals(once.data)
    assert (often.facts["contrasts"], often.facts["copies"], often.facts["groups"]) == (
        4,
        5,
        4,
    )
    assert (
        often.facts["notes"][0]
        == "5 pairs of prompts are copies of another and counted once."
    )
    alone = hs.patch(model, contrasts[:1] * 3)
    assert "effect_error" not in alone.data


def test_the_error_is_that_of_leaving_out_groups(tiny: Tiny) -> None:
    model, groups = tiny("llama"), ("a", "b", "a", "c")
    result = hs.patch(model, several(*groups))
    single = np.stack(
        [
            hs.patch(model, contrast).data["effect"].values
            for contrast in several(*groups)
        ]
    )
    left = np.stack(
        [single[[own != group for own in groups]].mean(0) for group in "abc"]
    )
    expected = (2 / 3 * ((left - left.mean(0)) ** 2).sum(0)) ** 0.5
    np.testing.assert_allclose(
        result.data["effect_error"], expected, atol=1e-5, rtol=1e-3
    )
    np.testing.assert_allclose(
        result.data["effect"], single.mean(0), atol=1e-5, rtol=1e-4
    )
    assert (
        result.facts["groups"] == 3
        and "4 pairs of prompts in 3 groups" in result.summary()
    )
    together = hs.patch(model, several(0, 0, 0, 0))
    assert "effect_error" not in together.data and together.facts["groups"] == 1
    assert (
        "All pairs of prompts belong together, so there is no standard error."
        in together.facts["notes"]
    )


def test_the_same_prompts_the_other_way_round_belong_together(tiny: Tiny) -> None:
    contrast = several(None, None, None, None)[0]
    swapped = replace(contrast, clean=contrast.corrupt, corrupt=contrast.clean)
    assert hs.patch(tiny("llama"), [contrast, swapped]).facts["groups"] == 1
    with pytest.raises(TextError, match="group must name what belongs together"):
        replace(contrast, group=[1])  # type: ignore[arg-type]


def test_prompts_of_one_length_are_patched_token_by_token(tiny: Tiny) -> None:
    # The longest run that both have is two tokens, one place apart.
    contrast = replace(CONTRAST, clean=[5, 6, 7, 7], corrupt=[5, 7, 7, 7])
    data = hs.patch(tiny("llama"), contrast).data
    assert data["position"].values.tolist() == [0, 1, 2, 3]
    assert data["other_position"].values.tolist() == [0, 1, 2, 3]


def test_texts_of_two_lengths_are_aligned(tiny: Tiny) -> None:
    model = tiny("llama")
    longer = [7, 99, 45, 46, 64, 31, 50]
    result = hs.patch(model, replace(CONTRAST, corrupt=longer))
    columns = [
        *zip(
            result.data["position"].values.tolist(),
            result.data["other_position"].values.tolist(),
            strict=True,
        )
    ]
    assert columns == [(0, 0), (1, 1), (-1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    effect = result.data["effect"].values
    assert (
        np.isnan(effect) == [[False, False, True, False, False, False, False]]
    ).all()
    assert any("different lengths" in note for note in result.facts["notes"])
    np.testing.assert_allclose(effect[-1], [0, 0, np.nan, 0, 0, 0, 1], atol=1e-4)


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


def test_an_encoder_decoder_in_both_stacks(tiny: Tiny) -> None:
    model = tiny("bart")
    result = hs.patch(model, replace(CONTRAST, targets=[5, 9, 11]), method="both")
    effect, stack = result.data["effect"], result.data["stack"].values
    inside = np.array(
        [[site.startswith(one) for one in stack] for site in effect["site"].values]
    )
    assert (np.isfinite(effect.values) == inside).all()
    np.testing.assert_allclose(
        effect.sel(site="decoder.layer.3").values[-1], 1, atol=1e-4
    )
    np.testing.assert_allclose(
        effect.sel(site="encoder.layer.0").values[2], 1, atol=1e-4
    )
    assert (effect.sel(site="decoder.layer.0").values[-3:] == 0).all(), (
        "the decoder's text is the same"
    )
    rows = hs.record(model, [CLEAN], targets=[[5, 9, 11]]).states["encoder.layer.2"]
    change = {"encoder.layer.2": hs.Replace(rows[2], tokens=2)}
    runs = [
        hs.record(model, [ids], targets=[[5, 9, 11]], logits=True).logits
        for ids in (CORRUPT, CLEAN)
    ]
    edited = hs.edit(model, [CORRUPT], change, targets=[[5, 9, 11]], logits=True).logits  # type: ignore[arg-type]
    d = [float(x[-1, 60] - x[-1, 70]) for x in (edited, *runs)]  # type: ignore[index]
    found = float(effect.sel(site="encoder.layer.2")[2])
    assert found == pytest.approx((d[0] - d[1]) / (d[2] - d[1]), abs=1e-4)


def test_an_encoder_whose_output_cannot_be_given_is_run_again() -> None:
    sizes = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_heads": 4,
        "num_layers": 3,
        "num_decoder_layers": 3,
    }
    experts = {
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    }
    config = SwitchTransformersConfig(
        vocab_size=128, decoder_start_token_id=0, **sizes, **experts
    )
    torch.manual_seed(0)
    # It wants router_logits of it.
    model = hs.load((SwitchTransformersForConditionalGeneration(config).eval(), None))
    targets = [[0, 9, 11]]
    result = hs.patch(model, replace(CONTRAST, targets=targets[0]))
    runs = [
        hs.record(model, [ids], targets=targets, logits=True)
        for ids in (CLEAN, CORRUPT)
    ]
    d = [float(run.logits[-1, 60] - run.logits[-1, 70]) for run in runs]  # type: ignore[index]
    for site, token in (
        ("decoder.layer.2", 2),
        ("encoder.layer.1", 2),
        ("encoder.layer.3", 4),
    ):
        change: dict[Any, Any] = {
            site: hs.Replace(runs[0].states[site][token], tokens=token)
        }
        logits = hs.edit(model, [CORRUPT], change, targets=targets, logits=True).logits
        share = (float(logits[-1, 60] - logits[-1, 70]) - d[1]) / (d[0] - d[1])  # type: ignore[index]
        column = token + (len(CLEAN) if site.startswith("decoder") else 0)
        assert float(result.data["effect"].sel(site=site)[column]) == pytest.approx(
            share, abs=1e-4
        )
    assert any(
        "encoder" in note and "router_logits" in note for note in result.facts["notes"]
    )


def test_a_model_that_fills_masks_is_read_at_the_mask() -> None:
    tokenizer = tiny_tokenizer(cls=True)
    tokenizer.mask_token = "<unk>"
    model = hs.load((tiny_model("bert"), tokenizer))
    result = hs.patch(
        model, hs.Contrast([4, 20, 3, 30, 5], [4, 21, 3, 30, 5], "a", "b")
    )
    assert result.facts["answer_token"]["token"] == model.text_encoder.string(3)
    np.testing.assert_allclose(result.data["effect"].values[-1, 2], 1, atol=1e-4)
    with pytest.raises(TextError, match="Put one <unk>"):
        hs.patch(model, hs.Contrast([4, 20, 30, 5], [4, 21, 30, 5], "a", "b"))


def test_what_was_not_saved_is_told(tiny: Tiny) -> None:
    assert hs.patch(hs.load((tiny_model("llama"), None)), CONTRAST).facts["notes"] == []
    assert (
        "eys and values were computed anew"
        in hs.patch(tiny("mamba"), CONTRAST).facts["notes"][0]
    )
    assert (
        "very block was run"
        in hs.patch(tiny("t5"), replace(CONTRAST, targets=[5, 9])).facts["notes"][0]
    )
    cost = hs.patch(tiny("llama"), CONTRAST).facts["cost"]
    assert cost["cells"] == 1 + 3 * 4
    assert cost["tokens"] < 30 * 6


CATS: dict[str, Any] = {"clean": "the mat and a", "corrupt": "the hat and a"}
WRONG_CONTRASTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "pieces": (
        "llama",
        {**CATS, "answer": " Paris", "other": " a"},
        "5 tokens: ' ' 'P'",
    ),
    "space": ("llama", {**CATS, "answer": "nd", "other": " a"}, "Did you mean ' nd'?"),
    "equal answers": ("llama", {"other": 60}, "both answers are 60"),
    "same prompts": ("llama", {"corrupt": CLEAN}, "both prompts are the same"),
    "two kinds": (
        "llama",
        {"corrupt": "the hat"},
        "one prompt is a string and the other token ids",
    ),
    "several texts": (
        "llama",
        {"clean": [CLEAN]},
        "clean must be one prompt: got list",
    ),
    "one token": ("llama", {"clean": [7]}, "has one token"),
    "id": ("llama", {"answer": 10**6}, "are 0 to 127"),
    "kind": ("llama", {"answer": 1.5}, "answer must be one token: got float"),
    "position": ("llama", {"at": 6}, "at must be a position of 6 tokens: got 6"),
    "no position": ("llama", {"at": "end"}, "at must be a position: got 'end'"),
    "targets": ("llama", {"targets": [5]}, "one stack"),
    "no mask": ("bert", {}, "Give at="),
}


@pytest.mark.parametrize("case", WRONG_CONTRASTS)
def test_a_contrast_that_cannot_be_patched_is_refused(tiny: Tiny, case: str) -> None:
    family, changes, words = WRONG_CONTRASTS[case]
    with pytest.raises(PassError if case == "targets" else TextError) as caught:
        hs.patch(tiny(family), replace(CONTRAST, **changes))
    assert words in str(caught.value)


def test_two_names_of_one_token_are_one_answer(tiny: Tiny) -> None:
    (token,) = tiny("llama").tokenizer(" a", add_special_tokens=False).input_ids
    with pytest.raises(TextError, match="both answers are the token ' a'"):
        hs.patch(tiny("llama"), replace(CONTRAST, answer=" a", other=token))


SHORTER = replace(CONTRAST, clean=CLEAN[1:], corrupt=CORRUPT[1:])
WRONG: dict[str, tuple[str, Any, dict[str, Any], type[Error], str]] = {
    "into": (
        "llama",
        CONTRAST,
        {"into": "up"},
        TextError,
        "into must be 'corrupt' or 'clean': got 'up'",
    ),
    "method": (
        "llama",
        CONTRAST,
        {"method": "fast"},
        TextError,
        "method must be 'exact' or 'attribution' or 'both'",
    ),
    "window": (
        "llama",
        CONTRAST,
        {"window": 0},
        TextError,
        "window must be an integer >= 1: got 0",
    ),
    "layers": (
        "llama",
        CONTRAST,
        {"layers": -1},
        TextError,
        "layers must be an integer >= 0: got -1",
    ),
    "form": (
        "llama",
        [CONTRAST, SHORTER],
        {},
        TextError,
        "contrast 0 has 6 columns of tokens, contrast 1 has 5",
    ),
    "no contrast": (
        "llama",
        ("the mat", "the hat"),
        {},
        TextError,
        "hs.Contrast(clean, corrupt, answer, other)",
    ),
    "none": (
        "llama",
        [],
        {},
        TextError,
        "contrasts must be a Contrast or a list of them",
    ),
    "some targets": (
        "t5",
        [replace(CONTRAST, targets=[5]), CONTRAST],
        {},
        TextError,
        "1 of 2 contrasts have targets",
    ),
    "no part": ("mamba", CONTRAST, {"sites": "*.attn"}, SiteError, "attn"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_patched_is_refused(tiny: Tiny, case: str) -> None:
    family, contrasts, options, kind, words = WRONG[case]
    with pytest.raises(kind) as caught:
        hs.patch(tiny(family), contrasts, **options)
    assert words in str(caught.value)


def test_a_model_without_a_head(tiny: Tiny) -> None:
    with pytest.raises(PassError, match="no head"):
        hs.patch(tiny("gpt2", "base"), CONTRAST)


def test_runs_that_answer_alike() -> None:
    model = hs.load((tiny_model("llama"), None))
    with torch.no_grad():
        weight = model.module.lm_head.weight  # type: ignore[union-attr]
        weight[70] = weight[60]  # type: ignore[index, operator]
    with pytest.raises(TextError, match="both runs prefer"):
        hs.patch(model, CONTRAST)


def test_a_difference_within_rounding_is_no_difference() -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        states = [
            module.model(torch.tensor([ids])).last_hidden_state[0, -1].double()
            for ids in (CLEAN, CORRUPT)
        ]
        logits = [
            module(torch.tensor([ids])).logits[0, -1].double()
            for ids in (CLEAN, CORRUPT)
        ]
        apart = states[0] - states[1]
        # One unit in the last place of logits as large as these are.
        for ulps, refused in (
            (64, True),
            (1024, False),
        ):
            wanted = ulps * 2**-23 * float(torch.stack(logits).std())
            module.lm_head.weight[70] = (
                module.lm_head.weight[60] - (wanted * apart / (apart @ apart)).float()
            )
            model = hs.load((module, None))
            logs = [
                module(torch.tensor([ids])).logits[0, -1].double()
                for ids in (CLEAN, CORRUPT)
            ]
            span = float((logs[0][60] - logs[0][70]) - (logs[1][60] - logs[1][70]))
            assert abs(span) > 1e-6, "or nothing is shown"
            if refused:
                with pytest.raises(TextError, match="rounding alone may make"):
                    hs.patch(model, CONTRAST)
            else:
                hs.patch(model, CONTRAST, layers=0)


def test_a_difference_within_rounding_of_bfloat16() -> None:
    model = hs.load((tiny_model("llama").bfloat16(), None))
    runs = [
        hs.record(model, [ids], "layer.0", logits=True).logits[-1].double()
        for ids in (CLEAN, CORRUPT)
    ]  # type: ignore[index]
    apart = runs[0] - runs[1]
    spans = (apart[60] - apart).abs()
    least = int(torch.where(spans > 1e-3, spans, torch.inf).argmin())
    with pytest.raises(TextError, match=r"rounding alone may make .* or use float32"):
        hs.patch(model, replace(CONTRAST, other=least))
    assert np.isfinite(
        hs.patch(model, replace(CONTRAST, other=int(spans.argmax()))).data["effect"]
    ).all()


@pytest.mark.parametrize("method", ["exact", "both"])
def test_all_prompts_are_encoded_in_one_call(method: Any, counting: Any) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    contrasts = [
        hs.Contrast("the mat is", "the hat is", " a", " c"),
        hs.Contrast("the mat it", "the hat it", " a", " c"),
    ]
    hs.patch(model, contrasts)  # whatever is tried on the model has been tried
    counted = counting(model)
    hs.patch(model, contrasts, method=method)
    assert counted.calls == [["the mat is", "the hat is", "the mat it", "the hat it"]]


@pytest.mark.real
def test_the_capital_moves_from_the_country_to_the_last_token(
    smollm2: hs.Model,
) -> None:
    contrast = hs.Contrast(
        "The capital of France is", "The capital of Germany is", " Paris", " Berlin"
    )
    result = hs.patch(smollm2, contrast, method="both")
    effect = result.data["effect"].values
    assert (effect[:, :3] == 0).all()
    assert (effect[:20, 3] > 0.9).all() and (np.abs(effect[:20, 4]) < 0.1).all()
    assert (effect[25:, 4] > 0.9).all() and (np.abs(effect[25:, 3]) < 0.1).all()
    assert (
        result.facts["logit_difference"]["clean"]
        > 5
        > -3
        > result.facts["logit_difference"]["corrupt"]
    )
    assert result.facts["agreement"]["correlation"] > 0.9
    assert result.facts["notes"] == []
    check = result.facts["check"]
    assert check["sweep"] == pytest.approx(check["alone"], abs=1e-4)
    with pytest.raises(TextError, match="tokens: ' K"):
        hs.patch(smollm2, replace(contrast, answer=" Königsberg"))
    spaceless = hs.patch(
        smollm2, replace(contrast, answer="Paris"), method="attribution"
    )
    assert "' Paris' is another token" in spaceless.facts["notes"][0]


def test_its_pictures_and_its_story(tiny: Tiny, tmp_path: Path) -> None:
    result = hs.patch(tiny("llama"), CONTRAST, method="both")
    grid, lines = views_of(result)
    assert isinstance(grid, Grid) and isinstance(lines, Lines)
    assert [measure.name for measure in grid.measures][:2] == [
        "effect",
        "effect estimated by attribution",
    ]
    assert grid.measures[0].meaning == "diverging"
    assert (grid.tokens[2], grid.second[2]) == tuple(
        tiny("llama").text_encoder.string(ids[2]) for ids in (CLEAN, CORRUPT)
    )
    assert [series.style for series in lines.series] == ["line", "dash"]
    told = sections_of(result)
    assert "restores at least half of the logit difference at layer.0" in told[0].prose
    assert (
        "The hidden state of the clean run at this layer and token replaces the one of"
        " the corrupted" in told[0].reading
    )
    assert len(told) == 2
    lines = result.summary().splitlines()
    assert "restores at least half of the logit difference at layer.0" in lines[1], (
        "the finding comes first"
    )
    assert any("an effect of exactly 0" in line for line in lines)
    gaps, *_ = views_of(
        hs.patch(tiny("llama"), replace(CONTRAST, corrupt=[*CORRUPT[:2], *CORRUPT[1:]]))
    )
    assert isinstance(gaps, Grid) and None in gaps.tokens and "Hatched" in gaps.note
    result.save(tmp_path / "patch.json")
    assert hs.Result.load(tmp_path / "patch.json").equals(result)


def test_sentences_say_no_more_than_was_computed(tiny: Tiny) -> None:
    model = tiny("llama")
    one = hs.patch(model, CONTRAST)
    several = hs.patch(
        model, [CONTRAST, replace(CONTRAST, corrupt=[7, 99, 46, 64, 31, 50])]
    )
    assert "except the token at which the answer is read" in one.summary()
    assert (
        "The token at which the answer is read keeps its own state"
        in sections_of(one)[1].reading
    )
    parts = hs.patch(model, CONTRAST, sites="*.mlp")
    assert "except the token at which" not in parts.summary(), (
        "what a branch adds is exchanged at all tokens"
    )
    assert "keeps its own state" not in sections_of(parts)[1].reading
    assert (
        "one pair of prompts; whether it holds for others was not tested"
        in one.summary()
    )
    assert (
        "averages over 2 pairs of prompts; differences between sites were not tested"
        in several.summary()
    )
    assert set(one.facts["layer_windows"]) == {
        "layers",
        "largest",
    }, "no thirds of the depth that are none"


def test_a_carrier_is_named_by_its_first_and_last_site_with_one_half(
    tiny: Tiny,
) -> None:
    result = hs.patch(tiny("llama"), CONTRAST)
    for name, column in (("differing_token", 2), ("answer_token", 5)):
        half = np.flatnonzero(result.data["effect"].values[:, column] >= 0.5)
        carrier = result.facts[name]
        assert [carrier["from"], carrier["to"]] == result.data["site"].values[
            half[[0, -1]]
        ].tolist()
        assert carrier["half_at"] == result.data["site"].values[half].tolist()


def test_where_a_token_carries_the_answer_is_told_as_ranges_and_nothing_else(
    tiny: Tiny,
) -> None:
    result = hs.patch(tiny("llama"), CONTRAST)
    sites = result.data["site"].values.tolist()

    def told(**changes: object) -> str:
        facts = {**result.facts, "answer_token": None, **changes}
        return (
            hs.Result("patch", result.data, facts, result.source)
            .summary()
            .splitlines()[1]
        )

    def carrier(*rows: int) -> dict[str, object]:
        return {
            **result.facts["differing_token"],
            "half_at": [sites[row] for row in rows],
        }

    assert "at layer.0 to layer.3 (" in told(differing_token=carrier(0, 1, 2, 3))
    assert "at layer.0 to layer.1 and layer.3 (" in told(
        differing_token=carrier(0, 1, 3)
    ), "no range over a gap"
    assert "No single state restores half of the logit difference" in told(
        differing_token=carrier()
    )


def test_the_command(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    given = [
        "patch",
        "The cat",
        "The hat",
        "--answer",
        " a",
        "--other",
        " c",
        "--model",
        str(tmp_path / "tiny"),
    ]
    done = CliRunner().invoke(
        app,
        [*given, "--method", "both", "--out", str(tmp_path / "patch.json"), "--quiet"],
    )
    assert done.exit_code == 0, done.output
    result = hs.Result.load(tmp_path / "patch.json")
    assert {"effect", "attribution"} <= set(result.data.data_vars)
    done = CliRunner().invoke(app, [*given, "--window", "0"])
    assert done.exit_code == 2
    assert "window must be an integer >= 1: got 0" in done.stderr


def test_the_command_with_every_option(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    given = [
        "patch",
        "The cat is",
        "The hat is",
        "--answer",
        " a",
        "--other",
        " c",
        "--model",
        str(tmp_path / "tiny"),
    ]
    given += [
        "--sites",
        "*.mlp",
        "--into",
        "clean",
        "--window",
        "2",
        "--layers",
        "0",
        "--at",
        "-2",
    ]
    done = CliRunner().invoke(
        app, [*given, "--out", str(tmp_path / "patch.json"), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    contrast = hs.Contrast("The cat is", "The hat is", " a", " c", at=-2)
    model = hs.load(tmp_path / "tiny")
    expected = hs.patch(
        model, contrast, sites="*.mlp", into="clean", window=2, layers=0
    )
    assert hs.Result.load(tmp_path / "patch.json").data.equals(expected.data)
    assert (
        CliRunner()
        .invoke(app, ["patch", "The cat", "--answer", " a", "--other", " c"])
        .exit_code
        == 2
    )


# Heads, neurons and ablation.

HEADS = hs.Contrast([5, 6, 7, 8], [9, 10, 7, 11], answer=11, other=12)


def _replaced_columns(model, contrast, site, values):
    """Put values into the columns of a head, in a pass of its own, as a share."""
    columns = model.anatomy.columns(hs.Site.parse(site))
    whole = site.replace("head", "z").rpartition(".")[0]

    def put(states):
        states[..., columns] = values[..., columns]
        return states

    def difference(ids, changes=None):
        if changes is None:
            logits = hs.record(model, [ids], (), logits=True).logits
        else:
            logits = hs.edit(model, [ids], changes, (), logits=True).logits
        return float(logits[-1, contrast.answer] - logits[-1, contrast.other])

    clean, corrupt = list(contrast.clean), list(contrast.corrupt)
    return difference, put, whole, clean, corrupt


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bloom", "falcon", "gemma3_text", "gptj"]
)
def test_the_effect_of_a_head_is_that_of_its_columns_in_a_pass_of_its_own(family):
    model = hs.load((tiny_model(family), None))
    result = hs.patch(model, HEADS, sites="*.attn.head.*")
    assert result.data["effect"].dims == ("site",)
    for site in ("layer.1.attn.head.0", "layer.2.attn.head.3"):
        whole = site.replace("head", "z").rpartition(".")[0]
        clean_z = hs.record(model, [list(HEADS.clean)], whole).states[whole]
        difference, put, whole, clean, corrupt = _replaced_columns(
            model, HEADS, site, clean_z
        )
        start = difference(corrupt)
        expected = (difference(corrupt, {whole: put}) - start) / (
            difference(clean) - start
        )
        effect = float(result.data["effect"].sel(site=site))
        assert effect == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("method", ["zero", "mean", "resample"])
def test_ablation_puts_other_values_into_the_clean_run(method):
    model = hs.load((tiny_model("llama"), None))
    site = "layer.2.attn.head.1"
    result = hs.patch(model, HEADS, sites="*.attn.head.*", method=method)
    both = [list(HEADS.clean), list(HEADS.corrupt)]
    z = model.capture(both, "layer.2.attn.z")
    values = {
        "zero": torch.zeros(4, 64),
        "mean": z.values[0].mean(0).expand(4, -1),
        "resample": z.of(1).values[0],
    }[method]
    difference, put, whole, clean, corrupt = _replaced_columns(
        model, HEADS, site, values
    )
    start = difference(clean)
    expected = (difference(clean, {whole: put}) - start) / (difference(corrupt) - start)
    assert result.facts["into"] == "clean"
    effect = float(result.data["effect"].sel(site=site))
    assert effect == pytest.approx(expected, abs=2e-5)


def test_resample_ablation_is_patching_into_the_clean_run():
    model = hs.load((tiny_model("llama"), None))
    one = hs.patch(model, HEADS, sites="*.attn.head.*", method="resample")
    other = hs.patch(model, HEADS, sites="*.attn.head.*", into="clean")
    assert one.data["effect"].equals(other.data["effect"])


def test_all_heads_patched_at_one_token_are_a_column_of_each_token():
    model = hs.load((tiny_model("llama"), None))
    each = hs.patch(model, HEADS, sites="layer.2.attn.head.*", window=1)
    assert each.data["effect"].dims == ("site", "token")
    # Tokens that only one prompt has are gaps; 7 is in both.
    token = int(np.flatnonzero(each.data["id"].values == 7)[0])
    chosen = hs.patch(model, HEADS, sites="layer.2.attn.head.*", window=[2])
    np.testing.assert_allclose(
        chosen.data["effect"], each.data["effect"][:, token], atol=1e-6
    )


def test_neurons_of_a_layer_patched_one_by_one():
    model = hs.load((tiny_model("llama"), None))
    result = hs.patch(model, HEADS, sites="layer.2.mlp.neuron.0-2")
    assert result.data["number"].values.tolist() == [0, 1, 2]
    assert np.isfinite(result.data["effect"]).all()


def test_contrasts_of_different_lengths_are_averaged_head_by_head():
    model = hs.load((tiny_model("llama"), None))
    longer = hs.Contrast([5, 6, 7, 8, 20], [9, 10, 7, 11, 20], answer=11, other=12)
    result = hs.patch(model, [HEADS, longer], sites="*.attn.head.*")
    one, two = (
        hs.patch(model, contrast, sites="*.attn.head.*").data["effect"].to_numpy()
        for contrast in (HEADS, longer)
    )
    np.testing.assert_allclose(result.data["effect"], (one + two) / 2, atol=1e-6)
    assert (result.data["low"] <= result.data["effect"]).all()
    assert (result.data["effect"] <= result.data["high"]).all()


def test_attribution_of_heads_agrees_with_small_exact_effects():
    model = hs.load((tiny_model("llama"), None))
    result = hs.patch(model, HEADS, sites="*.attn.head.*", method="both")
    assert result.facts["agreement"]["correlation"] > 0.8


def test_intervals_hold_all_heads_at_once_on_noise():
    from hiddenscope.analyses.patch.cells import Effects, Plan
    from hiddenscope.analyses.patch.findings import _intervals

    generator = np.random.default_rng(0)
    sites = tuple(hs.Site(1, f"attn.head.{head}") for head in range(40))
    plan = Plan(sites, 1, 0, "corrupt", exact=True, attribution=False, together=True)
    runs = 400
    missed = 0
    for _ in range(runs):
        effects = []
        for row in generator.standard_t(6, size=(8, 40)):
            patched = np.ones((40, 1), dtype=bool)
            effects.append(Effects({"effect": row[:, None]}, {}, {}, patched))
        intervals = _intervals(effects, plan, np.arange(8))
        low, high = intervals["low"][1], intervals["high"][1]
        missed += bool(((low > 0) | (high < 0)).any())
    # 5% of 400, and three standard errors above it.
    assert missed <= 33


def test_zeros_replace_tokens_that_only_the_clean_prompt_has():
    model = hs.load((tiny_model("llama"), None))
    contrast = hs.Contrast([5, 6, 7, 8], [5, 9], answer=11, other=12)
    result = hs.patch(model, contrast, sites="layer.2.attn.head.*", method="zero")
    site = "layer.2.attn.head.1"
    difference, put, whole, clean, corrupt = _replaced_columns(
        model, contrast, site, torch.zeros(4, 64)
    )
    start = difference(clean)
    expected = (difference(clean, {whole: put}) - start) / (difference(corrupt) - start)
    effect = float(result.data["effect"].sel(site=site))
    assert effect == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("position", [4, -5, 99])
def test_a_position_that_is_not_there_is_refused(position):
    model = hs.load((tiny_model("llama"), None))
    with pytest.raises(TextError, match="the clean prompt has 4 tokens"):
        hs.patch(model, HEADS, sites="*.attn.head.*", window=[position])
