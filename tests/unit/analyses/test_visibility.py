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


def test_frobenius_is_the_norm_of_the_jacobian_that_torch_func_gives(
    gpt2: hs.Model,
) -> None:
    found = hs.visibility(gpt2, IDS, influence="frobenius").data["frobenius"]
    for target in (1, 2, 3, None):
        for source in range(LAYERS if target is None else target):
            jacobian = jacrev(
                above(gpt2.module, source, target), state(gpt2, f"layer.{source}")
            )
            expected = jacobian.norm(dim=(1, 3))  # type: ignore[arg-type]  # [token, width, source token, width]
            name = "final" if target is None else f"layer.{target}"
            np.testing.assert_allclose(
                found.sel(site=name, source_site=f"layer.{source}"), expected, rtol=1e-5
            )


def test_l1_is_the_norm_of_the_gradient_of_a_scale_free_length(gpt2: hs.Model) -> None:
    found = hs.visibility(gpt2, IDS).data["l1"]
    for target, source in ((3, 0), (2, 1), (None, 2)):
        function = above(gpt2.module, source, target)

        def length(
            x: Tensor, function: Callable[[Tensor], Tensor] = function
        ) -> Tensor:
            h = function(x)
            return h.abs().sum(-1) / h.norm(dim=-1)

        # [token, source token, width].
        gradient = jacrev(length, state(gpt2, f"layer.{source}"))
        name = "final" if target is None else f"layer.{target}"
        expected = gradient.abs().sum(-1)
        np.testing.assert_allclose(
            found.sel(site=name, source_site=f"layer.{source}"),
            expected,
            rtol=1e-5,
            atol=1e-12,
        )


def test_relative_scales_by_the_norms_of_both_ends(gpt2: hs.Model) -> None:
    sites = "layer.0,layer.2-3"
    frobenius = (
        hs.visibility(gpt2, IDS, influence="frobenius", sites=sites)
        .data["frobenius"]
        .to_numpy()
    )
    relative = (
        hs.visibility(gpt2, IDS, influence="relative", sites=sites)
        .data["relative"]
        .to_numpy()
    )
    norms = gpt2.capture(IDS, sites).values.norm(dim=-1).numpy()
    np.testing.assert_allclose(
        relative, frobenius * norms[None, None] / norms[:, :, None, None], rtol=1e-5
    )


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


def one_tape(
    model: hs.Model, ids: list[list[int]] = IDS, sites: Any = "layer.*,final"
) -> Any:
    return tape(model, ids, model.anatomy.select(sites))


def test_a_vector_taken_back_equals_a_vector_taken_forward(gpt2: hs.Model) -> None:
    run, generator = one_tape(gpt2), torch.Generator().manual_seed(0)
    back, forth = torch.randn(2, 1, 4, 64, generator=generator, dtype=torch.float64)
    for target, source in ((3, 0), (3, 2), (2, 1)):
        pulled = dict(run.pull({Site(target): back}))[Site(source)]
        function = above(gpt2.module, source, target)
        _, pushed = torch.func.jvp(
            function, (state(gpt2, f"layer.{source}"),), (forth[0],)
        )
        assert float((pulled[0] * forth[0]).sum()) == pytest.approx(
            float((back[0] * pushed.detach()).sum()), rel=1e-9
        )


