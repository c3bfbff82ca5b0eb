"""Laws of an edit: recorded values change nothing, a change reaches the stream and only
the tokens it was made for.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.errors import (
    ArgumentError,
    Error,
    NotFinite,
    PassError,
    SiteError,
    StatesError,
)
from hiddenscope.testing import tiny_model
from tests.configs import configured
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]
Hanging = Callable[[nn.Module], dict[str, Any]]

FAMILIES = with_slow(
    ["llama", "gpt2", "gptj", "bert", "t5"],
    [
        "gemma3_text",
        "opt",
        "bloom",
        "falcon",
        "mixtral",
        "mamba",
        "albert",
        "cpmant",
        "xlnet",
        "fnet",
        "bart",
        "funnel",
        "hrm_text",
    ],
)
TEXTS = [[7, 99, 23, 64, 31], [8, 45, 77]]
TARGETS = [[5, 9, 11], [4]]


def texts(model: hs.Model) -> dict[str, Any]:
    """A padded batch where the model takes one, with targets where it has a decoder of
    its own.
    """
    count = 2 if model.batching.padding_safe else 1
    return {"inputs": TEXTS[:count]} | (
        {"targets": TARGETS[:count]} if len(model.anatomy.stacks) > 1 else {}
    )


def of(states: hs.States | hs.Pair, site: hs.Site) -> Tensor:
    if isinstance(states, hs.Pair):
        states = states.encoder if site.stack == "encoder" else states.decoder
    return states[site]


def equal(a: hs.Pass, b: hs.Pass, sites: Any) -> bool:
    assert a.logits is not None and b.logits is not None
    return torch.equal(a.logits, b.logits) and all(
        torch.equal(of(a.states, site), of(b.states, site)) for site in sites
    )


def ramp(states: Tensor) -> Tensor:
    return states + torch.linspace(-1, 1, states.shape[-1], dtype=states.dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_is_recorded_where_it_was_made_and_reaches_the_stream(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    given = texts(model)
    full = hs.record(model, **given, sites=list(model.anatomy.sites), logits=True)
    for site in model.anatomy.sites:
        changed = hs.edit(
            model,
            **given,
            changes={site: ramp},
            sites=list(model.anatomy.sites),
            logits=True,
        )
        torch.testing.assert_close(
            of(changed.states, site), ramp(of(full.states, site)), rtol=1e-5, atol=1e-5
        )
        assert not torch.equal(changed.logits, full.logits), site  # type: ignore[arg-type]
        before = [
            other
            for other in model.anatomy.sites
            if other < site and site.part != "mid"
        ]
        assert all(
            torch.equal(of(changed.states, other), of(full.states, other))
            for other in before
        ), site
        if (
            site.part
            and model.anatomy.stack(site).blocks[(site.layer or 0) - 1].kind
            == "pre-norm"
        ):
            mid, mlp, layer = (
                of(changed.states, hs.Site(site.layer, part, site.stack))
                for part in ("mid", "mlp", "")
            )
            torch.testing.assert_close(mid + mlp, layer, rtol=1e-5, atol=1e-5)


def test_each_kind_of_change(tiny: Tiny) -> None:
    model, site = tiny("llama"), hs.Site(2)
    plain = of(hs.record(model, TEXTS).states, site)
    vector = torch.linspace(-1, 2, 64, dtype=torch.float64)
    unit = (vector / vector.norm()).float()

    def changed(change: Any) -> Tensor:
        return of(hs.edit(model, TEXTS, {"layer.2": change}, "layer.2").states, site)

    assert torch.equal(changed(hs.Scale(3)), plain * 3)
    assert torch.equal(changed(hs.Replace(0)), torch.zeros_like(plain))
    assert torch.equal(changed(hs.Replace(vector)), vector.float().expand_as(plain))
    assert torch.equal(
        changed(hs.Add(vector.tolist(), scale=-2)), plain + (vector * -2).float()
    )
    assert torch.equal(changed(hs.Add(plain)), plain + plain)
    projected = changed(hs.Project(vector * 1e30))
    torch.testing.assert_close(projected, plain - (plain @ unit)[:, None] * unit)
    assert (projected @ unit).abs().max() < 1e-5
    three = hs.edit(
        model, [TEXTS[0]] * 2, {"layer.2": hs.Replace(torch.ones(2, 5, 64))}, "layer.2"
    ).states
    assert of(three, site).sum() == 640


CHOICES: list[tuple[Any, list[int]]] = [
    (1, [1, 6]),
    (-1, [4, 7]),
    ([0, -1], [0, 4, 5, 7]),
    (slice(1, None), [1, 2, 3, 4, 6, 7]),
    (slice(-1, None), [4, 7]),
    (torch.tensor([2]), [2, 7]),
    (
        torch.tensor(
            [[True, False, False, True, False], [False, True, False, False, False]]
        ),
        [0, 3, 6],
    ),
    ([], []),
]


def test_only_the_chosen_tokens_change(tiny: Tiny) -> None:
    model, site = tiny("llama"), hs.Site(1)
    plain = of(hs.record(model, TEXTS).states, site)
    for tokens, rows in CHOICES:
        changed = of(hs.edit(model, TEXTS, {site: hs.Scale(2, tokens)}).states, site)
        assert (changed != plain).any(-1).nonzero().flatten().tolist() == rows, tokens


def test_rows_go_to_the_positions_in_the_order_given(tiny: Tiny) -> None:
    values = torch.stack([torch.full((64,), float(i)) for i in range(4)])
    states = hs.edit(
        tiny("llama"), TEXTS, {"layer.1": hs.Replace(values, tokens=[2, 0])}, "layer.1"
    ).states
    assert of(states, hs.Site(1))[[2, 0, 7, 5], 0].tolist() == [0, 1, 2, 3]


def test_padding_is_never_changed_and_a_function_has_a_copy(tiny: Tiny) -> None:
    model = tiny("llama")
    full = hs.record(model, TEXTS, logits=True)

    def spoil(states: Tensor) -> Tensor:
        result = states.clone()
        result[1, 3:] = torch.nan
        states.zero_()
        return result

    again = hs.edit(model, TEXTS, {"layer.*": spoil}, logits=True)
    assert equal(full, again, model.anatomy.select("layer.*,final"))


def test_values_are_copied(tiny: Tiny) -> None:
    values = torch.ones(64)
    change = hs.Replace(values)
    values.zero_()
    hs.edit(tiny("gpt2"), TEXTS, {"layer.1": change})
    assert change.values.sum() == 64


def test_editing_is_the_same_in_a_loop_of_ones_own(tiny: Tiny) -> None:
    model = tiny("llama")
    changes: dict[Any, Any] = {
        "layer.1": hs.Scale(2.0, tokens=[0, -1]),
        "layer.3.mid": hs.Add(torch.ones(64)),
    }
    edited = hs.edit(model, [TEXTS[0]], changes, logits=True)
    ids = torch.tensor([TEXTS[0]])
    for subject in (model, model.module):
        with torch.no_grad(), hs.editing(subject, changes):
            assert torch.equal(model.module(ids).logits[0], edited.logits)  # type: ignore[arg-type]
            assert torch.equal(model.module(input_ids=ids).logits[0], edited.logits)  # type: ignore[arg-type]
    left = torch.tensor([[0, 0, *TEXTS[1]]])
    with (
        torch.no_grad(),
        hs.editing(model, {"layer.1": hs.Scale(2.0, tokens=0)}),
        hs.recording(model) as seen,
    ):
        model.module(left, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
    alone = hs.edit(model, [TEXTS[1]], {"layer.1": hs.Scale(2.0, tokens=0)})
    assert torch.equal(of(seen.states, hs.Site(0)), of(alone.states, hs.Site(0)))
    torch.testing.assert_close(
        of(seen.states, hs.Site(1)), of(alone.states, hs.Site(1))
    )


def test_a_mask_of_the_new_tokens_alone_does_not_say_where_they_stand(
    tiny: Tiny,
) -> None:
    """A cache says that: the fifth token stays the fifth."""
    module: Any = tiny("llama").module
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        for token, changed in ((4, True), (0, False)):
            logits = []
            for factor in (1.0, 2.0):
                past = module(ids[:, :4]).past_key_values
                with hs.editing(module, {"layer.1": hs.Scale(factor, tokens=token)}):
                    mask = torch.ones(1, 1, dtype=torch.long)
                    output = module(
                        ids[:, 4:], attention_mask=mask, past_key_values=past
                    )
                logits.append(output.logits)
            assert torch.equal(*logits) != changed


@pytest.mark.parametrize("tokens", with_slow([None, slice(3, None)], [2, 6]))
@pytest.mark.parametrize("family", with_slow(["llama", "t5"], ["gpt2"]))
def test_generate_writes_the_same_with_and_without_a_cache(
    tiny: Tiny, family: str, tokens: Any
) -> None:
    model = tiny(family)
    vector = torch.linspace(-3, 3, 64).roll(7)
    given: Any = {
        "input_ids": torch.tensor([TEXTS[0]]),
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
    }
    given |= {"attention_mask": torch.ones(1, 5, dtype=torch.long)}
    with hs.editing(
        model,
        {"layer.1": hs.Add(vector, tokens, scale=4), "layer.2": hs.Add(vector, tokens)},
    ):
        cached, bare = (
            model.module.generate(**given, use_cache=cache) for cache in (True, False)
        )  # type: ignore[operator]
    plain = model.module.generate(**given)  # type: ignore[operator]
    assert torch.equal(cached, bare)
    assert tokens is not None or not torch.equal(cached, plain)


def test_the_last_token_of_each_pass_is_changed_while_the_model_writes(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    ids = torch.tensor([TEXTS[0]])
    with (
        hs.editing(model, {"layer.3": hs.Replace(1.0, tokens=-1)}),
        hs.recording(model, "layer.3") as seen,
    ):
        model.module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3
        )  # type: ignore[operator]
    assert [
        (of(states, hs.Site(3)) == 1).all(-1).tolist() for states in seen.passes
    ] == [
        [False] * 4 + [True],
        [True],
        [True],
    ]


def test_a_cache_that_does_not_count_is_refused_where_positions_matter(
    tiny: Tiny,
) -> None:
    module = tiny("mamba").module
    given: Any = {
        "input_ids": torch.tensor([TEXTS[0]]),
        "max_new_tokens": 3,
        "min_new_tokens": 3,
    }
    plain = module.generate(**given)  # type: ignore[operator]
    with hs.editing(module, {"layer.1": hs.Scale(1.0)}):
        assert torch.equal(module.generate(**given), plain)  # type: ignore[operator]
    ids = torch.tensor([TEXTS[0]])
    cache = module(ids, use_cache=True).cache_params
    with (
        hs.editing(module, {"layer.1": hs.Scale(1.0, tokens=0)}),
        pytest.raises(StatesError, match="does not say"),
    ):
        module(ids[:, :1], cache_params=cache)


BAD: list[tuple[Callable[[], Any], type[Error], str]] = [
    (lambda: {"layer.1": hs.Add(torch.ones(63))}, StatesError, "64 wide"),
    (
        lambda: {"layer.1": hs.Replace(torch.ones(7, 64))},
        StatesError,
        "there are 8 tokens to change",
    ),
    (
        lambda: {"layer.1": hs.Replace(torch.ones(8, 64), tokens=0)},
        StatesError,
        "there are 2 tokens to",
    ),
    (
        lambda: {"layer.1": hs.Replace(torch.ones(64, dtype=torch.long))},
        StatesError,
        "int64",
    ),
    (lambda: {"layer.1": hs.Replace([[1.0], [1.0, 2.0]])}, StatesError, "not an array"),
    (lambda: {"layer.1": hs.Add(torch.full((64,), torch.nan))}, NotFinite, "NaN"),
    (
        lambda: {"layer.1": hs.Add(torch.ones(64), scale=float("inf"))},
        NotFinite,
        "not finite",
    ),
    (lambda: {"layer.1": hs.Scale(float("nan"))}, NotFinite, "not finite"),
    (lambda: {"layer.1": hs.Scale("much")}, ArgumentError, "must be a number"),
    (lambda: {"layer.1": hs.Project(torch.zeros(64))}, StatesError, "it is zero"),
    (lambda: {"layer.1": hs.Project(torch.ones(2, 64))}, StatesError, "shape [2, 64]"),
    (lambda: {"layer.9": hs.Scale(2)}, SiteError, "layer.9"),
    (lambda: {"layer.1": hs.Scale(2, tokens=3)}, StatesError, "text 1 has 3 tokens"),
    (lambda: {"layer.1": hs.Scale(2, tokens=[0, -5])}, StatesError, "-5"),
    (lambda: {"layer.1": hs.Scale(2, tokens=[1, 1])}, StatesError, "comes twice"),
    (lambda: {"layer.1": hs.Scale(2, tokens=[0.5])}, StatesError, "integers"),
    (
        lambda: {"layer.1": hs.Scale(2, tokens=[True] * 5)},
        StatesError,
        "text 1 has 3 tokens",
    ),
    (dict, StatesError, "the dict is empty"),
    (lambda: [("layer.1", hs.Scale(2))], StatesError, "list"),
    (lambda: {"layer.1": 2.0}, StatesError, "got float"),
    (lambda: {"layer.1": hs.Scale}, StatesError, "got Scale"),
    (
        lambda: {"layer.1": hs.Scale(2), "layer.*": hs.Scale(2)},
        StatesError,
        "Cannot change layer.1 twice",
    ),
    (
        lambda: {"layer.1": lambda states: states[:, :1]},
        StatesError,
        "shape [2, 1, 64]",
    ),
    (lambda: {"layer.1": lambda states: None}, StatesError, "NoneType"),
    (lambda: {"layer.1": lambda states: states / 0 * 0}, NotFinite, "layer.1"),
]


def test_what_cannot_be_done_is_said(tiny: Tiny, hanging: Hanging) -> None:
    model = tiny("llama")
    before = hanging(model.module)
    for changes, kind, words in BAD:
        with pytest.raises(kind) as caught:
            hs.edit(model, TEXTS, changes())
        assert words in str(caught.value)
        assert hanging(model.module) == before


def test_a_stream_that_goes_past_the_place_where_it_is_seen_is_refused(
    tiny: Tiny,
) -> None:
    with pytest.raises(SiteError, match="the residual stream goes past"):
        hs.edit(tiny("xlm"), [TEXTS[0]], {"layer.0": hs.Scale(2)})


def test_an_edit_that_no_pass_goes_through_is_an_error(tiny: Tiny) -> None:
    module, ids = tiny("llama").module, torch.tensor([TEXTS[0]])
    refused = pytest.raises(
        PassError, match="not called inside the `with`.*torch.compile"
    )
    with refused, hs.editing(module, {"layer.1": hs.Scale(2.0)}):
        # As compiled code does, without the hooks of a call.
        type(module).forward(module, ids)


@pytest.mark.parametrize(
    ("family", "frozen"), [("gpt2", True), ("bert", False), ("t5", False)]
)
def test_gradients_flow_through_what_was_changed(
    family: str, frozen: bool, hanging: Hanging
) -> None:
    module = tiny_model(family).double().requires_grad_(not frozen)
    model = hs.load((module, None))
    given = {"inputs": [TEXTS[0]]} | (
        {"targets": [TARGETS[0]]} if len(model.anatomy.stacks) > 1 else {}
    )
    before = hanging(module)
    site = model.anatomy.select("layer.1")[-1]
    vector = torch.linspace(-1, 1, 64, dtype=torch.float64, requires_grad=True)
    made = hs.edit(
        model,
        **given,
        changes={site: lambda states: states + vector},
        sites=[site],
        logits=True,
        grad=True,
    )
    assert made.logits is not None
    slope, back = torch.autograd.grad(made.logits[-1, 7], [vector, made.live[site]])
    torch.testing.assert_close(back.sum((0, 1)), slope)
    step, sides = (
        torch.randn(
            64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ),
        [],
    )
    for way in (1e-4, -1e-4):
        change = hs.Add(vector.detach() + way * step)
        edited = hs.edit(
            model, **given, changes={site: change}, sites=[site], logits=True
        )
        assert edited.live == {}
        sides.append(float(edited.logits[-1, 7]))  # type: ignore[index]
    # Its norm computes in float32, whatever it is given.
    room = 1e-3 if family == "t5" else 1e-5
    assert float(slope @ step) == pytest.approx(
        (sides[0] - sides[1]) / 2e-4, rel=room, abs=room
    )
    assert hanging(module) == before


@pytest.mark.parametrize("watching", ["editing", "recording"])
def test_gradients_come_back_where_no_grad_is_interrupted(watching: str) -> None:
    module = tiny_model("llama")
    change = {"layer.1": hs.Scale(2.0)}
    watched = hs.recording(module)
    if watching == "editing":
        watched = hs.editing(module, change)  # type: ignore[assignment]
    before = torch.is_grad_enabled()
    try:
        with suppress(KeyboardInterrupt), watched:
            # torch's own `no_grad` is Python, and Ctrl-C may skip its end.
            torch.set_grad_enabled(False)
            raise KeyboardInterrupt
        assert torch.is_grad_enabled() == before
    finally:
        torch.set_grad_enabled(before)


@pytest.mark.parametrize("name", ["DbrxForCausalLM", "LlamaForCausalLM"])
def test_the_mlp_reads_the_middle_that_was_put_in(name: str) -> None:
    """DBRX norms the middle of a block inside the module that gives it out."""
    model = hs.load((configured(name), None))
    sites = ["layer.1.mid", "layer.1.mlp", "layer.1"]
    other = model.capture([[9, 8, 7, 6]], sites)
    change = {"layer.1.mid": hs.Replace(other["layer.1.mid"])}
    edited = hs.edit(model, [[5, 6, 7, 8]], change, sites).states
    for site in sites:
        torch.testing.assert_close(edited[site], other[site], rtol=1e-4, atol=1e-4)
