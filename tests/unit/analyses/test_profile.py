"""Profile: held against numpy and scipy, and read from disk in blocks."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import StatesError, TextError
from hiddenscope.results import story_of, views_of
from hiddenscope.sites import Site
from tests.unit.analyses.blocks import Blocks

Tiny = Callable[..., hs.Model]
MARKS = Path("/proc/self/clear_refs")
TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house and nothing in the garden.",
]


def states(values: torch.Tensor, positions: list[int] | None = None) -> hs.States:
    count = values.shape[1]
    tokens = hs.Tokens(
        ("text",),
        [0] * count,
        positions or range(count),
        range(count),
        [f"t{k}" for k in range(count)],
    )
    sites = tuple(Site(k) for k in range(len(values)))
    return hs.States(sites, values, tokens, hs.Source("toy"))


def test_states_and_model_give_the_same(tiny: Tiny) -> None:
    model = tiny("llama")
    captured = model.capture(TEXTS)
    assert hs.profile(captured).equals(hs.profile(model, TEXTS))
    some = hs.profile(captured, sites="layer.1-2")
    assert some.data["site"].values.tolist() == ["layer.1", "layer.2"]
    parts = hs.profile(model, TEXTS, sites="*.attn")
    assert parts.data["site"].values.tolist()[0] == "layer.1.attn"


@pytest.mark.parametrize("rows", [7, 64, 10_000])
def test_a_source_in_blocks_gives_what_states_give_bit_for_bit(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks are held, and a block or two on the way."""
    captured = states(torch.randn(3, 300, 24).cumsum(0), [k % 50 for k in range(300)])
    at_once = hs.profile(captured, sample=100).data
    monkeypatch.setattr("hiddenscope.measures.running.CHUNK", 50 * 24)
    expected = hs.profile(captured, sample=100)
    for name in ("norm", "effective_rank", "added_median", "channel_value"):
        np.testing.assert_allclose(expected.data[name], at_once[name], rtol=1e-6)
    assert (expected.data["channel_position"] == at_once["channel_position"]).all()
    source = Blocks(captured, rows)
    result = hs.profile(source, sample=100)
    assert result.data.equals(expected.data)
    assert result.facts == expected.facts
    assert result.facts["stacks"][0]["cka"]["sampled_tokens"] == 100
    assert source.most <= 2 * 50 + 4 * min(rows, 300)
    # Each site is read by itself, and again below the next.
    assert source.asked == (2 * 3 - 1) * 300


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


@pytest.mark.slow
@pytest.mark.skipif(not MARKS.exists(), reason="memory is not told here")
def test_a_source_larger_than_what_is_held() -> None:
    """221 MB are read, and never held together: some 70 to 150 MB are."""

    def drawn(sites: int, tokens: int) -> Any:
        found = states(torch.zeros(sites, 1, 1).expand(sites, tokens, 1))

        def blocks(site: str | Site) -> Iterator[torch.Tensor]:
            for _ in range(tokens // 500):
                yield torch.randn(500, 256)

        return SimpleNamespace(sites=found.sites, tokens=found.tokens, blocks=blocks)

    # What libraries load and keep is there before.
    hs.profile(drawn(2, 8_000))
    # The high-water mark starts again from here.
    MARKS.write_text("5")
    before = resident("VmRSS")
    hs.profile(drawn(6, 36_000))
    assert resident("VmHWM") - before < 6 * 36_000 * 256 * 4


def test_a_source_of_very_many_tokens_is_told_in_its_first(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = tiny("llama").capture(TEXTS)
    whole = hs.profile(captured)
    monkeypatch.setattr("hiddenscope.analyses.profile.statistics.MOST_CELLS", 5 * 8)
    cut = hs.profile(captured)
    assert cut.data.sizes["token"] == 8
    np.testing.assert_array_equal(cut.data["norm"], whole.data["norm"][:, :8])
    for name in ("norm_median", "anisotropy", "effective_rank", "cka"):
        np.testing.assert_array_equal(cut.data[name], whole.data[name])
    assert (cut.facts["tokens_kept"], cut.facts["tokens"]) == (8, len(captured.tokens))
    assert "holds the first 8 of" in cut.summary()
    assert "holds the first" not in whole.summary()


def test_blocks_that_do_not_fit_the_tokens_are_refused(tiny: Tiny) -> None:
    captured = tiny("llama").capture(TEXTS)
    for rows in (
        lambda site: slice(0, -1),
        lambda site: slice(0, 0),
        lambda site: slice(site.layer or 0, None),
    ):
        store: Any = Blocks(captured, 5)
        store.blocks = lambda site, rows=rows: iter(
            [captured[site][rows(Site.parse(str(site)))]]
        )
        with pytest.raises(StatesError, match="as many rows as there are"):
            hs.profile(store)


def test_a_first_token_that_is_far_larger_decides_what_all_share() -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 400, 16)
    positions = [k % 20 for k in range(400)]
    values[:, ::20, 5] += 5000
    result = hs.profile(states(values, positions))
    data, (facts,) = result.data, result.facts["stacks"]
    assert (data["effective_rank"] < 1.01).all()
    assert (data["effective_rank_others"] > 14).all()
    # Layers that have nothing in common but the first token.
    assert (data["cka"] > 0.99).all()
    upper = np.triu_indices(4, 1)
    assert (data["cka_others"].values[upper] < 0.1).all()
    assert (data["anisotropy_others"] < 0.02).all()
    assert facts["effective_rank"]["all_tokens"] < 1.01


def test_every_massive_activation_is_counted_wherever_it_is() -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 400, 16)
    positions = [k % 20 for k in range(400)]
    values[1, ::20, 5] = 5000  # one channel of every first token
    # The same channel, of a hundred tokens that are smaller, five of them first ones.
    values[1, 7:107, 5] = 4000
    values[2, 11, [2, 3]] = torch.tensor([-3000.0, 2500.0])
    captured = states(values, positions)
    for source in (captured, Blocks(captured, 64)):
        result = hs.profile(source)
        (facts,) = result.facts["stacks"]
        massive = facts["massive_activations"]
        assert massive["values"] == 117, "20 + 95 + 2"
        assert massive["at_first_tokens"] == 20
        counts = [(one["channel"], one["values"]) for one in massive["channels"]]
        assert counts == [(5, 115), (2, 1), (3, 1)]
        assert massive["sites"] == "layer.1 to layer.2"
        assert "117 values" in result.summary()
        assert "20 of them at a first token" in result.summary()