def test_gradients_are_finite_differences(gpt2: hs.Model) -> None:
    run = one_tape(gpt2)
    seed = torch.zeros(1, 4, 64, dtype=torch.float64)
    seed[0, 3] = maps.scale_free_gradient(run.values(Site(3)))[3]
    gradient = dict(run.pull({Site(3): seed}))[Site(1)][0]
    direction = torch.randn(
        4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    sides = []
    for step in (1e-5, -1e-5):
        moved = hs.edit(
            gpt2, IDS, {"layer.1": hs.Add(direction, scale=step)}, "layer.3"
        ).states
        h = moved["layer.3"][3]  # type: ignore[index]
        sides.append(float(h.abs().sum() / h.norm()))
    assert float((gradient * direction).sum()) == pytest.approx(
        (sides[0] - sides[1]) / 2e-5, rel=1e-6
    )


def test_a_state_that_is_written_over_later_keeps_its_own_gradient() -> None:
    """Falcon adds what attention gives to what its MLP gave, in place."""
    model, generator = (
        hs.load((tiny_model("falcon").double(), None)),
        torch.Generator().manual_seed(0),
    )
    run = one_tape(model, sites="*")
    for target, source in (
        (Site(2), Site(2, "mlp")),
        (Site(3), Site(1, "attn")),
        (Site(2, "mlp"), Site(1)),
    ):
        vector, direction = torch.randn(
            2, 4, 64, generator=generator, dtype=torch.float64
        )
        gradient = dict(run.pull({target: vector[None]}))[source][0]
        sides = [
            float(
                (
                    hs.edit(
                        model, IDS, {source: hs.Add(direction, scale=step)}, target
                    ).states[target]
                    * vector
                ).sum()
            )  # type: ignore[index]
            for step in (1e-5, -1e-5)
        ]
        assert float((gradient * direction).sum()) == pytest.approx(
            (sides[0] - sides[1]) / 2e-5, rel=1e-6
        )


def test_the_gradient_of_a_scale_free_length_is_orthogonal_to_the_state(
    gpt2: hs.Model,
) -> None:
    run = one_tape(gpt2)
    for site in run.states:
        h = run.values(site)
        gradient = maps.scale_free_gradient(h)
        assert (
            (gradient * h).sum(-1).abs()
            < 1e-12 * gradient.norm(dim=-1) * h.norm(dim=-1)
        ).all()
        assert (gradient.norm(dim=-1) > 0).all()


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


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_outside_the_causal_cone_is_exactly_zero_whether_the_text_is_cut_or_not(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = double("llama", attention)
    found = {}
    # A token at a time, several, and the whole text for every target.
    for rows in (
        1,
        64,
        10**9,
    ):
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


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "bart", "mamba"])
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


@pytest.mark.parametrize("family", ["t5", "bart"])
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


def test_error_bars_hold_the_exact_value(gpt2: hs.Model) -> None:
    """Over 40 draws of 8 probes: 95% of all estimates within their bars, up to what
    chance makes of so many.
    """
    exact = (
        hs.visibility(gpt2, IDS, influence="frobenius", sites="layer.0,layer.2")
        .data["frobenius"]
        .to_numpy()
    )
    inside = exact > 0
    held, wide = [], []
    for seed in range(40):
        data = hs.visibility(
            gpt2,
            IDS,
            influence="frobenius",
            sites="layer.0,layer.2",
            sampling=hs.Sampling(probes=8),
            seed=seed,
        ).data
        value, half = (
            data[name].to_numpy()[inside] for name in ("frobenius", "frobenius_error")
        )
        held.append(
            (np.abs(value - exact[inside]) <= half + 1e-6 * exact[inside]).mean()
        )
        wide.append(np.median(half / value))
        assert (data["frobenius"].to_numpy()[~inside] == 0).all()
    assert np.mean(held) >= 0.95 - 2 * np.std(held) / len(held) ** 0.5
    assert np.median(wide) < 0.3
    many = hs.visibility(
        gpt2,
        IDS,
        influence="frobenius",
        sites="layer.0,layer.2",
        sampling=hs.Sampling(probes=32),
    ).data
    np.testing.assert_allclose(
        many["frobenius"].to_numpy()[inside], exact[inside], rtol=0.3
    )


