"""Visibility: Jacobians held against plain autograd and finite differences, laws of the
cone, and honest error bars.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.analyses.visibility import maps
from hiddenscope.passes.jacobian import tape
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.calibrate.visibility import trial

# Torch's own forward mode, when it is first used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
IDS = [[5, 6, 7, 8]]
Tiny = Callable[..., hs.Model]


def double(family: str, attention: str = "eager") -> hs.Model:
    module: Any = tiny_model(family).double()
    module.set_attn_implementation(attention)
    return hs.load((module, None))


@pytest.fixture(scope="module")
def gpt2() -> hs.Model:
    return double("gpt2")


def test_a_state_that_is_written_over_later_keeps_its_own_gradient() -> None:
    """Falcon adds what attention gives to what its MLP gave, in place; gradients are
    finite differences.
    """
    model = hs.load((tiny_model("falcon").double(), None))
    generator = torch.Generator().manual_seed(0)
    run = tape(model, IDS, model.anatomy.select("*"))

    def moved(source: Site, target: Site, step: Tensor) -> Tensor:
        edited: Any = hs.edit(model, IDS, {source: hs.Add(step)}, target).states
        return edited[target]

    for target, source in (
        (Site(2), Site(2, "mlp")),
        (Site(3), Site(1, "attn")),
        (Site(2, "mlp"), Site(1)),
    ):
        vector, direction = torch.randn(
            2, 4, 64, generator=generator, dtype=torch.float64
        )
        gradient = dict(run.pull({target: vector[None]}))[source][0]
        sides = [moved(source, target, step * direction) for step in (1e-5, -1e-5)]
        slope = float(((sides[0] - sides[1]) * vector).sum()) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("logits", [False, True])
def test_a_pass_that_is_pulled_back_stops_at_its_last_site(logits: bool) -> None:
    model = hs.load((tiny_model("llama"), None))
    calls: list[object] = []
    for block in model.module.model.layers:  # type: ignore[union-attr]
        block.register_forward_hook(lambda *seen: calls.append(seen))  # type: ignore[union-attr, operator]
    tape(model, IDS, [Site(1)], logits=logits)
    calls.clear()  # those of trials
    tape(model, IDS, [Site(1)], logits=logits)
    assert len(calls) == (3 if logits else 1)


def cone(sites: int, tokens: int, causal: bool = True) -> Any:
    """What a state can see: itself, and lower sites, at tokens up to its own if causal."""
    site, token, source, other = np.indices((sites, tokens, sites, tokens))
    below = (source < site) & ((other <= token) | (not causal))
    return below | ((source == site) & (other == token))


def test_outside_the_causal_cone_is_exactly_zero_whether_the_text_is_cut_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = double("llama", "sdpa")
    found = {}
    # A token at a time, several, and the whole text for every target.
    for rows in (1, 64, 10**9):
        monkeypatch.setitem(maps.ROW_BUDGET, "cpu", rows)
        found[rows] = hs.visibility(model, IDS, sites="layer.*").data["l1"].to_numpy()
        assert (found[rows][~cone(4, 4)] == 0).all()
        assert (found[rows][cone(4, 4)] > 0).all()
    for rows in (1, 64):
        np.testing.assert_allclose(found[rows], found[10**9], rtol=1e-6)


def test_the_encoder_alone_needs_no_targets() -> None:
    module: Any = tiny_model("t5")
    for config in (module.config, module.generation_config):
        config.decoder_start_token_id = None
    model, sites = hs.load((module, None)), "encoder.layer.*"
    alone = hs.visibility(model, IDS, sites=sites)
    both = model.encode(IDS, targets=[[3, 9]])
    whole = hs.visibility(model, both, sites=sites).data["l1"]
    whole = whole.isel(token=slice(4), source_token=slice(4))
    np.testing.assert_allclose(alone.data["l1"], whole, rtol=1e-6)
    assert [facts["stack"] for facts in alone.facts["stacks"]] == ["encoder"]
    for sites, measure in (("layer.*", "l1"), ("encoder.layer.*", "logit")):
        with pytest.raises(hs.errors.TextError, match="decoder_start_token_id"):
            hs.visibility(model, IDS, sites=sites, influence=measure)  # type: ignore[arg-type]


def frobenius(model: hs.Model, ids: Any = IDS, **options: Any) -> hs.Result:
    return hs.visibility(
        model, ids, influence="frobenius", sites="layer.0,layer.2", **options
    )


def test_error_bars_hold_the_norm_of_a_jacobian_of_few_directions() -> None:
    for probes, directions in ((8, 1), (8, 16), (32, 1)):
        held = [trial(seed, probes, directions) for seed in range(10)]
        # Three standard errors of a share of 2,000.
        assert np.mean(held) >= 0.95 - 3 * (0.95 * 0.05 / 2000) ** 0.5, directions


def test_error_bars_of_a_mean_hold_too_since_every_text_has_probes_of_its_own(
    gpt2: hs.Model,
) -> None:
    """Eight times one text: what the mean is off by shrinks by the root of eight, as
    its bars do.
    """
    exact = frobenius(gpt2).data["frobenius"].to_numpy()
    inside = np.tri(2, 2, -1, dtype=bool)[:, None, :, None] & (exact > 0)
    off: dict[int, list[Any]] = {1: [], 8: []}
    held = []
    for seed in range(6):
        for count, found in off.items():
            sampling = hs.Sampling(align="position", probes=8)
            data = frobenius(gpt2, IDS * count, sampling=sampling, seed=seed).data
            found.append((data["frobenius"].to_numpy() - exact)[inside])
        half = data["frobenius_error"].to_numpy()[inside]
        held.append((np.abs(found[-1]) <= half).mean())
    one, mean = (np.sqrt(np.mean(np.square(found))) for found in off.values())
    # 0.35 if they are independent, 1 if they are the same.
    assert 0.25 < mean / one < 0.5
    assert np.mean(held) >= 0.95 - 2 * np.std(held) / len(held) ** 0.5


def test_as_many_probes_as_the_states_are_wide_are_exact(gpt2: hs.Model) -> None:
    def drawn(probes: int, seed: int) -> hs.Result:
        return frobenius(gpt2, sampling=hs.Sampling(probes=probes), seed=seed)

    exact, few = frobenius(gpt2), drawn(8, seed=3)
    assert "frobenius_error" not in exact.data
    assert exact.equals(drawn(64, seed=3))
    assert few.equals(drawn(8, seed=3))
    assert not few.equals(drawn(8, seed=4))
    truth = exact.data["frobenius"].to_numpy()
    many = drawn(32, seed=0).data["frobenius"].to_numpy()
    np.testing.assert_allclose(many, truth, rtol=0.3)
    half = few.data["frobenius_error"].to_numpy()[truth > 0]
    assert np.median(half / truth[truth > 0]) < 0.3


def test_many_texts_are_averaged_over_the_positions_that_all_have(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [[5, 6, 7, 8], [5, 9, 10], [5, 11, 7, 4, 3]]
    by_position = hs.Sampling(align="position")
    result = hs.visibility(model, texts, sampling=by_position)
    assert result.facts["texts"] == 3
    assert result.facts["cut"]
    assert "the length of the shortest, 3 tokens" in result.summary()
    assert result.data["id"].values.tolist() == [5, -1, -1]
    assert result.data["string"].values.tolist()[1:] == ["1", "2"]
    with pytest.raises(hs.errors.TextError, match="3 to 5 tokens"):
        hs.visibility(tiny("bert"), texts, sampling=by_position)


def test_narrow_states_come_out_near_wide_ones() -> None:
    module: Any = tiny_model("llama")
    wide = frobenius(hs.load((module, None))).data["frobenius"].to_numpy()
    module.to(torch.bfloat16)
    narrow = frobenius(hs.load((module, None))).data["frobenius"]
    np.testing.assert_allclose(narrow, wide, rtol=0.1, atol=0.02 * wide.max())


def test_what_cannot_be_answered_is_said(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    errors: Any = hs.errors
    eight = hs.Sampling(probes=8)
    absent, high = {"target": "nothing at all"}, {"target": 10**6}
    logit = {"influence": "logit"}
    for wrong, error, match in (
        ({"texts": [[5]]}, errors.TextError, "no other token can influence"),
        ({"sampling": eight}, errors.StatesError, "one vector for each target"),
        ({"target": " the"}, errors.TextError, "reads no token"),
        (logit | absent, errors.TextError, "tokens: "),
        (logit | high, errors.TextError, "ids of .* are 0"),
    ):
        with pytest.raises(error, match=match):
            hs.visibility(model, **{"texts": IDS, **wrong})
    with pytest.raises(errors.PassError, match="it has no head"):
        hs.visibility(tiny("gpt2", "base"), IDS, influence="logit")
    monkeypatch.setattr(
        "hiddenscope.analyses.visibility.compute.free_memory", lambda: 10_000
    )
    with pytest.raises(errors.TooLarge, match="Choose fewer sites"):
        hs.visibility(model, IDS)


def test_a_state_that_is_zero_has_no_direction_and_is_named() -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[6] = 0
    with pytest.raises(hs.errors.NotFinite, match=r"layer\.0"):
        hs.visibility(hs.load((module, tiny_tokenizer())), IDS)