def test_few_channels_leave_places_empty() -> None:
    data = hs.profile(states(torch.randn(2, 30, 3))).data
    assert data["channel"].values[0, 3:].tolist() == [-1, -1]
    assert np.isnan(data["channel_times"].values[0, 3:]).all()
    assert data["channel_string"].values[0, 3:].tolist() == ["", ""]


def test_raw_layers_are_compared_with_raw_ones_and_normed_with_normed(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    raw, mixed, normed = (
        hs.profile(model, TEXTS, final_norm=how)
        for how in ("apart", "mixed", "everywhere")
    )
    assert raw.data["form"].values.tolist() == ["raw"] * 4 + ["normed"]
    assert np.isnan(raw.data["anisotropy"].values[-1])
    assert np.isnan(raw.data["cka"].values[-1]).all()
    # What each state is by itself is told of final too.
    assert np.isfinite(raw.data["norm"].values).all()
    assert np.isfinite(mixed.data["cka"].values).all()
    assert np.isnan(mixed.data["added_median"].values[-1]), "the final norm is no block"
    assert " ".join(normed.data["site"].values) == "layer.0 layer.1 layer.2 layer.3"
    assert set(normed.data["form"].values) == {"normed"}
    captured = model.capture(TEXTS)
    np.testing.assert_allclose(normed.data["norm"][-1], raw.data["norm"][-1], rtol=1e-6)
    norm = model.module.model.norm
    for site in ("layer.0", "layer.2"):
        expected = norm(captured[site]).detach().norm(dim=-1)
        np.testing.assert_allclose(
            normed.data["norm"].sel(site=site), expected, rtol=1e-5
        )
    alone = hs.profile(model, TEXTS, sites="final")
    # Nothing else is there to compare it with.
    assert np.isfinite(alone.data["anisotropy"].values).all()


def test_what_cannot_be_profiled_is_said(tiny: Tiny) -> None:
    model = tiny("llama")
    captured = model.capture(TEXTS)
    texts, everywhere = (model, TEXTS), {"final_norm": "everywhere"}
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        ((captured,), everywhere, StatesError, "takes the model"),
        ((tiny("t5"), TEXTS), everywhere, StatesError, "two stacks"),
        ((tiny("bert"), TEXTS), everywhere, StatesError, "no final norm"),
        (texts, {"sites": "*.attn"} | everywhere, StatesError, "no whole layers"),
        ((TEXTS,), {}, StatesError, "it is list"),
        ((captured.select(tokens=[]),), {}, StatesError, "no tokens"),
        ((model,), {}, TextError, "there are no texts"),
        ((captured, "The"), {}, TextError, "texts were given too"),
    ]
    for arguments, options, error, match in cases:
        with pytest.raises(error, match=match):
            hs.profile(*arguments, **options)