def test_error_bars_of_a_mean_hold_too_since_every_text_has_probes_of_its_own(
    gpt2: hs.Model,
) -> None:
    """Eight times one text: what the mean is off by shrinks by the root of eight, as
    its bars do.
    """
    few: Any = {"influence": "frobenius", "sites": "layer.0,layer.2"}
    exact = hs.visibility(gpt2, IDS, **few).data["frobenius"].to_numpy()
    inside = np.tri(2, 2, -1, dtype=bool)[:, None, :, None] & (exact > 0)
    off: dict[int, list[Any]] = {1: [], 8: []}
    held = []
    for seed in range(8):
        for count, found in off.items():
            sampling = hs.Sampling(align="position", probes=8)
            data = hs.visibility(
                gpt2, IDS * count, sampling=sampling, seed=seed, **few
            ).data
            found.append((data["frobenius"].to_numpy() - exact)[inside])
        held.append(
            (np.abs(found[-1]) <= data["frobenius_error"].to_numpy()[inside]).mean()
        )
    one, mean = (np.sqrt(np.mean(np.square(found))) for found in off.values())
    assert 0.25 < mean / one < 0.5, (
        "0.35, if they are independent; 1, if they are the same"
    )
    assert np.mean(held) >= 0.95 - 2 * np.std(held) / len(held) ** 0.5


def test_as_many_probes_as_the_states_are_wide_are_exact(gpt2: hs.Model) -> None:
    def frobenius(**options: Any) -> hs.Result:
        return hs.visibility(
            gpt2, IDS, influence="frobenius", sites="layer.0,layer.2", **options
        )

    exact, drawn = frobenius(), frobenius(sampling=hs.Sampling(probes=8), seed=3)
    assert "frobenius_error" not in exact.data
    assert exact.equals(frobenius(sampling=hs.Sampling(probes=64), seed=3))
    assert drawn.equals(frobenius(sampling=hs.Sampling(probes=8), seed=3))
    assert not drawn.equals(frobenius(sampling=hs.Sampling(probes=8), seed=4))


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
    assert (
        result.facts["cut"]
        and "the length of the shortest, 3 tokens" in result.summary()
    )
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


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_narrow_states_come_out_near_wide_ones(attention: str) -> None:
    module: Any = tiny_model("llama")
    module.set_attn_implementation(attention)
    few: Any = {"influence": "frobenius", "sites": "layer.0,layer.2"}
    wide = (
        hs.visibility(hs.load((module, None)), IDS, **few).data["frobenius"].to_numpy()
    )
    narrow = hs.visibility(hs.load((module.to(torch.bfloat16), None)), IDS, **few).data[
        "frobenius"
    ]
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


def test_what_is_said_of_one_text_is_said_to_be_untested(gpt2: hs.Model) -> None:
    for measure in ("l1", "logit"):
        assert (
            "were not tested" in hs.visibility(gpt2, IDS, influence=measure).summary()
        )


def test_what_cannot_be_answered_is_said(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    errors: Any = hs.errors
    for wrong, error, match in (
        ({"texts": [[5]]}, errors.TextError, "no other token can influence"),
        ({"sites": "layer.9"}, errors.SiteError, "layer.9"),
        ({"influence": "l2"}, errors.StatesError, "l1, frobenius, relative, logit"),
        (
            {"influence": "frobenius", "sampling": hs.Sampling(probes=1)},
            errors.StatesError,
            "at least two",
        ),
        (
            {"influence": "l1", "sampling": hs.Sampling(probes=8)},
            errors.StatesError,
            "one vector for each target",
        ),
        ({"target": " the"}, errors.TextError, "reads no token"),
        (
            {"influence": "logit", "target": "nothing at all"},
            errors.TextError,
            "tokens: ",
        ),
        ({"influence": "logit", "target": 10**6}, errors.TextError, "ids of .* are 0"),
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


@pytest.mark.real
def test_smollm2_sees_mostly_its_own_token_one_layer_below_and_all_tokens_from_the_top(
    smollm2: hs.Model,
) -> None:
    result = hs.visibility(
        smollm2,
        "The capital of France is Paris.",
        sites="layer.0,layer.10-11,layer.30,final",
    )
    data = result.data["l1"]
    assert data.shape == (5, 7, 5, 7)
    assert (data.to_numpy()[~cone(5, 7)] == 0).all()
    assert float(result.data["own_below"].sel(site="layer.11")) == pytest.approx(
        0.648, abs=5e-3
    )
    assert float(result.data["own_first"].sel(site="final")) == pytest.approx(
        0.211, abs=5e-3
    )
    assert float(result.data["reach"].sel(source_site="layer.0")) == pytest.approx(
        426.5, rel=0.01
    )
