"""Profile: the norm of every state, held against numpy's, and what it shows on a real model."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer

TEXTS = ["The cat sat on the mat.", "A dog", "There is nothing in the house and nothing in the garden."]


def tiny(family: str) -> hs.Model:
    module = tiny_model(family)
    if module.config.is_encoder_decoder:
        module.config.decoder_start_token_id = 0
    return hs.load((module, tiny_tokenizer()))


def states(values: torch.Tensor, positions: list[int] | None = None) -> hs.States:
    count = values.shape[1]
    tokens = hs.Tokens(("text",), [0] * count, positions or range(count), range(count), [f"t{k}" for k in range(count)])
    sites = tuple(Site(k) for k in range(len(values)))
    return hs.States(sites, values, tokens, hs.Source("toy"))


def test_norms_are_those_of_the_states() -> None:
    model = tiny("gpt2")
    result, captured = hs.profile(model, TEXTS), model.capture(TEXTS)
    expected = np.linalg.norm(captured.to_numpy().astype(np.float64), axis=-1)
    norm = result.data["norm"]
    assert norm.dims == ("site", "token")
    assert norm.dtype == np.float32
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    assert norm["site"].values.tolist() == [str(site) for site in captured.sites]
    assert norm["string"].values.tolist() == list(captured.tokens.strings)
    for name, column in {"text": "text", "position": "positions", "id": "ids"}.items():
        assert norm[name].values.tolist() == getattr(captured.tokens, column).tolist()
    first = captured.tokens.positions == 0
    np.testing.assert_allclose(result.data["norm_first"], np.median(expected[:, first], 1), rtol=1e-6)
    quartiles = np.quantile(expected[:, ~first], [0.25, 0.5, 0.75], axis=1)
    for name, quartile in zip(("norm_low", "norm_median", "norm_high"), quartiles, strict=True):
        np.testing.assert_allclose(result.data[name], quartile, rtol=1e-5)


def test_states_and_model_give_the_same() -> None:
    model = tiny("llama")
    captured = model.capture(TEXTS)
    assert hs.profile(captured).equals(hs.profile(model, TEXTS))
    some = hs.profile(captured, sites="layer.1-2")
    assert some.data["site"].values.tolist() == ["layer.1", "layer.2"]
    assert hs.profile(model, TEXTS, sites="*.attn").data["site"].values.tolist()[0] == "layer.1.attn"


def test_anything_that_can_be_read_block_by_block_will_do() -> None:
    captured = tiny("llama").capture(TEXTS)

    class Store:
        sites, tokens = captured.sites, captured.tokens

        def blocks(self, site: str | Site) -> Iterator[torch.Tensor]:
            return captured.blocks(site, rows=3)

    assert hs.profile(Store()).data.equals(hs.profile(captured).data)


def test_both_stacks_of_an_encoder_decoder() -> None:
    result = hs.profile(tiny("t5"), TEXTS)
    data, stack = result.data, result.data["stack"].values
    inside = np.array([[site.startswith(one) for one in stack] for site in data["site"].values])
    assert set(stack) == {"encoder", "decoder"}
    assert (np.isfinite(data["norm"].values) == inside).all()
    assert {"encoder", "decoder"} <= set(result.facts)
    assert data.attrs["texts"] == TEXTS


def test_narrow_states_are_widened_once() -> None:
    wide = torch.randn(2, 5, 64) * 300  # the squares of these do not fit in float16
    result = hs.profile(states(wide.half()))
    assert result.facts["computed in"] == "float64"
    np.testing.assert_allclose(result.data["norm"], wide.half().float().norm(dim=-1), rtol=1e-6)


def test_facts_are_read_off_the_norms() -> None:
    norms = torch.tensor([[2.0, 1, 1], [40, 2, 4], [40, 2, 4], [9, 3, 3]])
    facts = hs.profile(states(norms[..., None])).facts["norm"]
    assert facts["middle layers"] == "layer.1 to layer.2"
    assert (facts["first token"], facts["other tokens"]) == (40, 3)
    assert facts["times as large"] == pytest.approx(40 / 3)
    assert facts["largest"] == {"norm": 40.0, "site": "layer.1", "token": "t0"}
    assert not any("final" in key for key in facts)


def test_a_text_of_one_token_has_no_others() -> None:
    result = hs.profile(states(torch.ones(4, 1, 3)))
    assert np.isnan(result.data["norm_median"]).all()
    assert "other tokens" not in result.facts["norm"]
    rest = hs.profile(states(torch.ones(4, 2, 3), positions=[4, 5]))
    assert "first token" not in rest.facts["norm"]


def test_what_is_not_finite_is_named() -> None:
    values = torch.ones(3, 2, 4)
    values[1, 1, 2] = torch.nan
    values[2, 1] = torch.inf
    facts = hs.profile(states(values)).facts["norm"]
    assert facts["not finite"] == {"states": 2, "first": {"site": "layer.1", "token": "t1"}}
    assert facts["largest"]["norm"] == 2
    assert "largest" not in hs.profile(states(values * torch.nan)).facts["norm"]


def test_what_is_missing_is_said() -> None:
    model = tiny("gpt2")
    with pytest.raises(hs.errors.TextError, match="there are no texts"):
        hs.profile(model)
    with pytest.raises(hs.errors.TextError, match="texts were given too"):
        hs.profile(model.capture("The"), "The")
    with pytest.raises(hs.errors.SiteError, match="layer.9"):
        hs.profile(model, "The", sites="layer.9")


@pytest.mark.real
def test_the_first_token_of_smollm2_is_far_larger_and_final_is_not() -> None:
    try:
        model = hs.load("smollm2")
    except hs.errors.Unreachable as error:
        pytest.skip(f"this is about smollm2 itself: {error}")
    facts = hs.profile(model, "The capital of France is Paris.").facts["norm"]
    assert facts["first token"] == pytest.approx(22_600, rel=0.05)
    assert 100 < facts["other tokens"] < 300
    assert facts["largest"]["token"] == "The"
    before, after = facts["first token from layer.30 to final"]
    assert before > 50 * after


def test_a_text_beyond_the_window_is_cut_when_asked() -> None:
    model = tiny("gpt2")
    window = model.encoder.window
    assert window
    with pytest.raises(hs.errors.TextError, match="truncate=True"):
        hs.profile(model, [[5] * (window + 1)])
    assert hs.profile(model, [[5] * (window + 1)], truncate=True).data.sizes["token"] == window
