"""Laws of a sweep: batched, joined in depth and on reused keys and values, it is the
loop of single passes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.modules import hooks
from hiddenscope.passes.sweep import (
    Patch,
    Shortcuts,
    UnpatchedRun,
    run_unbatched,
    run_unpatched,
    shortcuts_of,
    sweep,
)
from hiddenscope.testing import tiny_model
from tests.configs import configured
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]
Hanging = Callable[[nn.Module], dict[str, Any]]

TEXTS = [[7, 99, 23, 64, 31, 50], [8, 45, 77, 64, 31, 51]]
TARGETS = [[5, 9, 11, 20], [5, 9, 12, 20]]
ALL = (True, True)
SLOW = pytest.mark.slow
FAST = ["llama", "gpt2", "bart", "bert", "cpmant"]
SAVED: dict[str, tuple[bool, bool]] = {  # joins in depth, reuses keys and values
    "llama": ALL,
    "gpt2": ALL,
    # Its window is shorter than the texts.
    "gemma3_text": (True, False),
    "gptj": ALL,
    "falcon": ALL,
    "mixtral": ALL,
    "bart": ALL,
    "bloom": (False, False),
    "t5": (False, True),
    "mamba": (True, False),
    "bert": (True, False),
    "albert": (True, False),
    "funnel": (True, False),
    "hrm_text": (True, False),
    "xlnet": (False, False),
    "cpmant": (False, False),
}


def prepared(
    model: hs.Model, sites: list[hs.Site]
) -> tuple[UnpatchedRun, UnpatchedRun, int]:
    targets = TARGETS if len(model.anatomy.stacks) > 1 else None
    base, other = run_unpatched(model, TEXTS, sites, targets=targets)
    return base, other, len(base.input_ids()) - 1


def every(
    base: UnpatchedRun, other: UnpatchedRun, sites: list[hs.Site]
) -> list[list[Patch]]:
    """One state exchanged at every site and token."""
    return [
        [Patch(site, (token,), other.states[site][token : token + 1])]
        for site in sites
        for token in range(len(base.input_ids(site.stack)))
    ]


def changeable(model: hs.Model) -> list[hs.Site]:
    return [
        site
        for site in model.anatomy.sites
        if site.layer is not None and site.part in ("", "attn", "mlp")
    ]


@pytest.mark.parametrize("family", with_slow(FAST, sorted(set(SAVED) - set(FAST))))
def test_it_is_the_loop_of_single_passes(
    tiny: Tiny, family: str, hanging: Hanging
) -> None:
    model = tiny(family)
    before = hanging(model.module)
    assert_the_loop(model, step=1 if family == "llama" else 3)
    ways = shortcuts_of(model)
    assert (ways.joins, ways.reuses, ways.batched) == (*SAVED[family], True)
    assert bool(ways.notes) == (SAVED[family] != ALL)
    assert hanging(model.module) == before


def test_keys_are_reused_where_a_window_holds_the_text() -> None:
    module = configured("Gemma3ForCausalLM", sliding_window=64)
    model = hs.load((module, None))
    assert_the_loop(model, step=3)
    assert shortcuts_of(model).reuses


def assert_the_loop(model: hs.Model, step: int) -> None:
    """Sweep every so many sites, and compare with single passes."""
    sites = changeable(model)[::step]
    base, other, at = prepared(model, sites)
    variants = every(base, other, sites)
    swept = sweep(model, base, variants, at)
    expected = torch.stack(
        [run_unbatched(model, base, variant, at) for variant in variants]
    )
    torch.testing.assert_close(swept.values, expected, rtol=1e-5, atol=1e-5)
    assert (swept.values - base.logits[at]).abs().max() > 0.01, (
        "the states that were put in do something"
    )


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_runs_the_last_token_alone_keeps_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSMT did so with a cache in transformers 5.17."""
    module = configured("FSMTForConditionalGeneration")
    forward = type(module.model.decoder).forward

    def last_alone(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids = input_ids[:, -1:] if kwargs["use_cache"] else input_ids
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(type(module.model.decoder), "forward", last_alone)
    model = hs.load((module, None))
    (run,) = run_unpatched(model, [[5, 6, 7]], (), targets=[[8, 9, 10]])
    assert run.cache is None
    assert run.logits.shape[0] == 3


@pytest.mark.parametrize(
    "name", with_slow(["ProphetNetForCausalLM"], ["FSMTForConditionalGeneration"])
)
def test_a_cache_that_a_whole_text_may_not_keep(name: str) -> None:
    """With its cache on, FSMT has no causal mask, and ProphetNet stops at a text of
    more than one token.
    """
    model = hs.load((configured(name), None))
    chosen = [hs.Site(1, "", "decoder" if model.encoder_decoder else None)]
    base, other, at = prepared(model, chosen)
    plain = hs.record(model, base.inputs, chosen, logits=True)
    torch.testing.assert_close(base.logits, plain.logits, rtol=1e-4, atol=1e-4)
    variants = every(base, other, chosen)
    expected = torch.stack(
        [run_unbatched(model, base, variant, at) for variant in variants]
    )
    torch.testing.assert_close(
        sweep(model, base, variants, at).values, expected, rtol=1e-4, atol=1e-4
    )
    assert not shortcuts_of(model).reuses
    # A batch that could reuse keys and values.
    later = [k for k, (one,) in enumerate(variants) if one.tokens[0] > 1]
    swept = sweep(model, base, [variants[k] for k in later], at)
    torch.testing.assert_close(swept.values, expected[later], rtol=1e-4, atol=1e-4)


def own_loop(
    module: Any, ids: list[int], rows: Tensor, layer: int, token: int
) -> Tensor:
    """A patched pass with nothing of ours: one hook on the block whose output is the
    layer.
    """

    def put(part: nn.Module, args: Any, output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        state = state.clone()
        state[0, token] = rows
        return (state, *output[1:]) if isinstance(output, tuple) else state

    blocks = module.model.layers if hasattr(module, "model") else module.transformer.h
    handle = blocks[layer - 1].register_forward_hook(put)
    try:
        with torch.no_grad():
            logits: Tensor = module(
                input_ids=torch.tensor([ids]), use_cache=False
            ).logits[0, -1]
            return logits
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_is_a_loop_with_hooks_of_ones_own(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    sites = [hs.Site(k) for k in (1, 2, 3)]
    base, other, at = prepared(model, sites)
    swept = sweep(model, base, every(base, other, sites), at)
    with torch.no_grad():
        reported = model.module(
            torch.tensor([TEXTS[1]]), output_hidden_states=True
        ).hidden_states
    expected = [
        own_loop(model.module, TEXTS[0], (other.states[site] if site.layer == 3 else reported[site.layer][0])[token],
                 site.layer or 0, token)
        for site in sites
        for token in range(6)
    ]  # fmt: skip
    torch.testing.assert_close(
        swept.values, torch.stack(expected), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "ways",
    [
        Shortcuts(),
        Shortcuts(joins=True),
        Shortcuts(reuses=True),
        Shortcuts(batched=False),
    ],
    ids=str,
)
def test_each_way_gives_the_same(tiny: Tiny, ways: Shortcuts) -> None:
    model = tiny("llama")
    sites = changeable(model)
    base, other, at = prepared(model, sites)
    variants = every(base, other, sites)
    variants.append([Patch(hs.Site(1), (1, 3), other.states[hs.Site(1)][1:3]),
                     Patch(hs.Site(2, "mlp"), (0,), other.states[hs.Site(2, "mlp")][:1])])  # fmt: skip
    one, two = (
        sweep(model, base, variants, at),
        sweep(model, base, variants, at, shortcuts=ways),
    )
    torch.testing.assert_close(one.values, two.values, rtol=1e-5, atol=1e-5)
    assert one.tokens < two.tokens or ways.reuses


def test_ones_own_states_give_ones_own_logits_and_those_of_every_token_the_others(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    sites = [hs.Site(k) for k in range(4)]
    base, other, at = prepared(model, sites)
    own = [[Patch(site, tuple(range(6)), base.states[site])] for site in sites]
    swapped = [[Patch(site, tuple(range(6)), other.states[site])] for site in sites]
    swept = sweep(model, base, [*own, *swapped], at).values
    torch.testing.assert_close(
        swept[:4], base.logits[at].expand(4, -1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        swept[4:], other.logits[at].expand(4, -1), rtol=1e-5, atol=1e-5
    )


def test_only_what_a_variant_needs_is_run(tiny: Tiny) -> None:
    model = tiny("llama")
    sites = [hs.Site(k) for k in (1, 2, 3)]
    base, other, at = prepared(model, sites)
    variants = every(base, other, sites)
    sweep(model, base, variants, at)
    rows: list[tuple[int, int, int]] = []
    layers: Any = model.module.model.layers  # type: ignore[union-attr]
    watches = [
        hooks.Watch(
            layers[k].mlp,
            "input",
            lambda args, kwargs, k=k: rows.append((k, *args[0].shape[:2])),
        )
        for k in range(3)
    ]
    with hooks.watching(watches):
        swept = sweep(
            model,
            base,
            [variant for variant in variants if variant[0].tokens == (4,)],
            at,
        )
    assert rows == [
        (1, 1, 2),
        (2, 2, 2),
    ], "block 2 for one variant, block 3 for two, the last two tokens of each"
    assert (swept.passes, swept.tokens) == (1, 6)


def test_an_encoder_is_counted(tiny: Tiny) -> None:
    model = tiny("bart")
    sites = [hs.Site(1, "", "decoder")]
    base, other, at = prepared(model, sites)
    variants = every(base, other, sites)
    swept = sweep(model, base, variants, at, shortcuts=Shortcuts())
    assert swept.tokens == len(variants) * (len(TEXTS[0]) + len(TARGETS[0]))


def test_a_head_that_cannot_run_on_one_token_is_named() -> None:
    class CountsTokens(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            logits = super().forward(states)
            return 2 * logits if states.shape[1] == 1 else logits

    module: Any = tiny_model("llama")
    module.lm_head.__class__ = CountsTokens
    shortcuts = shortcuts_of(hs.load((module, None)))
    assert shortcuts.batched and not shortcuts.narrows
    assert shortcuts.notes[0].startswith(
        "Every variant was run without shortcuts: tried otherwise, its logits were off"
    )


def test_a_window_of_attention_that_forgets_tokens_is_not_reused() -> None:
    module = tiny_model("gemma3_text")
    module.config.sliding_window = 4  # type: ignore[union-attr]
    for part in module.modules():
        if getattr(part, "sliding_window", None):
            part.sliding_window = 4  # type: ignore[assignment]
    model = hs.load((module, None))
    sites = [hs.Site(k) for k in (0, 2)]
    base, other, at = prepared(model, sites)
    variants = every(base, other, sites)
    swept = sweep(model, base, variants, at)
    assert any("looks back only so far" in note for note in swept.notes)
    expected = torch.stack(
        [run_unbatched(model, base, variant, at) for variant in variants]
    )
    torch.testing.assert_close(swept.values, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("eager", torch.float32), pytest.param("sdpa", torch.bfloat16, marks=SLOW)],
)
def test_in_another_dtype_and_kernel(kernel: str, dtype: torch.dtype) -> None:
    module = tiny_model("llama").to(dtype)
    module.set_attn_implementation(kernel)  # type: ignore[operator]
    model = hs.load((module, None))
    sites = changeable(model)
    base, other, at = prepared(model, sites)
    variants = every(base, other, sites)
    swept = sweep(model, base, variants, at)
    expected = torch.stack(
        [run_unbatched(model, base, variant, at) for variant in variants]
    )
    room = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(swept.values, expected, rtol=room, atol=room)
    assert shortcuts_of(model).joins and shortcuts_of(model).reuses


@pytest.mark.parametrize("family", ["llama", "cpmant"])
def test_a_range_of_tokens_is_read_as_each_of_them(tiny: Tiny, family: str) -> None:
    """With a head that sees what is read, and with one that sees every token."""
    model = tiny(family)
    sites = list(model.anatomy.select("layer.*"))
    base, other, last = prepared(model, sites)
    variants = []
    for site in sites:
        variants.append([Patch(site, (2,), other.states[site][2:3])])
    read = sweep(model, base, variants, range(2, last + 1)).values
    assert read.shape[:2] == (len(sites), last - 1)
    for token in range(2, last + 1):
        single = sweep(model, base, variants, token).values
        torch.testing.assert_close(read[:, token - 2], single, atol=1e-4, rtol=1e-4)
