"""Visibility: Jacobians held against torch.func and finite differences, laws of the
cone, and honest error bars.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import views_of
from hiddenscope.views.kinds import visibility as visibility_kind
from hiddenscope.views.values import Grid, Lines

# Torch's own forward mode, when it is first used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
IDS = [[5, 6, 7, 8]]
LAYERS = 3
Tiny = Callable[..., hs.Model]


def families(*names: str) -> list[Any]:
    """Leave all but two for the slow tests."""
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in names[2:]]
    return [*names[:2], *slow]


def double(family: str, attention: str = "eager") -> hs.Model:
    module: Any = tiny_model(family).double()
    module.set_attn_implementation(attention)
    return hs.load((module, None))


@pytest.fixture(scope="module")
def gpt2() -> hs.Model:
    return double("gpt2")


@contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def above(module: Any, source: int, target: int | None) -> Callable[[Tensor], Tensor]:
    """A tiny gpt2 as a function of what enters block `source`: the state after `target`
    blocks, or after its norm.
    """
    blocks, kept = module.transformer.h, {}

    def enter(part: nn.Module, args: Any) -> Any:
        return (kept["x"][None], *args[1:])

    def leave(part: nn.Module, args: Any, output: Any) -> None:
        kept["y"] = (output[0] if isinstance(output, tuple) else output)[0]

    def function(x: Tensor) -> Tensor:
        kept["x"] = x
        last = module.transformer.ln_f if target is None else blocks[target - 1]
        first = blocks[source] if source < len(blocks) else module.transformer.ln_f
        with hooked(
            [first.register_forward_pre_hook(enter), last.register_forward_hook(leave)]
        ):
            module(torch.tensor(IDS), use_cache=False)
        return kept["y"]

    return function


def jacrev(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    found: Tensor = torch.func.jacrev(function)(at)
    return found.detach()


def state(model: hs.Model, site: str) -> Tensor:
    return record(model, IDS, site).states[site]  # type: ignore[index]


def test_influence_is_that_of_the_jacobian_that_torch_func_gives(
    gpt2: hs.Model,
) -> None:
    found = {}
    for measure in ("frobenius", "l1", "relative"):
        found[measure] = hs.visibility(gpt2, IDS, influence=measure).data[measure]  # type: ignore[arg-type]
    for target, source in ((3, 0), (2, 1), (None, 1)):
        function = above(gpt2.module, source, target)

        def length(
            x: Tensor, function: Callable[[Tensor], Tensor] = function
        ) -> Tensor:
            h = function(x)
            return h.abs().sum(-1) / h.norm(dim=-1)

        x = state(gpt2, f"layer.{source}")
        # [token, width, source token, width].
        frobenius = jacrev(function, x).norm(dim=(1, 3))  # type: ignore[arg-type]
        seen = function(x).detach().norm(dim=-1)
        expected = {
            "frobenius": frobenius,
            "l1": jacrev(length, x).abs().sum(-1),
            "relative": frobenius * x.norm(dim=-1) / seen[:, None],
        }
        name = "final" if target is None else f"layer.{target}"
        for measure, values in expected.items():
            cells = found[measure].sel(site=name, source_site=f"layer.{source}")
            np.testing.assert_allclose(cells, values, rtol=1e-5, atol=1e-12)


def test_logit_is_the_gradient_of_the_log_probability_of_what_follows(
    gpt2: hs.Model,
) -> None:
    result = hs.visibility(gpt2, IDS, influence="logit")
    with torch.no_grad():
        answer = int(gpt2.module(torch.tensor(IDS)).logits[0, -1].argmax())
    asked = torch.tensor([*IDS[0][1:], answer])
    head: Any = gpt2.module.lm_head
    for source in range(LAYERS):

        def said(x: Tensor, source: int = source) -> Tensor:
            return (
                head(above(gpt2.module, source, None)(x))
                .log_softmax(-1)
                .gather(-1, asked[:, None])[:, 0]
            )

        expected = jacrev(said, state(gpt2, f"layer.{source}")).norm(dim=-1)
        np.testing.assert_allclose(
            result.data["logit"].sel(source_site=f"layer.{source}"), expected, rtol=1e-5
        )
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


def cone(sites: int, tokens: int) -> Any:
    """What a causal state can see: itself, and at lower sites the tokens up to its own."""
    low = (
        np.tri(sites, sites, -1, dtype=bool)[:, None, :, None]
        & np.tri(tokens, tokens, dtype=bool)[None, :, None]
    )
    return low | (
        np.eye(sites, dtype=bool)[:, None, :, None]
        & np.eye(tokens, dtype=bool)[None, :, None]
    )


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
        tokens = [
            len((targets or ids)[0] if site.stack == "decoder" else ids[0])
            for site in (target, source)
        ]
        output = taps[target].layout.states(done.live[target], tokens[0])
        (found,) = torch.autograd.grad(
            output,
            done.live[source],
            vector[None],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return taps[source].layout.states(found, tokens[1])[0]

    return product


@pytest.mark.parametrize("family", families("llama", "t5", "bert", "bart", "mamba"))
def test_a_cut_pass_gives_what_an_uncut_one_gives_at_every_pair_of_sites(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    two = len(model.anatomy.stacks) > 1
    ids, targets = [[5, 6, 7, 8, 9]], [[3, 9, 4]] if two else None
    sites = model.anatomy.select("*")
    run, product = (
        tape(model, model.encode(ids, targets=targets), sites),
        live(model, sites, ids, targets),
    )
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
            assert torch.allclose(
                row, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
            )


def test_an_encoder_sees_all_of_a_text(tiny: Tiny) -> None:
    found = hs.visibility(tiny("bert"), IDS).data["l1"].to_numpy()
    low = np.tri(4, 4, -1, dtype=bool)[:, None, :, None] & np.ones(
        (1, 4, 1, 4), dtype=bool
    )
    assert (found[low] > 0).all()
    assert (found[~(low | cone(4, 4))] == 0).all()


@pytest.mark.parametrize("family", families("t5", "bart"))
def test_a_decoder_sees_the_encoder_and_not_the_other_way(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    result = hs.visibility(model, model.encode(IDS, targets=[[3, 9, 4]]))
    data = result.data["l1"]
    assert data.shape[1] == 7
    encoder, decoder = (
        [str(site) for site in data["site"].values if str(site).startswith(stack)]
        for stack in ("encoder", "decoder")
    )
    there = np.isfinite(data.to_numpy())
    inside = np.array(
        [
            [str(site).startswith(one) for one in data["stack"].values]
            for site in data["site"].values
        ]
    )
    assert (there == (inside[:, :, None, None] & inside)).all()
    assert (
        data.sel(site=encoder, source_site=decoder).isel(
            token=slice(4), source_token=slice(4, None)
        )
        == 0
    ).all()
    cross = data.sel(source_site=encoder).isel(
        token=slice(4, None), source_token=slice(4)
    )
    assert (cross.sel(site="decoder.layer.0") == 0).all()
    assert (cross.sel(site=decoder[1:]) > 0).all()
    assert [facts["stack"] for facts in result.facts["stacks"]] == [
        "encoder",
        "decoder",
    ]
    assert 0 < result.facts["cross"]["share"] < 1


def test_the_encoder_alone_needs_no_targets() -> None:
    module: Any = tiny_model("t5")
    module.config.decoder_start_token_id = (
        module.generation_config.decoder_start_token_id
    ) = None
    model = hs.load((module, None))
    alone = hs.visibility(model, IDS, sites="encoder.layer.*")
    whole = hs.visibility(
        model, model.encode(IDS, targets=[[3, 9]]), sites="encoder.layer.*"
    ).data["l1"]
    np.testing.assert_allclose(
        alone.data["l1"], whole.isel(token=slice(4), source_token=slice(4)), rtol=1e-6
    )
    assert [facts["stack"] for facts in alone.facts["stacks"]] == ["encoder"]
    for sites, measure in (("layer.*", "l1"), ("encoder.layer.*", "logit")):
        with pytest.raises(hs.errors.TextError, match="decoder_start_token_id"):
            hs.visibility(model, IDS, sites=sites, influence=measure)  # type: ignore[arg-type]


def frobenius(model: hs.Model, ids: Any = IDS, **options: Any) -> hs.Result:
    return hs.visibility(
        model, ids, influence="frobenius", sites="layer.0,layer.2", **options
    )


def test_error_bars_hold_the_exact_value(gpt2: hs.Model) -> None:
    """Over 40 draws of 8 probes: 95% of all estimates within their bars, up to what chance
    makes of so many.
    """
    exact = frobenius(gpt2).data["frobenius"].to_numpy()
    inside = exact > 0
    held, wide = [], []
    for seed in range(40):
        data = frobenius(gpt2, sampling=hs.Sampling(probes=8), seed=seed).data
        estimate = data["frobenius"].to_numpy()
        half = data["frobenius_error"].to_numpy()[inside]
        off = np.abs(estimate - exact)[inside]
        held.append((off <= half + 1e-6 * exact[inside]).mean())
        wide.append(np.median(half / estimate[inside]))
        assert (estimate[~inside] == 0).all()
    assert np.mean(held) >= 0.95 - 2 * np.std(held) / len(held) ** 0.5
    assert np.median(wide) < 0.3
    many = frobenius(gpt2, sampling=hs.Sampling(probes=32)).data["frobenius"]
    np.testing.assert_allclose(many.to_numpy()[inside], exact[inside], rtol=0.3)


@pytest.mark.slow
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
    for seed in range(8):
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


def test_many_texts_are_averaged_over_the_positions_that_all_have(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [[5, 6, 7, 8], [5, 9, 10], [5, 11, 7, 4, 3]]
    by_position = hs.Sampling(align="position")
    result = hs.visibility(model, texts, sampling=by_position)
    apart = [
        hs.visibility(model, [text[:3]]).data["l1"].to_numpy().astype(np.float64)
        for text in texts
    ]
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
    seen = values[2, :, 1]
    shares = [seen[t, t] / seen[t].sum() for t in (1, 2, 3)]
    assert float(result.data["own_below"].sel(site="layer.2")) == pytest.approx(
        np.mean(shares), rel=1e-5
    )
    top = values[-1, :, 0]
    near, own = (
        np.mean([top[2, 1], top[3, 2]]),
        np.mean([top[1, 1], top[2, 2], top[3, 3]]),
    )
    assert float(result.data["decay_first"].sel(distance=1)) == pytest.approx(
        near / own, rel=1e-5
    )
    assert float(result.data["reach"].sel(source_site="layer.0")) == pytest.approx(
        top.sum(-1).mean(), rel=1e-5
    )
    assert float(result.data["own_below"].sel(site="final")) == 1
    assert result.facts["stacks"][0]["own_below"]["least"]["site"] != "final"


def test_what_cannot_be_answered_is_said(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    errors: Any = hs.errors
    one, eight = hs.Sampling(probes=1), hs.Sampling(probes=8)
    absent, high = {"target": "nothing at all"}, {"target": 10**6}
    logit, frobenius = {"influence": "logit"}, {"influence": "frobenius"}
    for wrong, error, match in (
        ({"texts": [[5]]}, errors.TextError, "no other token can influence"),
        ({"sites": "layer.9"}, errors.SiteError, "layer.9"),
        ({"influence": "l2"}, errors.StatesError, "l1, frobenius, relative, logit"),
        (frobenius | {"sampling": one}, errors.StatesError, "at least two"),
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
        "hiddenscope.analyses.visibility.visibility.free_memory", lambda: 10_000
    )
    with pytest.raises(errors.TooLarge, match="Choose fewer sites"):
        hs.visibility(model, IDS)


def test_a_state_that_is_zero_has_no_direction_and_is_named() -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[6] = 0
    with pytest.raises(hs.errors.NotFinite, match=r"layer\.0"):
        hs.visibility(hs.load((module, tiny_tokenizer())), IDS)


def folder(tmp_path: Path) -> Path:
    module: Any = tiny_model("llama")
    module.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("measure", ["l1", "logit"])
def test_the_pictures_hold_both_quadrants_of_every_state(
    tiny: Tiny, measure: Any
) -> None:
    for model, targets in ((tiny("llama"), None), (tiny("t5"), [[3, 9, 4]])):
        result = hs.visibility(
            model, model.encode(IDS, targets=targets), influence=measure
        )
        grid, *lines = views_of(result)
        assert isinstance(grid, Grid)
        influence = grid.measures[0].influence
        assert influence is not None
        if measure == "l1":
            values = result.data["l1"].to_numpy()
            same = np.eye(values.shape[0] * values.shape[1], dtype=bool).reshape(
                values.shape
            )
            assert np.isnan(influence[same]).all()
            np.testing.assert_array_equal(influence[~same], values[~same])
            np.testing.assert_array_equal(
                grid.measures[0].numbers[:-1], values[-1, -1, :-1]
            )
        else:
            seen = result.data["logit"].to_numpy()
            np.testing.assert_array_equal(influence[-1, -len(seen) :], seen)
            assert np.isnan(influence[:-1]).all()
            np.testing.assert_array_equal(grid.measures[0].numbers, seen[-1])
        assert lines
        assert all(isinstance(view, Lines) for view in lines)
        assert len(list(visibility_kind.sections(result))) == 2


def test_the_command_prints_the_findings_and_keeps_the_map(tmp_path: Path) -> None:
    made, out = folder(tmp_path), tmp_path / "map.nc"
    options = ["--model", str(made), "--sites", "layer.*", "--quiet"]
    done = CliRunner().invoke(
        app, ["visibility", "The cat sat", *options, "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "comes from the same" in done.output
    kept = hs.Result.load(out)
    assert kept.equals(
        hs.visibility(hs.load(str(made)), ["The cat sat"], sites="layer.*")
    )
    wrong = CliRunner().invoke(
        app, ["visibility", "The cat sat", *options, "--influence", "l3"]
    )
    assert wrong.exit_code == 2
    assert "'l1', 'frobenius', 'relative'" in wrong.output