@pytest.mark.parametrize(
    "values", [torch.zeros(3, 30, 6), torch.full((3, 30, 6), 0.1), torch.zeros(3, 1, 6)]
)
def test_states_without_a_spread_have_no_shape(values: torch.Tensor) -> None:
    result = hs.profile(states(values))
    for name in ("effective_rank", "intrinsic_dimension"):
        assert np.isnan(result.data[name].values).all()
        assert np.isnan(result.data[f"{name}_others"].values).all()
    assert "cka" not in result.data
    assert "median" not in result.facts["stacks"][0].get("cka", {})
    if values.shape[1] > 1:
        expected = [1.0] * 3 if values.any() else [math.nan] * 3
        np.testing.assert_allclose(result.data["anisotropy"], expected, rtol=1e-6)
    assert views_of(result)
    assert story_of(result)


def test_one_site_is_like_itself_and_parts_of_blocks_have_no_block_between_them(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    one = hs.profile(model, TEXTS, sites="layer.2")
    assert one.data["cka"].values.tolist() == [[1.0]]
    assert "cka" not in one.facts["stacks"][0]
    assert np.isnan(one.data["added_median"].values).all()
    parts = hs.profile(model, TEXTS, sites="layer.1,layer.2.attn,layer.2,layer.2.mlp")
    assert np.isnan(parts.data["added_median"].values).all()
    assert np.isfinite(parts.data["cka"].values).all()
    for result in (one, parts):
        assert views_of(result)


def test_what_is_not_finite_is_left_out_of_what_states_share() -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 60, 5)
    broken = values.clone()
    broken[1, 7, 2], broken[2, 11] = torch.nan, torch.inf
    data = hs.profile(states(broken)).data

    def without(*rows: int) -> Any:
        kept = [row for row in range(60) if row not in rows]
        return hs.profile(states(values).select(tokens=kept)).data

    np.testing.assert_allclose(data["cka"], without(7, 11)["cka"], rtol=1e-6)
    expected = without(7).isel(site=1)
    names = "anisotropy effective_rank_others intrinsic_dimension channel_times"
    for name in names.split():
        np.testing.assert_allclose(data[name][1], expected[name], rtol=1e-6)


def test_narrow_states_are_profiled_as_what_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        # Their squares do not fit in float16.
        narrow = (torch.randn(3, 80, 12) * 300).to(dtype)
        result, wide = hs.profile(states(narrow)), hs.profile(states(narrow.double()))
        assert result.data.equals(wide.data)
        assert result.facts == wide.facts
        assert result.facts["computed_in"] == "float64"


def test_facts_are_read_off_the_norms() -> None:
    norms = torch.tensor([[2.0, 1, 1], *[[40, 2, 4]] * 4, [9, 3, 3]])
    raw = states(norms[..., None])
    (facts,) = hs.profile(raw).facts["stacks"]
    assert facts["middle_layers"] == "layer.1 to layer.4"
    assert (facts["first_token_norm"], facts["other_tokens_norm"]) == (40, 3)
    assert facts["norm_ratio"] == pytest.approx(40 / 3)
    assert facts["largest_norm"] == {"norm": 40.0, "site": "layer.1", "token": "t0"}
    assert not any("final" in key for key in facts)
    sites = (*raw.sites[:-1], Site(None))
    normed = hs.States(sites, raw.values, raw.tokens, raw.source)
    (facts,) = hs.profile(normed).facts["stacks"]
    names = ("site", "first_token_norm", "other_tokens_norm")
    ends = [
        [facts[end][name] for name in names] for end in ("before_final", "at_final")
    ]
    assert ends == [["layer.4", 40, 3], ["final", 9, 3]]
    one = hs.profile(states(torch.ones(4, 1, 3)))
    assert np.isnan(one.data["norm_median"]).all()
    assert "other_tokens_norm" not in one.facts["stacks"][0]
    rest = hs.profile(states(torch.ones(4, 2, 3), positions=[4, 5]))
    assert "first_token_norm" not in rest.facts["stacks"][0]


def test_what_is_not_finite_is_named() -> None:
    values = torch.ones(3, 2, 4)
    values[1, 1, 2] = torch.nan
    values[2, 1] = torch.inf
    (facts,) = hs.profile(states(values)).facts["stacks"]
    assert facts["not_finite"] == {"states": 2, "site": "layer.1", "token": "t1"}
    assert facts["largest_norm"]["norm"] == 2
    (facts,) = hs.profile(states(values * torch.nan)).facts["stacks"]
    assert "largest_norm" not in facts
