"""Laws of a resumed pass: with the recorded values it is the full pass, bit for bit,
blocks skipped or not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.errors import Error, NotFinite, SiteError, StatesError
from hiddenscope.modules import hooks
from hiddenscope.passes import try_skipping
from hiddenscope.testing import tiny_model
from tests.configs import configured
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]
Hanging = Callable[[nn.Module], dict[str, Any]]

TEXTS = [[7, 99, 23, 64, 31], [8, 45, 77]]
TARGETS = [[5, 9, 11], [4]]
# The stack of the last two is the last of several lists of blocks.
SKIPS = with_slow(
    ["llama", "gpt2", "bert", "xlnet"],
    [
        "gemma3_text",
        "gptj",
        "bloom",
        "falcon",
        "mamba",
        "albert",
        "fnet",
        "bart",
        "funnel",
        "hrm_text",
    ],
)
RUNS_ALL = with_slow(["cpmant"], ["t5", "squeezebert"])
# Four layers of two kinds, so that each kind has one that makes the keys and values and
# one that takes them.
FOUR: dict[str, dict[str, Any]] = {
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 4,
        "per_layer_config": {1: {"head_dim": 512}, 3: {"head_dim": 512}},
    },
}


def of(states: hs.States | hs.Pair, site: hs.Site) -> Tensor:
    if isinstance(states, hs.Pair):
        states = states.encoder if site.stack == "encoder" else states.decoder
    return states[site]


def batches(model: hs.Model) -> list[dict[str, Any]]:
    """A text alone and, where the model takes one, a padded batch."""
    two = len(model.anatomy.stacks) > 1
    counts = (1, 2) if model.batching.padding_safe else (1,)
    return [
        {"inputs": TEXTS[:n]} | ({"targets": TARGETS[:n]} if two else {})
        for n in counts
    ]


def given_texts(given: dict[str, Any]) -> dict[str, Any]:
    return {"texts": given["inputs"], "targets": given.get("targets")}


def check_every_layer(model: hs.Model) -> set[str]:
    """Resume at every whole layer with what was recorded there; the notes that were
    made.
    """
    notes: set[str] = set()
    layers = [
        site
        for site in model.anatomy.select("layer.*")
        if site.layer or model.name[:3] not in ("XLM", "Squ")
    ]
    for given in batches(model):
        full = hs.record(model, **given, sites=layers, logits=True)
        for site in layers:
            again = hs.resume(
                model, model.encode(**given_texts(given)), site, of(full.states, site)
            )
            assert torch.equal(again.logits, full.logits), site  # type: ignore[arg-type]
            above = [other for other in layers if not other < site]
            assert all(
                torch.equal(of(again.states, other), of(full.states, other))
                for other in above
            ), site
            notes |= set(again.notes)
    return notes


@pytest.mark.parametrize("family", SKIPS)
def test_the_recorded_values_give_the_full_pass_with_blocks_skipped(
    tiny: Tiny, family: str
) -> None:
    assert check_every_layer(tiny(family)) == set()


@pytest.mark.parametrize("family", RUNS_ALL)
def test_where_skipping_would_be_wrong_every_block_is_run_and_it_is_said(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    notes = check_every_layer(model)
    assert notes and all("Every block was run" in note for note in notes)
    assert try_skipping(model, model.anatomy.sites[0].stack).refused


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_shared_keys_and_values(name: str) -> None:
    unshared = hs.load((configured(name, num_kv_shared_layers=0), None))
    assert check_every_layer(unshared) == set()
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"num_kv_shared_layers": 2, "layer_types": kinds, **FOUR[name]}
    notes = check_every_layer(hs.load((configured(name, **changes), None)))
    assert notes and all("Every block was run" in note for note in notes)


@pytest.mark.filterwarnings("ignore")
def test_rwkv_whose_cache_a_skipped_block_would_not_fill() -> None:
    model = hs.load((configured("RwkvForCausalLM"), None))
    notes = check_every_layer(model)
    assert notes and all("Every block was run" in note for note in notes)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("eager", torch.float32), ("sdpa", torch.bfloat16)]
)
def test_in_another_dtype_and_kernel(kernel: str, dtype: torch.dtype) -> None:
    module = tiny_model("llama").to(dtype)
    module.set_attn_implementation(kernel)  # type: ignore[operator]
    assert check_every_layer(hs.load((module, None))) == set()


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_final_runs_just_the_head(tiny: Tiny, family: str) -> None:
    model, given = tiny(family), batches(tiny(family))[-1]
    full = hs.record(model, **given, logits=True)
    site = model.anatomy.select("final")[-1]
    again = hs.resume(
        model, model.encode(**given_texts(given)), "final", of(full.states, site)
    )
    assert torch.equal(again.logits, full.logits)  # type: ignore[arg-type]


def test_other_values_give_what_an_edit_gives(tiny: Tiny) -> None:
    model = tiny("llama")
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for k in range(4):
        edited = hs.edit(
            model,
            TEXTS,
            {f"layer.{k}": hs.Replace(values)},
            f"layer.{k}-3,final",
            logits=True,
        )
        resumed = hs.resume(model, TEXTS, f"layer.{k}", values)
        assert torch.equal(edited.logits, resumed.logits)  # type: ignore[arg-type]
        assert resumed.states.sites == edited.states.sites
        assert torch.equal(resumed.states.values, edited.states.values)  # type: ignore[union-attr]


def test_a_text_by_itself_and_three_axes(tiny: Tiny) -> None:
    model = tiny("llama")
    state = of(hs.record(model, TEXTS[0]).states, hs.Site(2))
    a = hs.resume(
        model,
        [TEXTS[0]] * 2,
        "layer.2",
        torch.stack([state, state]),
        "layer.3.mid,layer.3",
        logits=False,
    )
    assert a.logits is None
    assert [str(site) for site in a.states.sites] == ["layer.3.mid", "layer.3"]


def test_the_blocks_below_are_not_run(tiny: Tiny) -> None:
    model = tiny("llama")
    states = hs.record(model, TEXTS).states
    hs.resume(model, TEXTS, "layer.2", of(states, hs.Site(2)))
    run: list[int] = []
    layers: Any = model.module.model.layers  # type: ignore[union-attr]
    watches = [
        hooks.Watch(layers[k].self_attn, "output", lambda output, k=k: run.append(k))
        for k in range(3)
    ]
    with hooks.watching(watches):
        hs.resume(model, TEXTS, "layer.2", of(states, hs.Site(2)))
        hs.resume(model, TEXTS, "layer.3", of(states, hs.Site(3)))
        hs.resume(model, TEXTS, "final", of(states, hs.Site(None)))
    assert run == [2]


def test_parts_of_a_shared_block(tiny: Tiny) -> None:
    model = tiny("albert")
    full = hs.record(model, TEXTS, "layer.1,layer.3,layer.3.mid").states
    again = hs.resume(
        model, TEXTS, "layer.1", of(full, hs.Site(1)), "layer.3,layer.3.mid"
    )
    assert "called more than once" in again.notes[0]
    assert torch.equal(of(again.states, hs.Site(3, "mid")), of(full, hs.Site(3, "mid")))


BAD: list[tuple[Any, Any, Any, type[Error], str]] = [
    ("layer.2", torch.ones(8, 64), "layer.1", SiteError, "entered at layer.2"),
    ("layer.2.mid", torch.ones(8, 64), None, SiteError, "inside a block"),
    ("layer.*", torch.ones(8, 64), None, SiteError, "4 sites"),
    ("layer.7", torch.ones(8, 64), None, SiteError, "layer.7"),
    ("layer.2", torch.ones(7, 64), None, StatesError, "8 tokens"),
    ("layer.2", torch.ones(8, 65), None, StatesError, "64 wide"),
    ("layer.2", torch.ones(64), None, StatesError, "a row for each token"),
    ("layer.2", torch.full((8, 64), torch.nan), None, NotFinite, "NaN"),
]


def test_what_cannot_be_done_is_said(tiny: Tiny, hanging: Hanging) -> None:
    model = tiny("llama")
    before = hanging(model.module)
    for site, values, sites, kind, words in BAD:
        with pytest.raises(kind) as caught:
            hs.resume(model, TEXTS, site, values, sites)
        assert words in str(caught.value)
        assert hanging(model.module) == before


@pytest.mark.parametrize(
    "error", [RuntimeError("torn"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_nothing_is_left_behind_when_the_trial_is_torn(
    error: BaseException, hanging: Hanging
) -> None:
    model = hs.load((tiny_model("llama"), None))
    calls: list[None] = []
    values = of(hs.record(model, TEXTS).states, hs.Site(2))

    def tear(*_: Any) -> None:
        calls.append(None)
        if len(calls) > 1:  # the full pass is made, the first that skips is torn
            raise error

    model.module.model.layers[2].register_forward_hook(tear)  # type: ignore[union-attr, index]
    before = hanging(model.module)
    with pytest.raises(type(error)):
        hs.resume(model, TEXTS, "layer.2", values)
    assert hanging(model.module) == before


def test_a_final_of_another_width_can_be_entered_at() -> None:
    model = hs.load((tiny_model("deepseek_v4"), None))
    full = hs.record(model, [[5, 6, 7]], "final", logits=True)
    resumed = hs.resume(model, [[5, 6, 7]], "final", full.states["final"])
    assert [str(site) for site in resumed.states.sites] == ["final"]
    assert torch.equal(resumed.logits, full.logits)


@pytest.mark.parametrize(("family", "frozen"), [("gpt2", True), ("cpmant", False)])
def test_gradients_flow_back_to_where_the_pass_was_entered(
    family: str, frozen: bool
) -> None:
    module = tiny_model(family).requires_grad_(not frozen)
    model = hs.load((module, None))
    full = hs.record(model, [TEXTS[0]], "layer.2", logits=True, grad=True)
    resumed = hs.resume(model, [TEXTS[0]], "layer.2", full.states["layer.2"], grad=True)
    assert bool(resumed.notes) == (family == "cpmant")
    slopes = [
        torch.autograd.grad(made.logits[-1, 7], made.live[hs.Site(2)])[0]  # type: ignore[index]
        for made in (full, resumed)
    ]
    torch.testing.assert_close(slopes[0], slopes[1])
    assert slopes[0].abs().max() > 0
    assert hs.resume(model, [TEXTS[0]], "layer.2", full.states["layer.2"]).live == {}
    assert all(weight.grad is None for weight in module.parameters())
