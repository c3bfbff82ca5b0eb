"""Visibility: Jacobians held against plain autograd and finite differences, laws of the
cone, and honest error bars.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.visibility import maps
from hiddenscope.cli.main import app
from hiddenscope.passes import record
from hiddenscope.passes.jacobian import tape
from hiddenscope.results import story_of, views_of
from hiddenscope.results.pictures import Grid, Lines
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


def test_influence_is_that_of_the_jacobian_of_an_uncut_pass(gpt2: hs.Model) -> None:
    live = record(gpt2, IDS, "layer.*,final", grad=True).live
    module: Any = gpt2.module
    with torch.no_grad():
        answer = int(module(torch.tensor(IDS)).logits[0, -1].argmax())
    following = torch.tensor([*IDS[0][1:], answer])

    def length(h: Tensor) -> Tensor:
        return h.abs().sum(-1) / h.norm(dim=-1)

    def said(h: Tensor) -> Tensor:
        return module.lm_head(h).log_softmax(-1).gather(-1, following[:, None])[:, 0]

    results = {}
    for measure in ("frobenius", "l1", "relative", "logit"):
        results[measure] = hs.visibility(gpt2, IDS, influence=measure)  # type: ignore[arg-type]
    for target, source in ("layer.3", "layer.0"), ("final", "layer.1"):
        x, y = live[Site.parse(source)], live[Site.parse(target)]
        basis = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
        (rows,) = torch.autograd.grad(
            y, x, basis, retain_graph=True, is_grads_batched=True
        )
        # [token, width, source token, width].
        jacobian = rows.view(*y.shape[1:], *x.shape[1:])
        frobenius = jacobian.norm(dim=(1, 3))  # type: ignore[arg-type]
        norms = [side.detach()[0].norm(dim=-1) for side in (x, y)]
        expected = {
            "frobenius": frobenius,
            "relative": frobenius * norms[0] / norms[1][:, None],
        }
        for measure, function in (("l1", length), ("logit", said)):
            h = y[0].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(function(h).sum(), h)
            seen = torch.einsum("tw,twsv->tsv", gradient, jacobian)
            expected[measure] = seen.norm(1 if measure == "l1" else 2, dim=-1)
        if target != "final":
            del expected["logit"]
        for measure, values in expected.items():
            cells = results[measure].data[measure].sel(source_site=source)
            if measure != "logit":
                cells = cells.sel(site=target)
            np.testing.assert_allclose(cells, values, rtol=1e-5, atol=1e-12)
    result = results["logit"]
    assert result.data["logit"].dims == ("token", "source_site", "source_token")
    assert result.facts["stacks"][0]["targets"] == ["6", "7", "8", str(answer)]
    one = hs.visibility(gpt2, IDS, influence="logit", target=6).data["logit"]
    np.testing.assert_allclose(one[0], result.data["logit"][0], rtol=1e-6)
    assert not np.allclose(one[1], result.data["logit"][1])
    assert "were not tested" in result.summary()


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


def live(model: hs.Model, sites: Any, ids: list[list[int]], targets: Any = None) -> Any:
    """The same products by an uncut pass, one backward pass for each pair of sites."""
    done = record(model, ids, sites, targets=targets, grad=True)
    taps = model.anatomy.taps

    def product(target: Site, source: Site, vector: Tensor) -> Tensor:
        output = taps[target].layout.states(done.live[target], len(vector))
        options = {"allow_unused": True, "materialize_grads": True}
        (found,) = torch.autograd.grad(
            output, done.live[source], vector[None], retain_graph=True, **options
        )
        of_decoder = source.stack == "decoder"
        tokens = len((targets if of_decoder else ids)[0])
        return taps[source].layout.states(found, tokens)[0]

    return product


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("llama", "*"),
        ("t5", "layer.*"),
        pytest.param("t5", "*", marks=pytest.mark.slow),
        pytest.param("bart", "*", marks=pytest.mark.slow),
        pytest.param("mamba", "*", marks=pytest.mark.slow),
    ],
)
def test_a_cut_pass_gives_what_an_uncut_one_gives_at_every_pair_of_sites(
    tiny: Tiny, family: str, where: str
) -> None:
    model = tiny(family)
    two = len(model.anatomy.stacks) > 1
    ids, targets = [[5, 6, 7, 8, 9]], [[3, 9, 4]] if two else None
    sites = model.anatomy.select(where)
    run = tape(model, model.encode(ids, targets=targets), sites)
    product = live(model, sites, ids, targets)
    generator = torch.Generator().manual_seed(0)
    seeds = {
        site: torch.randn(1, *run.values(site).shape, generator=generator)
        for site in sites
    }
    order = sorted(sites, reverse=True)
    for source, found in run.pull(seeds):
        assert len(found) == order.index(source) + 1
        for target, row in zip(order, found, strict=False):
            expected = product(target, source, seeds[target][0])
            largest = float(expected.abs().max())
            assert torch.allclose(row, expected, rtol=1e-3, atol=1e-4 * largest)


def test_an_encoder_sees_all_of_a_text(tiny: Tiny) -> None:
    found = hs.visibility(tiny("bert"), IDS).data["l1"].to_numpy()
    seen = cone(4, 4, causal=False)
    assert (found[seen] > 0).all()
    assert (found[~seen] == 0).all()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_sees_the_encoder_and_not_the_other_way(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    result = hs.visibility(model, model.encode(IDS, targets=[[3, 9, 4]]))
    data = result.data["l1"]
    assert data["stack"].values.tolist() == ["encoder"] * 4 + ["decoder"] * 3
    of_encoder = np.array([site.startswith("enc") for site in data["site"].values])
    inside = of_encoder[:, None] == (data["stack"].values == "encoder")
    there = np.isfinite(data.to_numpy())
    assert (there == (inside[:, :, None, None] & inside)).all()
    back = data.to_numpy()[of_encoder][:, :4][:, :, ~of_encoder, 4:]
    assert (back == 0).all()
    across = data.to_numpy()[~of_encoder][:, 4:][:, :, of_encoder, :4]
    assert (across[0] == 0).all(), "the first state of a decoder is an embedding"
    assert (across[1:] > 0).all()
    stacks = [facts["stack"] for facts in result.facts["stacks"]]
    assert stacks == ["encoder", "decoder"]
    assert 0 < result.facts["cross"]["share"] < 1


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
    apart = [hs.visibility(model, [text[:3]]).data["l1"] for text in texts]
    np.testing.assert_allclose(result.data["l1"], np.mean(apart, axis=0), rtol=1e-5)
    assert result.facts["texts"] == 3
    assert result.facts["cut"]
    assert "the length of the shortest, 3 tokens" in result.summary()
    assert result.data["id"].values.tolist() == [5, -1, -1]
    assert result.data["string"].values.tolist()[1:] == ["1", "2"]
    with pytest.raises(hs.errors.TextError, match="3 to 5 tokens"):
        hs.visibility(tiny("bert"), texts, sampling=by_position)


def test_nothing_is_left_on_the_module_and_no_weight_gets_a_gradient(
    tiny: Tiny, hanging: Callable[[nn.Module], Any]
) -> None:
    for family, frozen in (("gpt2", False), ("llama", True)):
        module = tiny_model(family)
        module.requires_grad_(not frozen)
        model = hs.load((module, None))
        before = hanging(module)
        with torch.no_grad():
            first = hs.visibility(model, IDS, sites="*")
        assert hanging(module) == before
        assert all(
            weight.grad is None and weight.requires_grad is not frozen
            for weight in module.parameters()
        )
        with torch.inference_mode():
            assert hs.visibility(model, IDS, sites="*").equals(first)


def test_narrow_states_come_out_near_wide_ones() -> None:
    module: Any = tiny_model("llama")
    wide = frobenius(hs.load((module, None))).data["frobenius"].to_numpy()
    module.to(torch.bfloat16)
    narrow = frobenius(hs.load((module, None))).data["frobenius"]
    np.testing.assert_allclose(narrow, wide, rtol=0.1, atol=0.02 * wide.max())


def test_findings_are_read_off_the_map(gpt2: hs.Model) -> None:
    result = hs.visibility(gpt2, IDS)
    values = result.data["l1"].to_numpy().astype(np.float64)
    seen, top = values[2, :, 1], values[-1, :, 0]
    near = np.mean([top[2, 1], top[3, 2]])
    own = np.mean([top[1, 1], top[2, 2], top[3, 3]])
    shares = [seen[t, t] / seen[t].sum() for t in (1, 2, 3)]
    for found, expected in (
        (result.data["own_below"].sel(site="layer.2"), np.mean(shares)),
        (result.data["decay_first"].sel(distance=1), near / own),
        (result.data["reach"].sel(source_site="layer.0"), top.sum(-1).mean()),
    ):
        assert float(found) == pytest.approx(expected, rel=1e-5)
    assert float(result.data["own_below"].sel(site="final")) == 1
    assert result.facts["stacks"][0]["own_below"]["least"]["site"] != "final"


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
        ({"sites": "layer.9"}, errors.SiteError, "layer.9"),
        ({"influence": "l2"}, errors.ArgumentError, "'l1' or 'frobenius' or"),
        ({"sampling": eight}, errors.StatesError, "one vector for each target"),
        ({"target": " the"}, errors.TextError, "reads no token"),
        (logit | absent, errors.TextError, "tokens: "),
        (logit | high, errors.TextError, "ids of .* are 0"),
    ):
        with pytest.raises(error, match=match):
            hs.visibility(model, **{"texts": IDS, **wrong})
    with pytest.raises(errors.PassError, match="no language-model head"):
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


@pytest.mark.parametrize("measure", ["l1", "logit"])
def test_the_pictures_hold_both_quadrants_of_every_state(
    tiny: Tiny, measure: Any
) -> None:
    for model, targets in ((tiny("llama"), None), (tiny("t5"), [[3, 9, 4]])):
        inputs = model.encode(IDS, targets=targets)
        result = hs.visibility(model, inputs, influence=measure)
        grid, *lines = views_of(result)
        assert isinstance(grid, Grid)
        influence = grid.measures[0].influence
        assert influence is not None
        if measure == "l1":
            values = result.data["l1"].to_numpy()
            same = np.eye(values[0, 0].size, dtype=bool).reshape(values.shape)
            assert np.isnan(influence[same]).all()
            np.testing.assert_array_equal(influence[~same], values[~same])
            numbers = grid.measures[0].numbers[:-1]
            np.testing.assert_array_equal(numbers, values[-1, -1, :-1])
        else:
            seen = result.data["logit"].to_numpy()
            np.testing.assert_array_equal(influence[-1, -len(seen) :], seen)
            assert np.isnan(influence[:-1]).all()
            np.testing.assert_array_equal(grid.measures[0].numbers, seen[-1])
        assert lines
        assert all(isinstance(view, Lines) for view in lines)
        assert len(story_of(result)) == 2


def test_the_command_prints_the_findings_and_keeps_the_map(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    model, out = str(tmp_path / "model"), tmp_path / "map.nc"
    asked = ["visibility", "The cat sat", "--model", model, "--sites", "layer.*"]
    done = CliRunner().invoke(app, [*asked, "--quiet", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "comes from the same" in done.output
    expected = hs.visibility(hs.load(model), ["The cat sat"], sites="layer.*")
    assert hs.Result.load(out).equals(expected)
    wrong = CliRunner().invoke(app, [*asked, "--influence", "l3"])
    assert wrong.exit_code == 2
    assert "'l1', 'frobenius', 'relative'" in wrong.output
    words = [f"the cats sat on the mat and the dog number {k} ran" for k in range(3)]
    (tmp_path / "texts.txt").write_text("\n".join(words), encoding="utf-8")
    many = ["visibility", f"@{tmp_path / 'texts.txt'}", "--model", model, "--quiet"]
    drawn = CliRunner().invoke(app, [*many, "--per-text", "3", "--baseline", "random"])
    assert drawn.exit_code == 0, drawn.output
    assert "9 states were drawn" in " ".join(drawn.output.split())
    assert "random weights" in drawn.output
